"""A notebook: its kernel is ipykernel's, driven as Jupyter drives it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jupyter_client.manager import KernelManager

from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DEADLINE = 60.0
_FIRST_CELL = """
import os, time
from elastic_run import LaunchConfig, elastic_launch, spawn

def config(method):
    return LaunchConfig(1, 1, 2, rdzv_backend="local", start_method=method, max_restarts=0)

def work(x):
    print(f"hello from {os.environ['RANK']}", flush=True)
    return x + int(os.environ["RANK"])

def wait_forever(*_):
    open(os.environ["RANK"] if "RANK" in os.environ else str(_[0]), "w").write(str(os.getpid()))
    time.sleep(300)
"""


class Notebook:
    """Runs cells in one kernel."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(directory))
        self._client = self.manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(_DEADLINE)
        self.run(_FIRST_CELL)

    def run(self, cell: str, meanwhile: Callable[[], None] = lambda: None) -> str:
        """Run a cell; return what it shows, its result and its error among it."""
        request = self._client.execute(cell, allow_stdin=False)
        meanwhile()
        shown: list[str] = []
        while True:
            message = self._client.get_iopub_msg(timeout=_DEADLINE)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                shown.append(content["text"])
            elif kind == "execute_result":
                shown.append(content["data"]["text/plain"] + "\n")
            elif kind == "error":
                shown.append(f"{content['ename']}: {content['evalue']}\n")
            elif kind == "status" and content["execution_state"] == "idle":
                return "".join(shown)

    def close(self) -> None:
        """End the kernel."""
        self._client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    """Give a notebook of which the first cell has run."""
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_functions_of_cells_run_by_fork(notebook: Notebook, method: str) -> None:
    """A function that a cell has defined runs by fork, also by default; its output and the values come to the cell."""
    shown = notebook.run(f"elastic_launch(config({method!r}), work)(10)")
    assert "{0: 10, 1: 11}" in shown
    assert "hello from 0" in shown
    assert "hello from 1" in shown


def test_functions_of_cells_are_refused_by_a_fork_server(notebook: Notebook) -> None:
    """No other process can find a function of a cell: it is refused with advice, before anything starts."""
    shown = notebook.run("elastic_launch(config('forkserver'), work)(10)")
    assert "work" in shown
    assert "fork" in shown.replace("forkserver", "")
    assert "hello" not in shown
    assert notebook.run("open(f'/proc/self/task/{os.getpid()}/children').read().split()").strip() == "[]"


@pytest.mark.parametrize(
    "cell", ["elastic_launch(config('fork'), wait_forever)()", "spawn(wait_forever, nprocs=2, start_method='fork')"]
)
def test_the_stop_button_leaves_nothing(notebook: Notebook, cell: str) -> None:
    """Interrupting the kernel ends the launch at once, workers and all, and the next launch works."""
    began: list[float] = []

    def interrupt() -> None:
        files = [notebook.directory / str(rank) for rank in range(2)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), what="both workers run")
        began.append(time.monotonic())
        notebook.manager.interrupt_kernel()

    shown = notebook.run(cell, interrupt)
    assert "KeyboardInterrupt" in shown or "SignalException" in shown
    assert time.monotonic() - began[0] < 15
    for rank in range(2):
        assert not Path("/proc", (notebook.directory / str(rank)).read_text()).exists()
    assert "{0: 1, 1: 2}" in notebook.run("elastic_launch(config('fork'), work)(1)")


def test_the_kernels_death_takes_the_workers_along(notebook: Notebook) -> None:
    """Where the kernel is killed while a launch runs, its workers are gone two seconds later."""
    files = [notebook.directory / str(rank) for rank in range(2)]
    notebook._client.execute("elastic_launch(config('fork'), wait_forever)()")
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), what="both workers run")
    notebook.manager.shutdown_kernel(now=True)
    for file in files:
        wait_until(lambda file=file: not Path("/proc", file.read_text()).exists(), what="the worker is gone")  # type: ignore[misc]

"""Programs that start a job with `main` or `run`, as a site's own launcher or the start stub of an archive does."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

#: A program that registers a rendezvous backend of its own, which is used for a job of one node.
_REGISTERS = """
import sys
from elastic_run.rendezvous.api import rendezvous_handler_registry
from elastic_run.rendezvous.local import LocalRendezvousHandler
from elastic_run.run import main, parse_args, run

def make(params):
    print("backend", params.backend, flush=True)
    return LocalRendezvousHandler(params.run_id, backend=params.backend)

rendezvous_handler_registry.register("site-table", make)
if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(parse_args(sys.argv[2:]))
    else:
        main(sys.argv[2:])
"""


@pytest.mark.parametrize("door", ["main", "run"])
@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_a_backend_that_the_program_has_registered(
    door: str, source: str, launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """Its name is a value of --rdzv-backend, of the variable and of the file, and its handler runs the job."""
    (tmp_path / "site.py").write_text(_REGISTERS)
    (tmp_path / "job.toml").write_text('rdzv-backend = "site-table"\n')
    flags = {"flag": ["--rdzv-backend=site-table"], "file": ["--config=job.toml"]}.get(source, [])
    env = {"PET_RDZV_BACKEND": "site-table"} if source == "variable" else {}
    script = str(worker("say('rank', rank)"))
    job = launch(door, *flags, script, program=(sys.executable, "site.py"), env=env, cwd=tmp_path)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.splitlines() == ["backend site-table", "rank 0"]


def test_a_backend_that_is_not_there_is_named_with_the_registered_ones(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """The message about an unknown name lists the backends that the program has registered, too."""
    (tmp_path / "site.py").write_text(_REGISTERS)
    words = ("main", "--rdzv-backend=site-tabel", str(worker("")))
    job = launch(*words, program=(sys.executable, "site.py"), cwd=tmp_path)
    assert job.wait_exit() == 1
    assert "local, site-table, did you mean 'site-table'?" in job.stderr


@pytest.mark.parametrize("preload", [(), ("--preload=json",)], ids=["cold", "preload"])
def test_run_path_has_the_launchers_sys_path(preload: tuple[str, ...], launch: Launch, tmp_path: Path) -> None:
    """A worker of --run-path finds what a start stub has put on sys.path, in the same order."""
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "only_here.py").write_text("PLACE = 'libs'\n")
    (tmp_path / "stub.py").write_text(
        "import sys, pathlib\n"
        "from elastic_run.run import main\n"
        "here = pathlib.Path(__file__).parent\n"
        "sys.path[:0] = [str(here / 'libs'), here / 'of an importer', str(here / 'näh\\udcff ' )]\n"
        "if __name__ == '__main__':\n"
        "    print(ascii([entry for entry in sys.path if isinstance(entry, str)]), flush=True)\n"
        "    main(sys.argv[1:])\n"
    )
    (tmp_path / "train.py").write_text(
        "import sys, only_here\n"
        "print(ascii(sys.path), flush=True)\n"
        "assert (only_here.PLACE, __name__, sys.argv) == ('libs', '__main__', ['train.py', 'a'])\n"
    )
    words = (*preload, "--run-path", "train.py", "a")
    job = launch(*words, program=(sys.executable, "stub.py"), cwd=tmp_path)
    assert job.wait_exit() == 0, job.stderr
    launcher, workers = job.stdout.splitlines()
    assert workers == launcher
    assert "start cold" not in job.stderr


@pytest.mark.parametrize(
    ("port", "flags", "hint"),
    [
        ("23987", (), "The program meets at an address of its own"),
        ("{os.environ['MASTER_PORT']}", (), "Not all ranks have joined"),
        ("23987", ("--worker-store=rank0",), "Not all ranks have joined"),
    ],
)
def test_a_store_of_the_programs_own(
    port: str, flags: tuple[str, ...], hint: str, launch: Launch, worker: Worker
) -> None:
    """A client that finds nobody at another port than the job's gets the hint for that, if no rank is the server."""
    path = worker(
        "class DistNetworkError(RuntimeError): pass\n"
        f'address = f"(127.0.0.1, {port})"\n'
        "raise DistNetworkError(f'The client socket has timed out after 5000ms while trying to connect to {address}.')"
    )
    job = launch(*flags, path)
    assert job.wait_exit() == 1
    assert f"hint {hint}" in " ".join(job.stderr.split())

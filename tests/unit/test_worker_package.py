"""The worker package: heartbeats, stop requests, agreements, devices and sizes of parallel jobs, without torch."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.contract import ENV_HEARTBEAT_FILE, ENV_SCALE_UP_SIGNAL, ENV_STOP_TIME
from elastic_run.worker import heartbeats, stopping
from elastic_run.worker.parallel import mesh_shape, parallel_groups
from elastic_run.worker.place import Choice, PlaceError, WorkerError, choose_device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# --- heartbeats -------------------------------------------------------------------------------------------------------
#: A worker without a stdin, whose number its file may get, and a process that it forks.
_FORKS = """
import os
os.close(0)
from elastic_run.worker import heartbeats
heartbeats._INTERVAL = 0.0
heartbeats.heartbeat(1)
if not os.fork():
    heartbeats.heartbeat(2)
    os._exit(0)
os.wait()
"""


def test_heartbeats_are_written_five_times_a_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a thousand heartbeats in a second five are written, with their number; the first one at once."""
    file = tmp_path / "heartbeats"
    now = 0.0
    monkeypatch.setenv(ENV_HEARTBEAT_FILE, str(file))
    monkeypatch.setattr(heartbeats, "_pulse", heartbeats._Pulse())
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: now))
    seen: dict[str, float] = {}
    for step in range(1000):
        now = 50.0 + step / 1000
        heartbeats.heartbeat(step)
        seen.setdefault(file.read_text(encoding="ascii").strip(), step / 1000)
    assert [round(at, 1) for at in seen.values()] == [0.0, 0.2, 0.4, 0.6, 0.8]
    assert next(iter(seen)) == "1 step=0"
    assert all(f"{round(at * 1000) + 1} step={round(at * 1000)}" == line for line, at in seen.items())


def test_a_fork_does_not_heartbeat_for_its_parent(tmp_path: Path) -> None:
    """What a worker forks, such as a data loader, writes nothing: a worker that hangs would seem to be alive."""
    file = tmp_path / "heartbeats"
    subprocess.run([sys.executable, "-c", _FORKS], env={ENV_HEARTBEAT_FILE: str(file)}, check=True)
    assert file.read_text(encoding="ascii").split() == ["1", "step=1"]


# --- the signals by which a worker learns that it will be stopped -----------------------------------------------------
_NUMBERS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Give the signals that the program's own handlers have got; nothing was asked so far."""
    got: list[int] = []
    handlers = {number: signal.signal(number, lambda received, _: got.append(received)) for number in _NUMBERS}
    monkeypatch.setattr(stopping, "_watch", stopping._Watch())
    monkeypatch.setenv(ENV_SCALE_UP_SIGNAL, "SIGUSR1")
    monkeypatch.delenv(ENV_STOP_TIME, raising=False)
    yield got
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", _NUMBERS)
def test_a_signal_of_the_launcher_is_a_request_to_stop(earlier: list[int], number: int) -> None:
    """SIGTERM and --scale-up-signal, from the first question on; the program's own handler still gets it."""
    assert not stopping.stop_requested()
    signal.raise_signal(number)
    assert stopping.stop_requested()
    assert earlier == [number]


@pytest.mark.parametrize("name", ["", "SIGNOTHING"])
def test_without_a_signal_for_new_nodes_only_sigterm_counts(
    earlier: list[int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As where the launcher is torchrun."""
    monkeypatch.setenv(ENV_SCALE_UP_SIGNAL, name)
    assert not stopping.stop_requested()
    signal.raise_signal(signal.SIGUSR1)
    assert not stopping.stop_requested()
    assert earlier == [signal.SIGUSR1]


@pytest.mark.usefixtures("earlier")
def test_the_first_question_is_asked_in_the_main_thread() -> None:
    """Python allows handlers there only; later any thread may ask."""
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(stopping.stop_requested())
        except WorkerError as error:
            found.append(str(error).partition(" once")[0])

    for _ in range(2):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        stopping.stop_requested()
    assert found == ["call stop_requested()", False]


# --- backend and device -----------------------------------------------------------------------------------------------
FOUR_GPUS = {"local_rank": 2, "local_world_size": 4, "device_count": 4, "is_each_its_own": False}
NO_GPU = {**FOUR_GPUS, "device_count": 0}
OWN_GPU = {**FOUR_GPUS, "device_count": 1, "is_each_its_own": True}


@pytest.mark.parametrize(
    ("backend", "device", "machine", "choice"),
    [
        (None, None, FOUR_GPUS, Choice("nccl", "cuda:2")),
        (None, None, OWN_GPU, Choice("nccl", "cuda:0")),
        (None, None, NO_GPU, Choice("gloo", "cpu")),
        (None, "cpu", FOUR_GPUS, Choice("gloo", "cpu")),
        (None, "cuda", FOUR_GPUS, Choice("nccl", "cuda:2")),
        (None, "cuda:3", FOUR_GPUS, Choice("nccl", "cuda:3")),
        ("gloo", None, FOUR_GPUS, Choice("gloo", "cpu")),
        ("gloo", "cuda", FOUR_GPUS, Choice("gloo", "cuda:2")),
        ("nccl", None, FOUR_GPUS, Choice("nccl", "cuda:2")),
        ("cpu:gloo,cuda:nccl", None, FOUR_GPUS, Choice("cpu:gloo,cuda:nccl", "cuda:2")),
        ("xccl", "xpu:1", NO_GPU, Choice("xccl", "xpu:1")),
    ],
)
def test_the_choice(backend: str | None, device: str | None, machine: dict[str, Any], choice: Choice) -> None:
    """CUDA with NCCL where there is a GPU for the worker, gloo on the CPU elsewhere; what was asked for wins."""
    assert choose_device(backend, device, **machine) == choice


@pytest.mark.parametrize(
    ("backend", "device", "machine", "error", "message"),
    [
        ("nccl", "cpu", FOUR_GPUS, ValueError, "backend=nccl works on CUDA devices only, not on device=cpu"),
        ("nccl", None, NO_GPU, PlaceError, "backend=nccl, device=cuda: this process sees no CUDA device"),
        (None, "cuda", NO_GPU, PlaceError, "device=cuda: this process sees no CUDA device"),
        (
            None,
            None,
            {**FOUR_GPUS, "device_count": 2},
            PlaceError,
            "local rank 2 of 4 has no CUDA device of its own, 2",
        ),
        (
            None,
            None,
            {**OWN_GPU, "is_each_its_own": False},
            PlaceError,
            "device of its own, 1 seen from here: start fewer",
        ),
    ],
)
def test_no_device_for_a_worker(
    backend: str | None, device: str | None, machine: dict[str, Any], error: type[Exception], message: str
) -> None:
    """What can't be had is said before anything hangs, with the numbers."""
    with pytest.raises(error) as caught:
        choose_device(backend, device, **machine)
    assert message in str(caught.value)


@pytest.mark.parametrize(("device", "index"), [("cuda:3", 3), ("cpu", None), ("xpu:1", None)])
def test_the_index_of_a_device(device: str, index: int | None) -> None:
    """Only CUDA devices have one to bind."""
    assert Choice("x", device).index == index


# --- sizes of a job that is parallel in several ways ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("world_size", "sizes", "shape"),
    [
        (8, {"data": None, "pipeline": 1, "model": 1}, (1, 8, 1)),
        (8, {"data": None, "pipeline": 2, "model": 2}, (2, 2, 2)),
        (12, {"data": 2, "pipeline": 3, "model": 2}, (3, 2, 2)),
        (1, {"data": 1, "pipeline": 1, "model": 1}, (1, 1, 1)),
    ],
)
def test_sizes_make_a_mesh(world_size: int, sizes: dict[str, int], shape: tuple[int, int, int]) -> None:
    """What isn't given of data parallelism is what the others leave."""
    assert mesh_shape(world_size, **sizes) == shape


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 2, "pipeline": 1, "model": 2}, "data=2 x pipeline=1 x model=2 = 4, but the world size is 6"),
        ({"data": None, "pipeline": 2, "model": 2}, "= 4, but the world size is 6"),
        ({"data": 0, "pipeline": 1, "model": 1}, "data=0: a size is a whole number from 1 up"),
        ({"data": None, "pipeline": -1, "model": 1}, "pipeline=-1: a size is a whole number from 1 up"),
        ({"data": None, "pipeline": 1, "model": 1.5}, "model=1.5: a size is a whole number from 1 up"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], message: str) -> None:
    """The error has both numbers: the product and the world size."""
    with pytest.raises(ValueError, match="size") as caught:
        mesh_shape(6, **sizes)
    assert message in str(caught.value)


def test_groups_need_a_process_group() -> None:
    """Whoever asks for groups before `init_distributed` is told to call it."""
    with pytest.raises(WorkerError, match=r"call init_distributed\(\) first"):
        parallel_groups()

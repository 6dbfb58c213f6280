"""The GPU use of processes, from a management library that the test gives."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from elastic_run.agent.driver import slow_rank, worker_readings
from elastic_run.cluster import devices
from elastic_run.cluster.devices import GpuClock, GpuUse
from elastic_run.loop import Loop


class NVMLError(Exception):
    """The library's root of errors."""


class NVMLError_NotFound(NVMLError):  # noqa: N801, N818 - the library's name
    """What was asked for is not there."""


class Library(ModuleType):
    """A management library of three GPUs: one of two processes, one of one process and without a figure, one lost."""

    NVMLError = NVMLError
    NVMLError_NotFound = NVMLError_NotFound

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.is_open = False

    def nvmlInit(self) -> None:  # noqa: N802 - the library's names, here and below
        """Open it."""
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        """Close it."""
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        """Return the number of GPUs."""
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        """Return a GPU."""
        if index == 2:
            raise NVMLError
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[SimpleNamespace]:  # noqa: N802
        """Return the processes of a GPU."""
        pids = {0: (10, 11), 1: (10,)}[device]
        return [SimpleNamespace(pid=pid, usedGpuMemory=None if pid == 11 else 100) for pid in pids]

    def nvmlDeviceGetUtilizationRates(self, device: int) -> SimpleNamespace:  # noqa: N802
        """Return the figures of a GPU."""
        if device == 1:
            raise NVMLError
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetProcessUtilization(self, _device: int, _since: int) -> list[SimpleNamespace]:  # noqa: N802
        """Return the share of each process, which not all GPUs tell."""
        raise NVMLError


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Install the library."""
    made = Library()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(devices, "has_library", lambda: True)
    return made


def test_the_use_of_all_gpus_is_added_up(library: Library) -> None:
    """A GPU that is lost, a figure that is missing and memory that is not told are left out."""
    assert devices.read_gpu_use() == {10: GpuUse(97.0, 200, computes=True), 11: GpuUse(97.0, None, computes=True)}
    assert not library.is_open


def test_a_process_beside_one_that_computes_does_not_compute(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver tells the share of each process, the GPU's figure does not count."""
    samples = [_sample(10, smUtil=97), _sample(11)]
    monkeypatch.setattr(library, "nvmlDeviceGetProcessUtilization", lambda _device, _since: samples)
    found = devices.read_gpu_use()
    assert {pid: use.computes for pid, use in found.items()} == {10: True, 11: False}


def test_only_the_last_seconds_tell_whether_a_process_computes(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is asked for samples since a moment that has passed, in microseconds; it takes one each second."""
    asked: list[float] = []

    def note(_device: int, since: int) -> list[SimpleNamespace]:
        asked.append(time.time() - since / 1e6)
        return []

    monkeypatch.setattr(library, "nvmlDeviceGetProcessUtilization", note)
    devices.read_gpu_use()
    assert all(1 < seconds < 60 for seconds in asked)


def test_a_driver_without_samples_tells_that_nobody_computed(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so by an error, which is not that of a driver that can't tell."""

    def fail(_device: int, _since: int) -> None:
        raise NVMLError_NotFound

    monkeypatch.setattr(library, "nvmlDeviceGetProcessUtilization", fail)
    assert not any(use.computes for use in devices.read_gpu_use().values())


def _sample(pid: int, **used: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, **({"smUtil": 0, "memUtil": 0, "encUtil": 0, "decUtil": 0} | used))


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_machine_without_a_driver_has_none(library: Library, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It is no error."""

    def fail() -> None:
        raise library.NVMLError

    monkeypatch.setattr(library, name, fail)
    assert devices.read_gpu_use() == {}


def make_context(loop: Loop) -> Any:
    """Make the context of an agent that has asked for nothing yet."""
    return SimpleNamespace(loop=loop, gpu_thread=None)


def ask(context: Any) -> dict[int, GpuUse]:
    """Ask, and turn the loop until the answer is there."""
    found: list[dict[int, GpuUse]] = []
    worker_readings.ask_gpu_use(context, found.append)
    assert context.loop.run_until(lambda: bool(found), context.loop.now() + 20)
    return found[0]


@pytest.mark.usefixtures("library")
def test_the_loop_gets_the_answer() -> None:
    """From a thread."""
    with Loop() as loop:
        assert set(ask(make_context(loop))) == {10, 11}


def test_a_driver_that_hangs_holds_nothing_up(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer comes without GPUs, and no second thread is left behind."""
    gate = threading.Event()
    monkeypatch.setattr(library, "nvmlInit", gate.wait)
    monkeypatch.setattr(worker_readings, "_GPU_WAIT", 0.05)
    with Loop() as loop:
        context = make_context(loop)
        assert ask(context) == {}
        before = threading.active_count()
        assert ask(context) == {}
        assert threading.active_count() == before
        gate.set()
        context.gpu_thread.join(20)


def test_without_the_library_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no thread is started."""
    monkeypatch.setattr(devices, "has_library", lambda: False)
    with Loop() as loop:
        context = make_context(loop)
        assert ask(context) == {}
        assert context.gpu_thread is None


def test_the_clocks_of_gpus_are_read_with_what_holds_them_down(library: Library) -> None:
    """A process with two GPUs has the clock of the slower one; a GPU that is lost is left out."""
    clocks = {0: 1005, 1: 1980}
    library.NVML_CLOCK_SM = 1  # type: ignore[attr-defined]
    library.nvmlDeviceGetClockInfo = lambda device, _: clocks[device]  # type: ignore[attr-defined]
    library.nvmlDeviceGetMaxClockInfo = lambda *_: 1980  # type: ignore[attr-defined]
    library.nvmlDeviceGetCurrentClocksThrottleReasons = lambda _: 0x60  # type: ignore[attr-defined]
    hot = GpuClock(0, 1005, 1980, ("thermal",))
    assert devices.read_gpu_clocks() == {10: hot, 11: hot}


@pytest.mark.parametrize(("others", "reasons"), [((1980, 1005), ("thermal",)), ((), ("thermal",)), ((1980,), ())])
def test_the_reason_of_a_slow_rank_is_its_gpu(
    others: tuple[int, ...], reasons: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock is clearly lower than the usual one of the others, and the driver says why."""
    clocks = {9: GpuClock(5, 1005, 1980, reasons)}
    clocks |= {index: GpuClock(index, other, 1980, reasons) for index, other in enumerate(others)}
    monkeypatch.setattr(devices, "has_library", lambda: True)
    monkeypatch.setattr(devices, "read_gpu_clocks", lambda: clocks)
    first = slow_rank.read_counters([9])
    assert slow_rank.find_reason(5, 0.2, {5: 9}, first) == (
        "GPU 5 runs at 1,005 of 1,980 MHz (thermal)" if reasons else ""
    )

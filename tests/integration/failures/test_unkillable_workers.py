"""Workers that SIGKILL does not end, or not at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import wait_gone
from tests.support.system import require_marker, starter
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.support.launch import Launch, Worker


#: A launcher whose SIGKILL has no effect.
_BLUNT = (
    sys.executable,
    "-c",
    (
        "from elastic_run.multiprocessing import process_table; process_table.kill_all = lambda *_: None; "
        "from elastic_run.__main__ import main; main()"
    ),
)
#: A piece of its code: a worker that lives on is given up sooner than users wait for it.
_SOON_GIVEN_UP = "from elastic_run.core.agent import shutdown; shutdown.KILL_WAIT, shutdown._LOOK = 0.7, 0.1; "


@pytest.mark.parametrize("is_frozen", [False, pytest.param(True, marks=pytest.mark.system)])
def test_unkillable_worker(launch: Launch, worker: Worker, tmp_path: Path, *, is_frozen: bool) -> None:
    """A worker that SIGKILL does not end never wedges the launcher: it is named, with an exit code of its own."""
    path = worker("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("ready", os.getpid())
        while True: signal.pause()
    """)
    # Only root can really freeze a process; for others the launcher's SIGKILL goes nowhere, which looks the same to it.
    freezer = _make_freezer(tmp_path) if is_frozen else None
    job = launch(
        "--standalone",
        "--shutdown-timeout=1",
        path,
        program=(sys.executable, "-m", "elastic_run") if freezer else _BLUNT,
    )
    pid = int(job.wait_line(r"ready (\d+)")[1])
    try:
        if freezer:
            freezer.freeze(pid)
        job.send(signal.SIGTERM)
        # The frozen worker still holds the launcher's stdout: only the launcher's end can be waited for.
        assert job.process.wait(30) == 143
    finally:
        if freezer:
            freezer.thaw()
        else:
            os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    job.wait_exit()
    assert f"pid {pid}" in job.stderr


def test_a_worker_that_sigkill_does_not_end_has_an_exit_code_of_its_own(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """After a failure with an unkillable sibling the launcher ends with 203 and names the process."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    path = worker(f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("ready", os.getpid())
        if rank == 1:
            open({str(gate)!r}).read()  # until the other one is ready
            sys.exit(7)
        open({str(gate)!r}, "w").close()
        while True: signal.pause()
    """)
    program = (*_BLUNT[:2], _SOON_GIVEN_UP + _BLUNT[2])  # the test above waits as long as users do
    job = launch("--standalone", "--nproc-per-node=2", "--shutdown-timeout=1", path, program=program)
    pids = [int(match[1]) for match in job.wait_lines(r"ready (\d+)", count=2)]
    assert job.process.wait(30) == 203
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
    job.wait_exit()
    assert any(f"pid {pid}" in job.stderr for pid in pids)


def test_a_worker_that_takes_long_to_give_back_its_memory_is_waited_for(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """One that SIGKILL ends late, while its memory shrinks, is no unkillable worker: the job is restarted."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    path = worker(f"""
        import mmap
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("ready")
        if attempt:
            sys.exit(0)
        if rank == 1:
            open({str(gate)!r}).read()  # until the other one has its memory
            sys.exit(7)
        blocks = [mmap.mmap(-1, 1 << 18) for _ in range(40)]
        for block in blocks:
            block.write(b"x" * len(block))
        open({str(gate)!r}, "w").close()
        while blocks:
            blocks.pop().close()
            time.sleep(0.05)
    """)
    # Its SIGKILL has no effect, which looks to the launcher as if the kernel took its time.
    flags = ("--standalone", "--nproc-per-node=2", "--shutdown-timeout=0", "--max-restarts=1")
    job = launch(*flags, path, program=(*_BLUNT[:2], _SOON_GIVEN_UP + _BLUNT[2]))
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.count("ready") == 4


def test_a_worker_in_uninterruptible_sleep_is_noticed(launch: Launch, worker: Worker) -> None:
    """With TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT a worker stuck in the kernel ends the job without a restart."""
    # A parent waits for its vfork child in state D: the child is there until it is killed.
    path = worker("""
        say("ready")
        import ctypes
        libc = ctypes.CDLL(None)
        if libc.vfork() == 0:
            libc.pause()
    """)
    env = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "1"}
    job = launch("--standalone", "--max-restarts=3", "--shutdown-timeout=1", path, env=env)
    job.wait_line("ready")
    assert job.wait_exit(deadline=40) == 203
    assert job.stdout.count("ready") == 1


class _Freezer:
    """A version 1 freezer group: the tasks in it are in uninterruptible sleep, and SIGKILL waits for the thaw."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def freeze(self, pid: int) -> None:
        """Put a process into the group and freeze it."""
        self._write("cgroup.procs", str(pid))
        self._write("freezer.state", "FROZEN")

        def is_frozen() -> bool:
            return (self.root / "freezer.state").read_text().strip() == "FROZEN"

        wait_until(is_frozen)

    def thaw(self) -> None:
        """Let it go on."""
        self._write("freezer.state", "THAWED")

    def _write(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)


@starter
def _make_freezer(tmp_path: Path) -> _Freezer:
    require_marker("root, for a control group")
    mount = Path("/sys/fs/cgroup/freezer")
    if not (mount / "cgroup.procs").exists():
        mount = tmp_path / "freezer"
        mount.mkdir()
        subprocess.run(["mount", "-t", "cgroup", "-o", "freezer", "freezer", mount], check=True)
    group = mount / f"elastic-run-test-{os.getpid()}"
    group.mkdir(exist_ok=True)
    return _Freezer(group)

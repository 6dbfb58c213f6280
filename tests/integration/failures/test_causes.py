"""The cause in the report: the last exception of a rank, and ranks that fail or hang late."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.local_rendezvous import place
from tests.support.sessions import free_port
from tests.support.wait import DEADLINE, stretched, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch, Launched, Worker


# --- the exception that a rank died of --------------------------------------------------------------------------------
#: Captured, tee'd, and written by the worker itself.
FLAGS = ("", "--tee=2", "--redirects=2")
UNCERTAIN = "the last exception on its stderr, with more output after it:"
#: Writes lines of a thread of its own, or at the exit.
LINES = """
import atexit, threading
def write_lines(count, word="step"):
    for start in range(0, count, 10_000):
        sys.stderr.write("".join(f"{word} {number}\\n" for number in range(start, min(count, start + 10_000))))
def load():
    raise ValueError("batch 17 is broken")
"""


def run(launch: Launch, path: Path, directory: Path, flags: str = "") -> tuple[str, dict[str, Any]]:
    """Run a program that ends with exit code 1; return the report's text and failure.json's root cause."""
    job = launch(*([flags] if flags else []), f"--log-dir={directory}", path)
    assert job.wait_exit() == 1
    report = job.stderr.rpartition("-- elastic-run: ")[2]
    (failure,) = directory.glob("*_*/failure.json")
    return report, json.loads(failure.read_text(encoding="utf-8"))["root_cause"]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    "count", [30, 31, *(pytest.param(count, marks=pytest.mark.soak) for count in (10_000, 1_000_000))]
)
def test_an_exception_is_found_before_any_number_of_lines(
    launch: Launch, worker: Worker, tmp_path: Path, flags: str, count: int
) -> None:
    """An exit handler writes them; beyond 30 the report says that the exception may have been handled."""
    path = worker(f"{LINES}\natexit.register(write_lines, {count})\nload()")
    report, root = run(launch, path, tmp_path, flags)
    assert "ValueError: batch 17 is broken" in report
    assert "in load" in report
    assert root["exception"]["type"] == "ValueError"
    assert (UNCERTAIN in report, root["exception"]["is_certain"]) == (count > 30, count <= 30)
    assert f"step {count - 1}" in report


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("length", [1 << 16, 1 << 20, pytest.param(10_000_000, marks=pytest.mark.soak)])
def test_an_exception_is_found_behind_a_message_of_many_lines(
    launch: Launch, worker: Worker, tmp_path: Path, flags: str, length: int
) -> None:
    """As a checkpoint's missing keys make one; also when more lines follow."""
    path = worker(f"""
{LINES}
atexit.register(write_lines, 100)
def load():
    lines = [f"\\tlayer.{{n}}.weight \\u00e4\\u20ac\\n" for n in range({length} // 20)]
    raise KeyError("missing keys:\\n" + "".join(lines))
load()
""")
    report, root = run(launch, path, tmp_path, flags)
    assert root["exception"]["message"].lstrip("'").startswith("missing keys:")
    assert "KeyError: 'missing keys:" in report
    assert "in load" in report


@pytest.mark.parametrize("flags", FLAGS)
def test_an_exception_is_found_between_the_lines_of_threads(
    launch: Launch, worker: Worker, tmp_path: Path, flags: str
) -> None:
    """Four threads write before, between and after its lines, and tear none of them."""
    path = worker(f"""
{LINES}
sys.stderr = open(2, "w", buffering=1, closefd=False)  # whole lines, where the interpreter writes their parts
begun = threading.Barrier(5)
def talk(word):
    for number in range(5_000):
        os.write(2, f"{{word}} {{number}}\\n".encode())
        if number == 100: begun.wait()
for word in ("load", "step", "save", "send"):
    threading.Thread(target=talk, args=(word,)).start()
begun.wait()
load()
""")
    report, root = run(launch, path, tmp_path, flags)
    assert "ValueError: batch 17 is broken" in report
    assert root["exception"]["type"] == "ValueError"


CHAIN = """
try:
    try:
        raise OSError(28, "No space left on device")
    except OSError as full:
        raise RuntimeError("could not save the checkpoint") from full
except RuntimeError as failed:
    raise ValueError("training step failed") from failed
"""


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("count", [100, pytest.param(30_000, marks=pytest.mark.long)])
def test_what_an_exception_came_from_is_kept_with_it(
    launch: Launch, worker: Worker, tmp_path: Path, flags: str, count: int
) -> None:
    """The exceptions of a chain, whatever follows them."""
    path = worker(f"{LINES}\natexit.register(write_lines, {count})\n{CHAIN}")
    report, _ = run(launch, path, tmp_path, flags)
    for text in ("ValueError: training step failed", "caused by OSError: [Errno 28] No space left on device (by"):
        assert text in " ".join(report.split()), report


def test_an_exception_is_found_between_progress_bars(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """They end in carriage returns, stand in the traceback's first line, and hold characters of several bytes."""
    path = worker(f"""
{LINES}
def show_progress(count):
    for number in range(count):
        sys.stderr.write(f"\\r 50%|\\u2588\\u2588\\u2588\\u258c   | {{number}}/9")
        sys.stderr.flush()
atexit.register(show_progress, 20_000)
show_progress(20_000)
load()
""")
    report, root = run(launch, path, tmp_path)
    assert "ValueError: batch 17 is broken" in report
    assert root["exception"]["where"].endswith("in load")


def test_an_exception_that_was_handled_long_ago_is_not_called_the_cause(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """Before `sys.exit(1)` and much output it is named as the last one, with the last lines of stderr."""
    path = worker(f"""
{LINES}
import traceback
try: load()
except ValueError: traceback.print_exc()
write_lines(50_000)
sys.exit("the data server is gone")
""")
    report, root = run(launch, path, tmp_path)
    assert UNCERTAIN in report
    assert "the data server is gone" in report
    assert not root["exception"]["is_certain"]


def test_an_exception_within_a_flood_is_found(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Where an exception waits in the middle of a full pipe the report names it."""
    path = worker(f"""
import fcntl, termios, traceback
size = fcntl.fcntl(2, 1032)
def bytes_in(): return int.from_bytes(fcntl.ioctl(2, termios.FIONREAD, bytes(4)), sys.byteorder)
try: raise ValueError("batch 17 is broken")
except ValueError: text = traceback.format_exc().encode()
os.kill(os.getppid(), signal.SIGSTOP)
half = b"step\\n" * (size // 10 - 1000)
os.write(2, half + text + half)
open({str(tmp_path / "filled")!r}, "w").close()
while bytes_in(): time.sleep(0.01)
sys.exit(1)
""")
    job = launch(f"--log-dir={tmp_path}", path)
    wait_until((tmp_path / "filled").exists)
    os.kill(job.pid, signal.SIGCONT)
    assert job.wait_exit() == 1
    report = job.stderr.rpartition("-- elastic-run: ")[2]
    assert "ValueError: batch 17 is broken" in report
    assert UNCERTAIN in report


# --- causes that come late --------------------------------------------------------------------------------------------
#: What the launcher says while it waits.
AWAITED = "a worker has lost a peer"
#: A worker that lets its peers go and is busy, until a gate is opened, before its exception ends it.
CLEANS_UP = "say('cleans up')\n        open(sys.argv[1]).read()"
COLLECTIVE = f"""
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if rank == 1:
    # The cause is awaited for five seconds, in which a busy machine may not unload torch.
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(1))
    try:
        raise ValueError("batch 17 is broken")
    finally:
        dist.destroy_process_group()
        {CLEANS_UP}
dist.all_reduce(torch.ones(1))
"""
#: What gloo says of a peer that is gone.
LOST = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:13965"
#: The same without torch, for nodes of one worker each: rank 0 is the one that is lost a peer.
ALONE = f"""
if rank == 1:
    try:
        raise ValueError("batch 17 is broken")
    finally:
        {CLEANS_UP}
raise RuntimeError({LOST!r})
"""


def make_gate(program: Path) -> Path:
    """Return a file whose reader waits until it is opened for writing."""
    gate = program.with_name("gate")
    os.mkfifo(gate)
    return gate


def open_gate(gate: Path) -> None:
    """Let its reader go."""
    with gate.open("w"):
        pass


def is_cause(agent: Launched) -> bool:
    """Whether an agent's report names the worker that cleaned up."""
    report = " ".join(agent.stderr.split())
    return "cause rank 1 on " in report and "ValueError: batch 17 is broken" in report.partition("others")[0]


@pytest.mark.long
def test_the_cause_is_awaited_on_one_node(launch: Launch, worker: Worker) -> None:
    """Gloo's "connection closed by peer" stops nobody while the worker that closed it still cleans up."""
    path = worker(COLLECTIVE)
    gate = make_gate(path)
    job = launch("--nproc-per-node=3", "--preload=torch", path, gate)
    job.wait_line("cleans up")
    job.wait_line(AWAITED)
    open_gate(gate)
    assert job.wait_exit() == 1
    assert is_cause(job), job.stderr


def test_the_cause_is_awaited_on_all_nodes(launch: Launch, worker: Worker) -> None:
    """A node that lost all its workers as a consequence makes no other node stop the one that has the cause."""
    path = worker(ALONE)
    gate = make_gate(path)
    port = free_port()
    agents = [launch(*place(port), "--nnodes=2", f"--node-rank={rank}", path, gate) for rank in range(2)]
    agents[1].wait_line("cleans up")
    agents[0].wait_line(AWAITED)
    open_gate(gate)
    assert [agent.wait_exit() for agent in agents] == [1, 1]
    assert all(map(is_cause, agents)), [agent.stderr for agent in agents]


def test_the_cause_is_not_awaited_for_ever(launch: Launch, worker: Worker) -> None:
    """Who has nothing to say is stopped after no longer than workers get to stop, and the report has what there is."""
    path = worker(f"if rank == 0:\n    raise RuntimeError({LOST!r})\nsignal.pause()")
    job = launch("--nproc-per-node=2", "--shutdown-timeout=1", path)
    job.wait_line(AWAITED)
    begun = time.monotonic()
    assert job.wait_exit() == 1
    assert time.monotonic() - begun < stretched(DEADLINE / 2)
    assert "cause rank 0 on " in " ".join(job.stderr.split())


STUCK = """
import datetime, torch, torch.distributed as dist
def save_checkpoint(*_):
    time.sleep(600)
def load_batch():
    signal.signal(signal.SIGTERM, {})
    os.kill(os.getpid(), signal.{})
    time.sleep(600)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
group = dist.new_group(timeout=datetime.timedelta(seconds=2))
if rank == 1:
    load_batch()
dist.all_reduce(torch.ones(1), group=group)
"""


@pytest.mark.parametrize(
    ("handler", "sent", "named"),
    [
        pytest.param(
            "signal.SIG_DFL",
            "SIGSTOP",
            "cause rank 1 is stopped (SIGSTOP, or a shell's job control): it did not stop",
            id="stopped",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "lambda *_: None",
            "SIGCONT",
            "cause rank 1 is in load_batch (worker1.py:",
            id="asleep",
            marks=pytest.mark.long,
        ),
        pytest.param("save_checkpoint", "SIGCONT", "cause rank 0 on ", id="saves", marks=pytest.mark.long),
    ],
)
def test_of_two_ranks_the_one_that_was_stuck_before_the_stop_is_the_cause(
    launch: Launch, worker: Worker, handler: str, sent: str, named: str
) -> None:
    """The other one waited for it, until gloo's timeout; a rank that saves a checkpoint because of the stop is not."""
    flags = ("--nproc-per-node=2", "--preload=torch", "--shutdown-timeout=1")
    job = launch(*flags, worker(STUCK.format(handler, sent)))
    assert job.wait_exit() == 1
    assert named in " ".join(job.stderr.split()), job.stderr


@pytest.mark.parametrize("code", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(7)", "raise ValueError('own')"])
def test_a_true_cause_is_not_awaited(launch: Launch, worker: Worker, code: str) -> None:
    """A signal, an exit code or an exception of the program's own stops the others at once, also in the wait."""
    path = worker(
        f"if rank == 0:\n    raise RuntimeError({LOST!r})\n"
        f"if rank == 1:\n    open(sys.argv[1]).read()\n    {code}\n"
        "def told(*_):\n    say('told')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, told)\nsay('there')\nsignal.pause()\n"
    )
    gate = make_gate(path)
    job = launch("--nproc-per-node=3", path, gate)
    job.wait_line("there")
    job.wait_line(AWAITED)
    open_gate(gate)
    begun = time.monotonic()
    job.wait_line("told")
    assert time.monotonic() - begun < stretched(2)
    assert job.wait_exit() in (128 + signal.SIGKILL, 7, 1)
    assert "cause rank 1 on " in " ".join(job.stderr.split())


@pytest.mark.parametrize(
    "error",
    [
        "ConnectionResetError(104, 'Connection reset by peer')",
        "type('OperationalError', (Exception,), {})('connection to server at db failed: Connection refused')",
    ],
)
def test_a_connection_that_the_program_itself_has_lost_is_not_awaited(
    launch: Launch, worker: Worker, error: str
) -> None:
    """A database or a data server that is gone is a rank's own failure: the others are told at once."""
    job = launch("--nproc-per-node=2", worker(f"if rank == 0:\n    raise {error}\nsignal.pause()"))
    assert job.wait_exit() == 1
    assert AWAITED not in job.stderr
    assert "cause rank 0 on " in " ".join(job.stderr.split())


@pytest.mark.parametrize("length", [70_000, 10_000_000])
@pytest.mark.parametrize("flags", ["", "--tee=2", "--redirects=2", "--redirects=1"])
def test_a_message_of_megabytes_hides_no_cause(
    launch: Launch, worker: Worker, tmp_path: Path, flags: str, length: int
) -> None:
    """Whichever way stderr goes; a log file that the worker writes alone is searched."""
    path = worker(f"def load():\n    raise KeyError('layer.0 ' + 'x' * {length})\nload()")
    job = launch(*([flags, f"--log-dir={tmp_path}"] if flags else []), path)
    assert job.wait_exit() == 1
    report = job.stderr.rpartition("-- elastic-run: ")[2]
    assert "KeyError: 'layer.0 xxx" in report
    assert "in load" in report


def test_a_chain_names_its_beginning(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The first of three exceptions is the one that happened; the report and failure.json have it."""
    path = worker("""
        def step(error, cause):
            try:
                if cause: cause()
            except Exception as before:
                raise error from before
            raise error
        full = OSError(28, "No space left on device", "/data/ckpt.pt")
        save = RuntimeError("could not save checkpoint")
        step(RuntimeError("training step failed"), lambda: step(save, lambda: step(full, None)))
    """)
    job = launch(f"--log-dir={tmp_path}", path)
    assert job.wait_exit() == 1
    report = " ".join(job.stderr.split())
    assert "RuntimeError: training step failed caused by OSError: [Errno 28] No space left on device" in report
    (failure,) = tmp_path.glob("*_*/failure.json")
    cause = json.loads(failure.read_text(encoding="utf-8"))["root_cause"]["exception"]["cause"]
    assert cause == (
        "OSError: [Errno 28] No space left on device: '/data/ckpt.pt' "
        "(by way of RuntimeError: could not save checkpoint)"
    )

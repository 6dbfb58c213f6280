"""Processes that leave a worker's session are found; processes that the job did not start are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.multiprocessing.fork_exec import read_name
from elastic_run.multiprocessing.process_table import read_stat, signal_processes
from tests.support.launch import ELASTIC_RUN
from tests.support.processes import children_of, is_gone, kill_processes, wait_gone
from tests.support.programs import write_plugin, write_program
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.launch import Launch, Worker


# --- descendants that leave session, environment and parent: found as the launcher's orphans --------------------------
#: Begins a process without the environment in a session of its own, which says its pid in a file.
_ESCAPE = """
escape = "{environment} setsid sh -c 'echo $$ > {path}.new; mv {path}.new {path}; exec sleep 1000'"
if {is_orphan}:
    subprocess.run(["sh", "-c", f"({{escape}} &)"])
else:
    child = subprocess.Popen(["sh", "-c", f"exec {{escape}}"])
while not os.path.exists({path!r}): time.sleep(0.005)
"""
_LIMIT = 2.0


class Escape:
    """A process that leaves its worker.

    Args:
        path: The file in which it says its pid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def program(self, rest: str, *, is_orphan: bool = True, environment: str = "env -i") -> str:
        """Return a worker that begins it, and goes on."""
        return _ESCAPE.format(path=str(self.path), environment=environment, is_orphan=is_orphan) + rest

    @property
    def pid(self) -> int:
        """Its pid, once it is there."""
        wait_until(self.path.exists, what="the escaped process")
        return int(self.path.read_text())


@pytest.fixture
def escape(tmp_path: Path) -> Iterator[Escape]:
    """Make a process that leaves its worker; it is killed at the end."""
    made = Escape(tmp_path / "escaped")
    yield made
    if made.path.exists():
        kill_processes([made.pid])


def test_after_a_failure(launch: Launch, worker: Worker, escape: Escape) -> None:
    """It ends with the job, and holds nobody's pipe."""
    path = worker(escape.program("sys.exit(7)"))
    job = launch("--standalone", "--shutdown-timeout=1", path)
    assert job.wait_exit() == 7, job.stderr
    assert is_gone(escape.pid)


def test_after_a_success_it_is_named(launch: Launch, worker: Worker, escape: Escape) -> None:
    """It is a background process like any other: it lives on, and a line names it."""
    job = launch("--standalone", worker(escape.program("")))
    assert job.process.wait(60) == 0
    job.wait_line(rf"1 background process of the workers keeps running: pid {escape.pid} \(sleep 1000\)")
    assert not is_gone(escape.pid)
    kill_processes([escape.pid])
    job.wait_exit()


def test_after_the_launcher_was_killed(launch: Launch, worker: Worker, escape: Escape) -> None:
    """The guardian knows it as a child of the worker."""
    job = launch("--standalone", worker(escape.program("say('ready')\nsignal.pause()", is_orphan=False)))
    job.wait_line("ready")
    job.send(signal.SIGKILL)
    wait_gone(escape.pid, deadline=_LIMIT)
    job.wait_exit()


def test_inside_a_program(worker: Worker, escape: Escape, tmp_path: Path) -> None:
    """A program around the job is no subreaper, and its own children are left alone; the environment is known."""
    path = worker(escape.program("sys.exit(7)", environment=""))
    host = write_program(
        tmp_path / "host.py",
        "import subprocess, sys\n"
        "from elastic_run.launcher import LaunchConfig, elastic_launch\n"
        "from elastic_run.multiprocessing.errors import ChildFailedError\n",
        "",
        f"""
own = subprocess.Popen(["sleep", "1000"], start_new_session=True)
config = LaunchConfig(1, 1, 1, rdzv_backend="local", max_restarts=0)
try: elastic_launch(config, sys.executable)({str(path)!r})
except ChildFailedError as error: print("failed")
print("own", own.poll())
own.kill()
print("own", own.wait())
""",
    )
    import subprocess

    done = subprocess.run([sys.executable, host], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["failed", "own", "None", "own", "-9"], done
    assert is_gone(escape.pid)


_PLUGIN = """
import subprocess, threading
from elastic_run.multiprocessing import DefaultLogsSpecs

def run(word, codes):
    for _ in range(60):
        codes.append(subprocess.run(["sh", "-c", "exit 3"], start_new_session=word == "new").returncode)

def run_all(gate):
    codes = []
    threads = [threading.Thread(target=run, args=(word, codes)) for word in ("new", "new", "own", "own")]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    open(gate, "w").write(f"{len(codes)} {set(codes)}")

class Busy(DefaultLogsSpecs):
    def reify(self, envs):
        import os
        threading.Thread(target=run_all, args=(os.environ["GATE"],), daemon=True).start()
        return super().reify(envs)
"""


def test_children_of_a_plugin_are_the_plugins(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A plug-in's threads get the exit codes of their processes, in any session, and the launcher goes on."""
    write_plugin(tmp_path / "site", "busy", "torchrun.logs_specs", {"busy": "busy:Busy"}, _PLUGIN)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    path = worker(f"say(open({str(gate)!r}).read())")
    env = {"PYTHONPATH": str(tmp_path / "site"), "GATE": str(gate)}
    job = launch("--standalone", "--logs-specs=busy", path, env=env)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.split() == ["240", "{3}"]


# --- processes that the job did not start: none is signalled or named -------------------------------------------------
#: A container without an init of its own, which no privilege is needed for.
_CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")
#: Rank 0 ends at once. Rank 1 ends as a file says, when it is there.
_EARLY = """
import os, sys, time
terminal = os.ttyname(2) if os.isatty(2) else ""
# At once: both workers write to one terminal.
os.write(1, f"rank {{os.environ['RANK']}} {{os.getpid()}} {{terminal}}\\n".encode())
while os.environ["RANK"] == "1":
    if os.path.exists({gate!r}): sys.exit(open({gate!r}).read() or 0)
    time.sleep(0.01)
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Return the file that ends rank 1, and put two files beside it that can be renamed to it."""
    path = tmp_path / "gate"
    path.with_suffix(".success").touch()
    path.with_suffix(".failure").write_text("failed")
    return path


@pytest.fixture
def early(tmp_path: Path, gate: Path) -> Path:
    """Write a program whose rank 0 ends early."""
    path = tmp_path / "early.py"
    path.write_text(_EARLY.format(gate=str(gate)))
    return path


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Path]:
    """Return the file in which a stranger says its pid; the stranger is killed at the end."""
    path = tmp_path / "stranger"
    yield path
    if path.exists():
        kill_processes([int(path.read_text())])


def test_a_daemon_of_kubectl_exec_in_the_container_of_pid_1(launch: Launch, worker: Worker, gate: Path) -> None:
    """It becomes a child of PID 1, which is the launcher, and lives on after a restart, without a line."""
    path = worker(f"""
        say("attempt", attempt)
        while not os.path.exists({str(gate)!r} + str(attempt)): time.sleep(0.01)
        sys.exit(attempt == 0)
    """)
    job = launch("--standalone", "--max-restarts=1", "--max-backoff=0", path, program=(*_CONTAINER, *ELASTIC_RUN))
    job.wait_line("attempt 0")
    (first,) = children_of(job.pid)
    enter = ("nsenter", f"--target={first}", "--user", "--preserve-credentials", "--pid", "--mount")
    daemon = ("sh", "-c", "setsid sleep 1000 </dev/null >/dev/null 2>&1 &")
    subprocess.run([*enter, *daemon], check=True)
    (stranger,) = wait_until(lambda: _children_named("sleep", first), what="the daemon is a child of PID 1")
    gate.with_name("gate0").touch()
    job.wait_line("attempt 1")
    assert not is_gone(stranger)
    gate.with_name("gate1").touch()
    assert job.wait_exit() == 0
    assert "background" not in job.stderr


def _children_named(name: str, parent: int) -> list[int]:
    return [pid for pid in children_of(parent) if read_name(pid) == name]


@pytest.mark.parametrize("end", ["failure", "success"])
def test_a_daemon_of_a_helper_that_the_launcher_was_given(
    launch: Launch, early: Path, gate: Path, stranger: Path, end: str
) -> None:
    """After `helper & exec elastic-run`, daemons of the helper live on, and no line names them."""
    daemon = f"setsid sh -c 'echo $$ > {stranger}.new; mv {stranger}.new {stranger}; exec sleep 1000'"
    helper = f"(while ! [ -e {gate}.daemon ]; do sleep 0.01; done; ({daemon} </dev/null >/dev/null 2>&1 &)) &"
    job = launch(
        "--standalone", "--nproc-per-node=2", early, program=("sh", "-c", f'{helper} exec "$@"', "sh", *ELASTIC_RUN)
    )
    job.wait_lines(r"rank \d", count=2)
    gate.with_name("gate.daemon").touch()
    wait_until(stranger.exists, what="the daemon")
    gate.with_suffix(f".{end}").rename(gate)
    assert job.wait_exit() == (0 if end == "success" else 1)
    assert not is_gone(int(stranger.read_text()))
    assert "background" not in job.stderr


#: The first process of a container with terminals of its own. When rank 0 has ended, a stranger gets the number of its
#: terminal or of its session. Says whether the stranger lives after the job, and whether a line is about it.
_HOST = """
import os, psutil, re, subprocess, sys, time
kind, gate, end = sys.argv[1:4]
mine, theirs = os.openpty()
job = subprocess.Popen(sys.argv[4:], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
os.close(theirs)
output = b""
while len(re.findall(rb"/dev/pts/\\d+\\s", output)) < 2: output += os.read(mine, 9999)
pid, terminal = next(line.split()[2:] for line in output.decode().splitlines() if line.startswith("rank 0 "))
pid = int(pid)
while os.path.exists(f"/proc/{pid}"): time.sleep(0.01)

def in_terminal():
    opened = [os.openpty()]
    while os.ttyname(opened[-1][1]) != terminal:  # the launcher closes it in a moment
        os.close(opened[-1][0]), os.close(opened[-1][1])
        opened[-1] = os.openpty()
    slave = opened[-1][1]
    return subprocess.Popen(["sleep", "1000"], stdin=slave, stdout=slave, stderr=slave, start_new_session=True).pid

def in_session():
    # The process that begins the session has rank 0's pid, and ends, as daemons do.
    time.sleep(0.05)  # start times are in clock ticks of 10 ms; no kernel gives a pid again so soon
    leader = 0
    while leader != pid:  # another process may be started in between
        with open("/proc/sys/kernel/ns_last_pid", "w") as file: file.write(str(pid - 1))
        leader = os.fork()
        if leader == 0:
            if os.getpid() == pid:
                os.setsid()
                if os.fork() == 0: os.execvp("sleep", ["sleep", "1000"])
            os._exit(0)
        os.waitpid(leader, 0)
    return next(found for found in map(int, filter(str.isdigit, os.listdir("/proc"))) if session_of(found) == pid)

def session_of(pid):
    try: return os.getsid(pid)
    except ProcessLookupError: return 0

def is_guarded():
    return any("guardian of" in " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))

stranger = in_terminal() if kind == "terminal" else in_session()
while not is_guarded(): time.sleep(0.01)
if end == "kill": job.kill()
else: os.rename(f"{gate}.{end}", gate)
try:
    while True: output += os.read(mine, 9999)
except OSError: job.wait()
while is_guarded(): time.sleep(0.01)
state = open(f"/proc/{stranger}/stat").read().rpartition(")")[2].split()[0]
print(state in "ZX", b"background" in output, job.returncode)
"""
_OWN_TERMINALS = (
    'mount -t devpts -o newinstance,ptmxmode=0666 devpts /dev/pts && mount --bind /dev/pts/ptmx /dev/ptmx && exec "$@"'
)


@pytest.mark.parametrize("kind", ["terminal", "session"])
@pytest.mark.parametrize(("end", "code"), [("failure", 1), ("success", 0), ("kill", -9)])
def test_a_number_that_a_worker_had_before(
    early: Path, gate: Path, tmp_path: Path, kind: str, end: str, code: int
) -> None:
    """The kernel gives it to another terminal, or to another session, when the worker's is closed or empty."""
    host = tmp_path / "host.py"
    host.write_text(_HOST)
    job = (*ELASTIC_RUN, "--standalone", "--nproc-per-node=2", early)
    program = (*_CONTAINER, "sh", "-c", _OWN_TERMINALS, "sh", sys.executable, host, kind, gate, end, *job)
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == f"False False {code}\n"


def test_a_pid_that_was_given_to_another_process_gets_no_signal() -> None:
    """Between the look at all processes and the signal, a process may have ended."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        stat = read_stat(process.pid)
        assert stat is not None
        stat.started_at -= 1
        signal_processes({process.pid: stat}, signal.SIGKILL)
        stat.started_at += 1
        signal_processes({process.pid: stat}, signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM

"""Countdown timers of workers, on one node and on several."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import switches_within
from tests.support.sessions import free_port
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from tests.support.launch import Launch


ROOT = Path(__file__).parents[3]
TIMERS = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
#: How a script says where its timers go.
CLIENTS = {
    "ours": "from elastic_run import timer",
    "torch's": """
from torch.distributed.elastic import timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
""",
}
#: A span of 0.3 s, less what the request's way takes on a machine that is busy.
EXPIRED = r"scope 'train_step' expired after 0(\.[0-3]\d?)? s"
PROLOGUE = "import os, signal, subprocess, sys, time\n"
#: Rank 1 hangs in its first life.
HANGS = """
with timer.expires(after=100, scope="epoch"):
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        with timer.expires(after=0.3, scope="train_step"):
            time.sleep(1000)
    if "hang" in sys.argv:
        time.sleep(1000)
os.write(1, f"done {os.environ['RANK']}\\n".encode())  # one write: print writes a line in pieces under -u
"""


def script(directory: Path, body: str, client: str = "ours") -> Path:
    """Write a training script that uses timers."""
    path = directory / "train.py"
    path.write_text(PROLOGUE + CLIENTS[client] + "\n" + body, encoding="utf-8")
    return path


@pytest.mark.parametrize("client", ["ours", pytest.param("torch's", marks=pytest.mark.long)])
def test_an_expired_scope_is_the_cause_in_the_report(launch: Launch, tmp_path: Path, client: str) -> None:
    """Only the worker that hangs is killed, and the report names its scope instead of a bare SIGKILL."""
    path = script(tmp_path, HANGS, client)
    job = launch("--preload=torch", "--nproc-per-node=2", path, "hang", env=TIMERS)
    assert job.wait_exit(deadline=2 * DEADLINE) == 128 + signal.SIGKILL
    said = job.stderr.splitlines()
    (line,) = [line for line in said if "timer scope" in line]
    assert re.fullmatch(rf"elastic-run: rank 1 \(pid \d+\): timer {EXPIRED}; it gets SIGKILL", line)
    assert [line for line in said if re.fullmatch(f" {{9}}TimerExpired: {EXPIRED}", line)]
    assert "others   rank 0 was stopped" in said
    assert any(line.startswith("hint     The script set that deadline itself") for line in said)


@pytest.mark.long
def test_the_job_restarts_after_an_expiry(launch: Launch, tmp_path: Path) -> None:
    """An expiry is a failure like any other: the next attempt has the same pipe, and ends well."""
    path = script(tmp_path, HANGS)
    job = launch("--standalone", "--nproc-per-node=2", "--max-restarts=1", "--preload=torch", path, env=TIMERS)
    assert job.wait_exit() == 0, job.stderr
    assert {"done 0", "done 1"} <= set(job.stdout.splitlines())
    assert job.stderr.count("timer scope") == 1


@pytest.mark.long
def test_only_the_process_that_is_named_gets_the_signal(launch: Launch, tmp_path: Path) -> None:
    """A worker's own process is signalled and the worker goes on; what is no worker's is left alone."""
    body = """
path = os.environ["TORCHELASTIC_TIMER_FILE"]
program = "import sys, time; from elastic_run import timer; c = timer.FileTimerClient(sys.argv[1]);"
hang = program + "c.acquire('reader', time.time() + 0.2); time.sleep(1000)"
mine = subprocess.Popen([sys.executable, "-c", hang, path])
other = subprocess.Popen([sys.executable, "-c", hang, path], start_new_session=True)
print("mine", mine.wait(), flush=True)
with timer.expires(after=0.1, scope="gentle", client=timer.FileTimerClient(path, signal=0)):
    open(sys.argv[1]).close()
print("other", other.poll())
other.kill()
"""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job = launch("--standalone", script(tmp_path, body), gate, env=TIMERS | {"PYTHONPATH": str(ROOT)})
    job.wait_line("which is not a worker: the timer has no effect")
    job.wait_line(r"timer scope 'gentle' expired after \S+ s; it names no signal, so the worker goes on")
    gate.open("w").close()
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.splitlines() == ["mine -9", "other None"]


def test_garbage_in_the_pipe_is_said_once_and_harms_nothing(launch: Launch, tmp_path: Path) -> None:
    """Pickles, half lines and megabytes: one line on stderr; a timer that comes after them expires in time."""
    body = """
import pickle
class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)
for junk in (pickle.dumps(Bomb()) + b"\\n", b"[" * 4000 + b"\\n", b"{}\\n", b"x" * 60_000, b"\\n"):
    with open(os.environ["TORCHELASTIC_TIMER_FILE"], "wb") as pipe:
        pipe.write(junk)
with timer.expires(after=0.3, scope="train_step"):
    time.sleep(1000)
"""
    job = launch("--standalone", script(tmp_path, body), env=TIMERS, cwd=tmp_path)
    assert job.wait_exit() == 128 + signal.SIGKILL
    assert re.search(f"TimerExpired: {EXPIRED}", job.stderr)
    assert job.stderr.count("a line there is not a timer request, and is ignored") == 1
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("flags", [[], ["--log-dir=logs"]], ids=["temporary", "kept"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_no_pipe_outlives_the_launcher(
    launch: Launch, tmp_path: Path, flags: list[str], number: signal.Signals
) -> None:
    """However the launcher ends, nothing of the timers is left in the temporary directory."""
    body = "print('pipe', os.environ['TORCHELASTIC_TIMER_FILE'], flush=True)\ntime.sleep(1000)"
    path, places = script(tmp_path, body), tmp_path / "places"
    places.mkdir()
    job = launch("--standalone", *flags, path, env=TIMERS | {"TMPDIR": str(places)}, cwd=tmp_path)
    pipe = Path(job.wait_line("pipe (.+)")[1])
    assert pipe.is_fifo()
    assert places in pipe.parents
    job.send(number)
    job.wait_exit()
    wait_until(lambda: not list(places.iterdir()), what="an empty temporary directory")


@pytest.mark.long
def test_a_path_of_the_user_s_is_used(launch: Launch, tmp_path: Path) -> None:
    """A pipe that a killed launcher left at TORCHELASTIC_TIMER_FILE is replaced, and removed at the end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    job = launch(
        "--standalone",
        script(tmp_path, "print(os.environ['TORCHELASTIC_TIMER_FILE'])\nwith timer.expires(after=9): pass"),
        env=TIMERS | {"TORCHELASTIC_TIMER_FILE": str(pipe)},
    )
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.splitlines() == [str(pipe)]
    assert not pipe.exists()


def test_a_bad_path_is_one_clear_line(launch: Launch, tmp_path: Path) -> None:
    """Where the pipe can't be made nothing is started, and the report says why and where."""
    (tmp_path / "file").write_text("a user's work", encoding="utf-8")
    for path, reason in (("no/pipe", "No such file or directory"), ("file", "File exists")):
        env = TIMERS | {"TORCHELASTIC_TIMER_FILE": str(tmp_path / path)}
        job = launch("--standalone", script(tmp_path, "print('ran')"), env=env)
        assert job.wait_exit() == 204, job.stderr
        cause = " ".join(job.stderr.split())
        assert f"the timers' pipe can't be made: {reason}" in cause
        assert job.stdout == ""
    assert (tmp_path / "file").read_text(encoding="utf-8") == "a user's work"


@pytest.mark.long
def test_without_the_variable_there_is_no_pipe(launch: Launch, tmp_path: Path) -> None:
    """Nothing is made, and the worker that uses timers is told what to do."""
    job = launch("--standalone", script(tmp_path, "with timer.expires(after=1): pass"))
    assert job.wait_exit() == 1
    assert "start the job with TORCHELASTIC_ENABLE_FILE_TIMER=1" in job.stderr


def test_timers_that_run_cost_nothing(launch: Launch, tmp_path: Path) -> None:
    """While a timer of minutes runs, the launcher sleeps, and nothing wakes it."""
    body = 'with timer.expires(after=600, scope="epoch"):\n    print("acquired", flush=True)\n    time.sleep(1000)'
    job = launch("--standalone", script(tmp_path, body), env=TIMERS)
    job.wait_line("acquired")
    wait_until(lambda: not switches_within(job.pid, 1.5), deadline=20, what="a launcher at rest")


@pytest.mark.long
def test_events_of_timers_are_torchs(launch: Launch, tmp_path: Path) -> None:
    """An event log has the four events of torch's agent, with pid, scope and signal."""
    path = script(tmp_path, HANGS)
    flags = ["--preload=torch", "--nproc-per-node=2", "--event-log-handler=console"]
    job = launch(*flags, path, "hang", env=TIMERS)
    job.wait_exit()
    events = [line for line in job.stderr.splitlines() if "watchdog_event" in line]
    assert [line.split('"')[3] for line in events] == [
        "watchdog started",
        "timer expired",
        "kill worker process",
        "watchdog stopped",
    ]
    assert '\\"scope_id\\": \\"train_step\\"' in events[2]
    assert '\\"signal\\": \\"9\\"' in events[2]


TORCHS_SERVER = """
import subprocess, sys, time
from torch.distributed.elastic import timer
server = timer.FileTimerServer(sys.argv[1], "run", max_interval=0.1)
server.start()
worker = subprocess.Popen([sys.executable, sys.argv[2], sys.argv[1]])
print("worker ended with", worker.wait(), flush=True)
time.sleep(1000)
"""


@pytest.mark.long
def test_our_client_works_with_torchs_server(tmp_path: Path) -> None:
    """A server of torch reads our requests: a scope that is left in time passes, the one that hangs is killed."""
    (tmp_path / "server.py").write_text(TORCHS_SERVER, encoding="utf-8")
    body = """
timer.configure(timer.FileTimerClient(sys.argv[1], signal=signal.SIGTERM))
with timer.expires(after=0.2, scope="short"):
    pass
time.sleep(0.5)  # which is when it would expire
print("passed", flush=True)
with timer.expires(after=0.3, scope="train_step"):
    time.sleep(1000)
"""
    command = [sys.executable, *map(str, (tmp_path / "server.py", tmp_path / "pipe", script(tmp_path, body)))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=2 * DEADLINE, check=False
    )
    # torch's server signals its own process as well: nothing may be left to print.
    assert done.returncode == -signal.SIGTERM
    assert done.stdout.splitlines()[0] == "passed"


# --- several agents ---------------------------------------------------------------------------------------------------
PROGRAM = """
import os, sys, threading
from elastic_run import timer
from elastic_run.agent import LocalElasticAgent, WorkerSpec, health_check_server
from elastic_run.multiprocessing import DefaultLogsSpecs
from elastic_run.rendezvous import RendezvousParameters, get_rendezvous_handler


class OwnServer(health_check_server.HealthCheckServer):
    def start(self):
        print("health check on", self._port, self._timeout, self.alive_callback() > 1e9, flush=True)

    def stop(self):
        print("health check stopped", flush=True)


class Polling(LocalElasticAgent):
    def _invoke_run(self, role="default"):
        return super()._invoke_run(role)


def train():
    with timer.expires(after=0.3, scope="train_step"):
        threading.Event().wait()


if __name__ == "__main__":
    health_check_server.create_healthcheck_server = OwnServer
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))
    spec = WorkerSpec("trainer", 1, handler, entrypoint=train, max_restarts=0, monitor_interval=0.02)
    agent = globals()[sys.argv[1]](spec, DefaultLogsSpecs(log_dir=sys.argv[2]))
    result = agent.run("trainer")
    failure = result.failures[0]
    print("failed", result.is_failed(), failure.exitcode, failure.message.partition(";")[0], flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("agent", ["LocalElasticAgent", "Polling"])
def test_an_agent_s_workers_have_timers(launch: Launch, tmp_path: Path, agent: str) -> None:
    """Whether the agent is ours or goes through torch's hooks: the worker is killed, its failure names the scope."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    places = tmp_path / "places"
    places.mkdir()
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_HEALTH_CHECK_PORT": "8080", "TMPDIR": str(places)}
    words = [tmp_path / "program.py", agent, tmp_path / "logs"]
    job = launch(*words, program=[sys.executable], env=env)
    assert job.wait_exit() == 0, job.stderr
    *checks, failed = job.stdout.splitlines()
    assert checks == ["health check on 8080 60 True", "health check stopped"]
    assert re.fullmatch(f"failed True -9 timer {EXPIRED}", failed)
    assert not [path for path in places.iterdir() if path.is_fifo() or re.search("timers", path.name)]


@pytest.mark.long
@pytest.mark.parametrize("lives", [pytest.param(1, id="fails", marks=pytest.mark.soak), pytest.param(2, id="restarts")])
def test_an_expiry_on_one_of_two_nodes(launch: Launch, tmp_path: Path, lives: int) -> None:
    """The worker that hangs is killed on its node; its scope is the cause on both, and both restart or end alike."""
    path = tmp_path / "train.py"
    path.write_text(
        "import os, signal, time\n"
        "from elastic_run import timer\n"
        "rank, life = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "with timer.expires(after=0.4 if (rank, life) == ('1', '0') else 100, scope=f'step of {rank}'):\n"
        "    if life == '0': signal.pause()\n"
        "os.write(1, f'rank {rank} in life {life}\\n'.encode())\n",
        encoding="utf-8",
    )
    flags = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--preload=torch")
    # One environment for both, as it is where a job's script sets the path.
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(tmp_path / "pipe")}
    agents = [launch(*flags, f"--max-restarts={lives - 1}", path, env=env) for _ in range(2)]
    codes = [agent.wait_exit() for agent in agents]
    said = [agent.stderr for agent in agents]
    killed = r"rank 1 \(pid \d+\): timer scope 'step of 1' expired .*; it gets SIGKILL"
    assert sum(len(re.findall(killed, text)) for text in said) == 1, said
    if lives == 1:
        assert codes == [128 + signal.SIGKILL] * 2
        assert all("TimerExpired: scope 'step of 1' expired" in text for text in said), said
    else:
        assert codes == [0, 0], said
        assert sorted("".join(agent.stdout for agent in agents).splitlines()) == [
            f"rank {rank} in life 1" for rank in range(2)
        ]
    assert not (tmp_path / "pipe").exists()


def test_a_deadline_that_passes_while_the_job_is_stopped(launch: Launch, tmp_path: Path) -> None:
    """A worker that saves in its grace period is not killed by a timer of its loop, and leaves the scope as ever."""
    path = tmp_path / "train.py"
    path.write_text(
        "import os, signal, time\n"
        "from elastic_run import timer\n"
        "signals = []\n"
        "signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))\n"
        "with timer.expires(after=1.5, scope='step'):\n"
        "    os.write(1, b'in it\\n')\n"
        "    while not signals: time.sleep(0.05)\n"
        "    time.sleep(2)\n"
        "with timer.expires(after=100, scope='saving'):\n"
        "    os.write(1, b'saved\\n')\n",
        encoding="utf-8",
    )
    job = launch("--standalone", path, env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    job.wait_line("in it")
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 128 + signal.SIGTERM
    assert job.stdout == "in it\nsaved\n", job.stderr
    assert "expired" not in job.stderr

"""Plug-ins for logs and events: how they end, and how handlers are found."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from tests.support.programs import write_plugin

if TYPE_CHECKING:
    from tests.support.launch import Launch, Worker


# --- how they end -----------------------------------------------------------------------------------------------------
#: What a call does when the launcher's environment names it: it raises, or hangs in Python or in C.
_ACT = """
import ctypes, logging, os, time
from elastic_run.multiprocessing import DefaultLogsSpecs

def act(name):
    wanted, deed = os.environ["DEED"].split()
    if name != wanted:
        return
    if deed == "raises":
        raise OSError("no server")
    if deed == "exits":
        raise SystemExit(9)
    print("hangs", flush=True)
    if deed == "sleeps":
        time.sleep(600)
    while True:  # a signal to this thread ends one sleep
        ctypes.CDLL(None).sleep(600)
"""
_HANDLER = """
class Handler:
    use_agent_store = False
    is_closed = set_closed = lambda self: False

    def get_backend(self):
        return "own"

    def get_run_id(self):
        return "job"

    def next_rendezvous(self):
        from elastic_run.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
        return RendezvousInfo(None, 0, 1, RendezvousStoreInfo("127.0.0.1", 1))

    def num_nodes_waiting(self):
        act("num_nodes_waiting")
        return 0

    def shutdown(self):
        act("shutdown")

def create(params):
    return Handler()
"""
_EVENTS = """
class Events(logging.Handler):
    def emit(self, record):
        act("first" if "RENDEZVOUS" in record.getMessage() else "last" if "FAILED" in record.getMessage() else "")

    def close(self):
        act("close")
"""
_LOGS = """
class Logs(DefaultLogsSpecs):
    def reify(self, envs):
        act("reify" + envs[0]["TORCHELASTIC_RESTART_COUNT"])
        return super().reify(envs)

    def cleanup(self):
        act("cleanup")
"""
_OF_RENDEZVOUS = ("--rdzv-backend=own", "--rdzv-endpoint=localhost:1", "--rdzv-id=job")
_OF_EVENTS = ("--event-log-handler=own",)
_OF_LOGS = ("--logs-specs=own",)


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """Install the plug-ins, and give the environment in which they are found."""
    directory = tmp_path / "site"
    groups = {
        contract.RENDEZVOUS_ENTRY_POINTS: ("own_place", "create", _HANDLER),
        contract.EVENT_HANDLERS_ENTRY_POINTS: ("own_events", "Events", _EVENTS),
        contract.LOGS_SPECS_ENTRY_POINTS: ("own_logs", "Logs", _LOGS),
    }
    for group, (module, name, source) in groups.items():
        write_plugin(directory, module, group, {"own": f"{module}:{name}"}, _ACT + source)
    return {"PYTHONPATH": str(directory)}


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize(
    ("flags", "deed", "call"),
    [
        (_OF_RENDEZVOUS, "shutdown raises", "own_place.Handler.shutdown() has raised OSError: no server at "),
        (_OF_RENDEZVOUS, "shutdown exits", "own_place.Handler.shutdown() has raised SystemExit: 9 at "),
        (_OF_LOGS, "cleanup raises", "own_logs.Logs.cleanup() has raised OSError: no server at "),
    ],
)
def test_a_closing_call_that_raises(
    launch: Launch, site: dict[str, str], code: int, flags: tuple[str, ...], deed: str, call: str
) -> None:
    """A line tells the error and its place; report and exit code are the job's."""
    job = launch(*flags, "--no-python", "sh", "-c", f"exit {code}", env={**site, "DEED": deed})
    assert job.wait_exit() == code, job.stderr
    assert call in job.stderr
    assert ("failed with exit code 3" in job.stderr) == (code == 3)
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize(
    ("flags", "deed", "call"),
    [
        (_OF_RENDEZVOUS, "shutdown sleeps", "own_place.Handler.shutdown()"),
        (_OF_RENDEZVOUS, "shutdown waits_in_c", "own_place.Handler.shutdown()"),
        (_OF_EVENTS, "first waits_in_c", "own_events.Events.emit()"),
        (_OF_EVENTS, "last sleeps", "own_events.Events.emit()"),
        (_OF_LOGS, "cleanup sleeps", "own_logs.Logs.cleanup()"),
    ],
)
def test_a_closing_call_that_hangs(
    launch: Launch, site: dict[str, str], flags: tuple[str, ...], deed: str, call: str
) -> None:
    """The first signal is answered by a line with the call, the second ends the launcher with the job's exit code."""
    job = launch(*flags, "--no-python", "sh", "-c", "exit 3", env={**site, "DEED": deed})
    job.wait_line("hangs")
    job.wait_line("failed with exit code 3")
    job.send(signal.SIGTERM)
    job.wait_line(r"has not returned for .*: waiting up to 30 s more; a second signal ends elastic-run without it$")
    job.send(signal.SIGINT)
    assert job.wait_exit() == 3
    assert f"elastic-run: {call} has not returned for" in job.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "deed", "call"),
    [
        (_OF_RENDEZVOUS, "num_nodes_waiting sleeps", "own_place.Handler.num_nodes_waiting()"),
        (_OF_EVENTS, "first sleeps", "own_events.Events.emit()"),
        (_OF_EVENTS, "last sleeps", "own_events.Events.emit()"),
    ],
)
def test_a_hanging_call_in_mid_job(
    launch: Launch, worker: Worker, site: dict[str, str], flags: tuple[str, ...], deed: str, call: str
) -> None:
    """The job runs on; a signal stops the workers at once, and --shutdown-timeout later the launcher ends."""
    path = worker("say('ready')\nsignal.pause()\n")
    job = launch(*flags, "--shutdown-timeout=2", path, env={**site, "DEED": deed})
    job.wait_line("ready")
    if not deed.startswith("last"):
        job.wait_line("hangs")
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143
    assert "SIGTERM received from pid" in job.stderr
    assert f"elastic-run: {call} has not returned for" in job.stderr.splitlines()[-1]


def test_python_s_end_that_hangs(launch: Launch, site: dict[str, str]) -> None:
    """A handler that hangs when logging closes it, after the launcher's own end, leaves signals working."""
    job = launch(*_OF_EVENTS, "--no-python", "sh", "-c", "exit 3", env={**site, "DEED": "close sleeps"})
    job.wait_line("hangs")
    job.send(signal.SIGTERM)
    job.send(signal.SIGINT)
    assert job.wait_exit() == 3


def test_an_error_of_logs_specs_is_raised_as_it_was(launch: Launch, site: dict[str, str], tmp_path: Path) -> None:
    """In a program the OSError of reify() comes as it is; no line speaks of a signal, which nobody has sent."""
    program = tmp_path / "program.py"
    program.write_text(
        "import own_logs\n"
        "from elastic_run import LaunchConfig, elastic_launch\n"
        "config = LaunchConfig(1, 1, 2, rdzv_backend='local', max_restarts=1, logs_specs=own_logs.Logs())\n"
        "elastic_launch(config, '/bin/sh')('-c', 'exit $RANK')\n"
    )
    job = launch(program=(sys.executable, str(program)), env={**site, "DEED": "reify1 raises"})
    assert job.wait_exit() == 1
    assert job.stderr.endswith("\nOSError: no server\n")
    assert "SIGTERM" not in job.stderr


_CLOSING = """
import os, signal, sys, threading
from elastic_run import LaunchConfig, elastic_launch
from elastic_run.agent import health_check_server
from elastic_run.rendezvous.registry import rendezvous_handler_registry
import own_events, own_place
class Health:
    def start(self): pass
    def stop(self): own_place.act("stop")
health_check_server.create_healthcheck_server = lambda *_: Health()
rendezvous_handler_registry.register("own", own_place.create)
config = LaunchConfig(
    1, 1, 2, rdzv_backend="own", rdzv_endpoint="localhost:1", run_id="job", max_restarts=0, event_log_handler="own"
)
launch = elastic_launch(config, sys.executable)
"""
_FAILS = """
try:
    launch("-c", "import os, sys; sys.exit(3 * int(os.environ['RANK']))")
except Exception as error:
    print(type(error).__name__, error.get_first_failure()[1].exitcode)
"""
_STOPS = """
try:
    launch("-c", "import signal; print('ready', flush=True); signal.pause()")
except Exception as error:
    print(type(error).__name__, error.sigval, flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("name", ["stop", "shutdown", "last"])
def test_a_program_learns_of_the_failure(launch: Launch, site: dict[str, str], tmp_path: Path, name: str) -> None:
    """ChildFailedError comes whatever the health check server or the rendezvous raise at the end."""
    program = tmp_path / "program.py"
    program.write_text(_CLOSING + _FAILS)
    env = {**site, "DEED": f"{name} raises", contract.ENV_HEALTH_CHECK_PORT: "0"}
    job = launch(program=(sys.executable, str(program)), env=env)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "ChildFailedError 3\n"
    assert "OSError: no server" in job.stderr or name == "last"


@pytest.mark.parametrize("deed", ["first sleeps", "last waits_in_c", "num_nodes_waiting sleeps", "stop sleeps"])
def test_a_program_is_stopped(launch: Launch, site: dict[str, str], tmp_path: Path, deed: str) -> None:
    """A signal stops the workers, and a second one ends the wait for the plug-in's call, in Python or in C."""
    program = tmp_path / "program.py"
    program.write_text(_CLOSING + _STOPS)
    env = {**site, "DEED": deed, contract.ENV_HEALTH_CHECK_PORT: "0"}
    job = launch(program=(sys.executable, str(program)), env=env)
    job.wait_lines("ready", count=2)
    if deed.startswith(("first", "num")):
        job.wait_line("hangs")
    job.send(signal.SIGTERM)
    job.wait_line("hangs")
    job.wait_line("stopping 2 workers")
    if not deed.startswith("last"):
        job.wait_line("has not returned")
    job.send(signal.SIGTERM)
    # The last event is recorded when the job is over, and the program has its signals back.
    assert job.wait_exit() == (-signal.SIGTERM if deed.startswith("last") else 0), job.stderr


# --- event handlers ---------------------------------------------------------------------------------------------------
_PACKAGE = Path(__file__).parents[2] / "data" / "event_plugin"
_ENTRY_POINTS = """[elastic_run.event_handlers]
to-file = event_place:ToFile
failing = event_place:Failing
broken = event_place:broken
no-handler = builtins:list
"""


@pytest.fixture
def event_site(tmp_path: Path) -> dict[str, str]:
    """Install the package, and give the environment in which it is found."""
    metadata = tmp_path / "event_place-2.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: event_place\nVersion: 2.5\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")
    path = os.pathsep.join([str(_PACKAGE), str(tmp_path)])
    return {"PYTHONPATH": path, "EVENT_FILE": str(tmp_path / "events.jsonl")}


def test_events_go_to_a_plugin_s_handler(launch: Launch, tmp_path: Path, event_site: dict[str, str]) -> None:
    """A handler that is chosen by the name of an entry point gets every event of the job, and stderr gets none."""
    job = launch("--standalone", "--event-log-handler=to-file", "--no-python", "true", env=event_site)
    assert job.wait_exit() == 0, job.stderr
    lines = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    states = [(event["source"], event["metadata"]["state"]) for event in map(json.loads, lines)]
    assert states == [
        ("AGENT", "RENDEZVOUS"),
        ("AGENT", "ASSIGN_WORKER_RANKS"),
        ("WORKER", "START"),
        ("WORKER", "SUCCEEDED"),
        ("AGENT", "SUCCEEDED"),
    ]
    assert "torchelastic" not in job.stderr


def test_a_plugin_that_raises_harms_nothing(launch: Launch, event_site: dict[str, str]) -> None:
    """A handler that fails while the job runs is one line on stderr, and the job ends as it would have without."""
    job = launch("--standalone", "--event-log-handler=failing", "--no-python", "echo", "ran", env=event_site)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "ran\n"
    assert job.stderr == (
        "event handler 'failing' raised ConnectionError: no collector for torchelastic-events-failing; "
        "the job goes on (shown once)\n"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "broken",
            "plug-in event_place 2.5 (event_place:broken) can't be loaded: ImportError: no module of the site's",
        ),
        (
            "no-handler",
            "'no-handler': plug-in event_place 2.5 (builtins:list) returned [], not a logging.Handler",
        ),
        ("to-fil", "'to-fil' is none of null, console, dynamic_rendezvous"),
    ],
)
def test_a_broken_plugin_is_one_line(launch: Launch, event_site: dict[str, str], name: str, message: str) -> None:
    """An unknown name, one that can't be loaded, one that is no handler: package and error, before anything started."""
    job = launch("--standalone", f"--event-log-handler={name}", "--no-python", "echo", "ran", env=event_site)
    assert job.wait_exit() == 2
    assert job.stdout == ""
    assert message in job.stderr
    assert "Traceback" not in job.stderr

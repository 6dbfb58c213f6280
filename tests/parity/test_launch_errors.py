"""What `elastic_launch` raises where no round comes about: torch's classes, and the words that programs look for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.sessions import free_port
from tests.support.torchrun import run_on

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]

_LAUNCH = """
api = get("torch.distributed.launcher.api")
def launch(endpoint, conf, command, *words, nodes=2):
    config = api.LaunchConfig(nodes, nodes, 1, rdzv_backend="c10d", rdzv_endpoint=endpoint, run_id="job",
                              rdzv_configs=conf, max_restarts=0)
    try:
        api.elastic_launch(config, command)(*words)
    except Exception as error:
        tell([cls.__name__ for cls in type(error).__mro__], str(error))
"""
_PROGRAM = """
import signal, threading
launch(f"127.0.0.1:{PORT}", {"is_host": "false", "read_timeout": 1, "timeout": 1}, "true")
launch(f"127.0.0.1:{PORT}", {"join_timeout": 1, "timeout": 1, "last_call_timeout": 1}, "true")
os.mkfifo(FIFO := f"{os.path.dirname(os.path.abspath(__file__))}/{SIDE}.fifo")
def stop():
    open(FIFO).read()
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=stop).start()
launch("127.0.0.1:0", {}, "sh", "-c", f": > {FIFO}; exec sleep 10", nodes=1)
"""


def test_the_classes_are_torchs(tmp_path: Path) -> None:
    """A store that isn't there, nodes that don't come and a stop signal are caught as torch's exceptions are."""
    program = _LAUNCH + _PROGRAM.replace("{PORT}", str(free_port()))
    theirs, ours = (run_on(side, program, tmp_path) for side in ("torch", "ours"))
    assert [names for names, _ in ours] == [names for names, _ in theirs]
    assert [names[0] for names, _ in ours] == ["RendezvousConnectionError", "RendezvousTimeoutError", "SignalException"]
    assert theirs[2][1].startswith("Process ")
    assert " got signal: 15" in theirs[2][1]
    assert " got signal: 15" in ours[2][1]


def test_a_program_that_cannot_start_is_the_systems_error(tmp_path: Path) -> None:
    """A command that isn't there, may not be executed or is no program is caught as the system's exception is."""
    texts = {"denied": "exit 0\n", "none": "no first line\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "none").chmod(0o755)
    calls = [f"launch('127.0.0.1:0', {{}}, {str(tmp_path / name)!r}, nodes=1)\n" for name in ("missing", *texts)]
    theirs, ours = (run_on(side, _LAUNCH + "".join(calls), tmp_path) for side in ("torch", "ours"))
    assert [names for names, _ in ours] == [names for names, _ in theirs]
    assert [names[0] for names, _ in ours] == ["FileNotFoundError", "PermissionError", "OSError"]
    for (_, their_text), (_, our_text) in zip(theirs, ours, strict=True):
        assert our_text.startswith(their_text.partition("]")[0]), "the number of the error"


def test_the_report_of_the_command_names_them(launch: Launch) -> None:
    """Programs that search a launcher's log for torch's error find its name there."""
    place = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=j", "--nnodes=2")
    settings = "--rdzv-conf=join_timeout=1,last_call_timeout=1"
    job = launch(*place, settings, "--no-python", "true")
    assert job.wait_exit() == 201, job.stderr
    assert "(RendezvousTimeoutError)" in job.stderr

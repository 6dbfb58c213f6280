"""Other ways to start a job than the command: the legacy module, and programs that call `main` or `run`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run import launch as legacy
from elastic_run.core.config import JoinCommand

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_run.launcher import LaunchConfig
    from tests.support.launch import Launch, Worker


# --- python -m elastic_run.launch; tests/parity holds it against torch's ----------------------------------------------
LEGACY = (sys.executable, "-m", "elastic_run.launch")
NOTICE = (
    "elastic-run: python -m elastic_run.launch is deprecated: use elastic-run, which sets the variable LOCAL_RANK and "
    "adds no argument --local-rank (python -W ignore hides this line)"
)

#: A script of the time of torch 1, which takes the one spelling of the argument only.
SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument({spelling!r}, dest="rank", type=int)
parser.add_argument("--lr")
arguments = parser.parse_args()
assert arguments.rank == int(os.environ["LOCAL_RANK"])
os.write(1, f"rank {{arguments.rank}}, lr {{arguments.lr}}\\n".encode())
"""


@pytest.mark.parametrize(
    ("spelling", "flags"),
    [
        ("--local-rank", []),
        ("--local_rank", ["--local-rank-underscore"]),
        ("--local_rank", ["--local_rank_underscore"]),
    ],
)
def test_a_script_gets_its_local_rank_as_an_argument(
    spelling: str, flags: list[str], launch: Launch, tmp_path: Path
) -> None:
    """Each worker gets --local-rank=N, or --local_rank=N on request, in front of its own arguments."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(spelling=spelling), encoding="utf-8")
    job = launch("--nproc_per_node=2", *flags, script, "--lr", "1", program=LEGACY)
    assert job.wait_exit() == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["rank 0, lr 1", "rank 1, lr 1"]
    assert job.stderr.splitlines().count(NOTICE) == 1


def test_the_notice_can_be_hidden(launch: Launch, worker: Worker) -> None:
    """What hides torch's deprecation warning hides our line."""
    program = (sys.executable, "-W", "ignore", "-m", "elastic_run.launch")
    job = launch("--use-env", worker("say('there')"), program=program)
    assert job.wait_exit() == 0
    assert (job.stdout, job.stderr) == ("there\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--no-python", "true"],
            "--no-python: needs --use-env with this command, which otherwise adds the argument --local-rank",
        ),
        (
            ["--use-env", "--local-rank-underscore", "train.py"],
            "--local-rank-underscore: cannot be combined with --use-env, which adds no local rank",
        ),
        (["--use-envy", "train.py"], "--use-envy"),
    ],
)
def test_what_does_not_go_together_is_one_line(words: list[str], said: str, launch: Launch) -> None:
    """Flags of the legacy front door that contradict each other end with 2 and one line."""
    job = launch(*words, program=LEGACY)
    assert job.wait_exit() == 2
    assert job.stderr.startswith("elastic-run: error: ")
    assert said in job.stderr
    assert job.stderr.count("\n") == 1


def test_other_nodes_are_told_to_come_in_by_the_same_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that a waiting node prints for the others is that of this front door."""
    configs: list[LaunchConfig] = []

    def note(config: LaunchConfig, *_: object) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("elastic_run.launch_config.launch_job", note)
    words = ["--nnodes=2", __file__, "--x"]
    legacy.run_legacy_command(words)
    expected = JoinCommand(("python", "-m", "elastic_run.launch"), ("--nnodes=2",), (__file__, "--x"))
    assert configs[0].node_config.join_command == expected


# --- programs that call main or run, as a site's own launcher does ----------------------------------------------------
#: A program that registers a rendezvous backend of its own, which is used for a job of one node.
_REGISTERS = """
import sys
from elastic_run.rendezvous.api import rendezvous_handler_registry
from elastic_run.rendezvous.registry import LocalRendezvousHandler
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

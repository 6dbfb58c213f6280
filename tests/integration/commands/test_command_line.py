"""The command as a process: how it reads its words and ends if they are wrong, its help, and `--explain`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from elastic_run.cli.commands import COMMANDS
from elastic_run.cli.help import EXAMPLES
from elastic_run.run import determine_local_world_size
from tests.support.launch import UNPRIVILEGED
from tests.support.sessions import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.launch import Launch, Worker


COMMAND = (sys.executable, "-m", "elastic_run")

#: Stands in for a training script.
TRAIN = "import sys; print('trained', *sys.argv[1:], flush=True)\n"

#: Reads a command line and prints what had to be imported for it.
PROBE = """
import sys
before = set(sys.modules)
import elastic_run.run
elastic_run.run.parse_args(["--standalone", "--nproc-per-node=2", "--max-restarts=3", "train.py", "--x", "3"])
print(" ".join(sorted(set(sys.modules) - before)))
"""


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PET_")} | environ
    return subprocess.run([*COMMAND, *words], env=env, capture_output=True, text=True, timeout=60, check=False)


#: What argparse imports, in any release of Python.
WITH_ARGPARSE = {"argparse", "gettext", "re", "enum", "types", "operator", "functools", "collections", "itertools"}
WITH_ARGPARSE |= {"keyword", "reprlib", "copyreg", "warnings", "locale", "errno"}


def test_reading_the_command_line_imports_argparse_and_our_own_modules_only() -> None:
    """Words become values without shutil, signal, socket or any other module than argparse needs."""
    answer = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True)
    imported = answer.stdout.split()
    others = {name.partition(".")[0].lstrip("_") for name in imported if not name.startswith("elastic_run")}
    assert others - WITH_ARGPARSE - {"future__", "sre"} == set()
    assert not [name for name in imported if name.startswith(("elastic_run.launcher", "elastic_run.cluster.numa"))]


@pytest.mark.parametrize(
    ("words", "environ", "code", "said"),
    [
        (["--nnodes=3:1", "train.py"], {}, contract.EXIT_USAGE, "error: --nnodes: '3:1' is not MIN[:MAX] with"),
        (["--nodes=3", "train.py"], {}, contract.EXIT_USAGE, "error: unknown flag --nodes, did you mean '--nnodes'?"),
        (["nowhere.py"], {}, contract.EXIT_USAGE, "error: script 'nowhere.py' does not exist"),
        (["nowhere.py"], {"PET_TEE": "9"}, contract.EXIT_USAGE, "error: PET_TEE: '9' is not 0, 1, 2 or 3"),
        ([], {}, contract.EXIT_USAGE, "error: no script given"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(
    words: list[str], environ: dict[str, str], code: int, said: str
) -> None:
    """A command line that can't be served prints one line to stderr, nothing to stdout, and starts nothing."""
    answer = run(*words, **environ)
    assert (answer.returncode, answer.stdout) == (code, "")
    assert answer.stderr.startswith(f"elastic-run: {said}")
    assert answer.stderr.count("\n") == 1


def test_a_script_whose_interpreter_is_missing_says_so(tmp_path: Path) -> None:
    """The report names the interpreter in the first line of a program that is there."""
    program = tmp_path / "tool"
    program.write_text("#!/nope/x\n", encoding="utf-8")
    program.chmod(0o755)
    answer = run("--no-python", str(program))
    assert answer.returncode == contract.EXIT_NOT_FOUND
    assert "first line names the interpreter '/nope/x'" in " ".join(answer.stderr.split())


@pytest.fixture
def denying(tmp_path: Path) -> Iterator[Path]:
    """Make a directory that may not be entered; it has a script and a program in a directory below."""
    deep = tmp_path / "private" / "deep"
    deep.mkdir(parents=True)
    (deep / "train.py").touch()
    (deep / "0.sh").write_text("#!/bin/sh\n", encoding="ascii")
    (deep / "0.sh").chmod(0o755)
    (tmp_path / "link").symlink_to(deep)
    (tmp_path / "tool").write_text(f"#!{deep}/0.sh\n", encoding="ascii")
    (tmp_path / "tool").chmod(0o755)
    (tmp_path / "private").chmod(0)
    yield tmp_path / "private"
    (tmp_path / "private").chmod(0o755)


@pytest.mark.parametrize(
    ("words", "python", "code"),
    [
        (["private/deep/train.py"], "", contract.EXIT_USAGE),
        (["link/train.py"], "", contract.EXIT_USAGE),
        (["--no-python", "private/deep/0.sh"], "", contract.EXIT_USAGE),
        (["-m", "train"], "private/deep/0.sh", contract.EXIT_USAGE),
        (["--no-python", "private/deep/${local_rank}.sh"], "", contract.EXIT_NOT_EXECUTABLE),
        (["--no-python", "link/${local_rank}.sh"], "", contract.EXIT_NOT_EXECUTABLE),
        (["--no-python", "./tool"], "", contract.EXIT_NOT_EXECUTABLE),
    ],
)
def test_a_directory_that_denies_access_is_named(words: list[str], python: str, code: int, denying: Path) -> None:
    """Where a directory above a program keeps the job's user out, the message names that directory."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PET_")} | {"PYTHON_EXEC": python}
    answer = subprocess.run(
        [*UNPRIVILEGED, *COMMAND, *words],
        cwd=denying.parent,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == code, answer.stderr
    said = "".join(answer.stderr.split())
    assert f"thedirectory'{denying}'deniesaccess".replace(" ", "") in said, answer.stderr


def test_help_may_be_cut_short() -> None:
    """A reader that closes the pipe after the first line sees no complaint."""
    script = f"set -o pipefail; {sys.executable} -m elastic_run --help | head -1"
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert answer.stderr == ""
    assert answer.stdout.startswith("usage: elastic-run")


def test_closed_output_harms_nothing() -> None:
    """Without stdout and stderr the exit code is still right."""
    for words, code in (("--help", 0), ("--nnodes=0 x", contract.EXIT_USAGE)):
        script = f"{sys.executable} -m elastic_run {words} >&- 2>&-"
        assert subprocess.run(["bash", "-c", script], timeout=60, check=False).returncode == code


@pytest.mark.parametrize("command", [command for command, _ in EXAMPLES if "--nnodes" not in command])
def test_the_examples_of_the_help_work(command: str, launch: Launch, tmp_path: Path) -> None:
    """Each example of --help runs as it stands, beside a train.py that takes its arguments."""
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    job = launch(*shlex.split(command)[1:], cwd=tmp_path)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.count("trained") == (2 if "=2" in command else determine_local_world_size("auto"))
    assert ("--epochs=3" in job.stdout) == ("--epochs" in command)
    assert (tmp_path / "log").is_dir() == ("--log-dir" in command)


def test_the_example_of_two_nodes_prints_the_command_for_the_second(launch: Launch, tmp_path: Path) -> None:
    """The example of --help for two nodes starts with the line that it prints, given to a second launcher."""
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    command = next(command for command, _ in EXAMPLES if "--nnodes" in command)
    first = launch(*shlex.split(command)[1:], cwd=tmp_path)
    words = shlex.split(first.wait_line("other nodes join with: (.*)")[1])
    variables = [word for word in words if word.startswith("ELASTIC_RUN_")]
    second = launch(*words[len(variables) + 1 :], env=dict(word.split("=", 1) for word in variables), cwd=tmp_path)
    assert (first.wait_exit(), second.wait_exit()) == (0, 0), first.stderr + second.stderr
    assert first.stdout.count("trained") + second.stdout.count("trained") == 4


# --- the commands beside the start of a job ---------------------------------------------------------------------------
def _run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic_run", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd)


def test_help_lists_every_command() -> None:
    """`elastic-run help` shows each command once, in a line of its own, and then the most used flags."""
    shown = _run("help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert all(f"\n  {name} " in shown.stdout for name in COMMANDS)
    assert shown.stdout.count("Commands (") == 1
    assert "--nproc-per-node" in shown.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str) -> None:
    """`elastic-run help COMMAND` and `elastic-run COMMAND --help` show the same text."""
    by_help, by_flag = _run("help", name), _run(name, "--help")
    assert (by_help.returncode, by_flag.returncode) == (0, 0)
    assert by_help.stdout == by_flag.stdout
    assert by_help.stdout.startswith(f"usage: elastic-run {name}")


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_flag_of_a_command_is_one_line(name: str) -> None:
    """A flag that a command doesn't have is told in one line that names the command's help."""
    job = _run(name, "--no-such-flag")
    assert (job.returncode, job.stdout) == (2, "")
    assert len(job.stderr.splitlines()) == 1
    assert f"error: {name}: " in job.stderr
    assert f"(see elastic-run {name} --help)" in job.stderr


def test_script_with_the_name_of_a_command_is_started_by_its_path(tmp_path: Path) -> None:
    """The name alone is the command, also where such a script is there; with ./ it is the script."""
    (tmp_path / "help").write_text("print('the script')\n")
    assert "usage: elastic-run" in _run("help", cwd=tmp_path).stdout
    job = _run("./help", cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert job.stdout == "the script\n"


# --- --explain --------------------------------------------------------------------------------------------------------
#: What a start adds to a worker that belongs to this one start: files and a token.
OF_ONE_START = {"TORCHELASTIC_ERROR_FILE", "ELASTIC_RUN_TOKEN", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
REPORT = "import json; say(json.dumps([dict(os.environ), sys.orig_argv]))"


def explained_environment(text: str, local_rank: int) -> dict[str, str]:
    """Return the variables of one worker, as an explanation shows them."""
    part = text.partition("Variables of the workers, in addition to those of this process:\n")[2]
    pairs = dict(word.split("=", 1) for word in part.split() if "=" in word)
    return {name: str(local_rank) if re.fullmatch(r"0\.\.\d+", value) else value for name, value in pairs.items()}


@pytest.mark.parametrize(
    "flags",
    [
        ["--nproc-per-node=2", "--max-restarts=3", "--role=trainer", "--signals-to-handle=SIGTERM"],
        ["--nproc-per-node=2", "--virtual-local-rank", "--scale-up-signal=SIGUSR1", "--worker-store=rank0"],
        ["--nnodes=1", "--rdzv-id=mine", "--master-addr=localhost", "--master-port={port}"],
    ],
    ids=lambda flags: flags[-1],
)
def test_workers_get_the_environment_and_the_command_that_were_explained(
    flags: list[str], launch: Launch, worker: Worker
) -> None:
    """Each variable that a start adds was shown, with its value; the command is the one that was shown."""
    port = free_port()
    words = [*(flag.format(port=port) for flag in flags), worker(REPORT), "--lr=1", "a b"]
    explained = launch("--explain", *words)
    assert explained.wait_exit() == 0
    job = launch(*words)
    assert job.wait_exit() == 0, job.stderr
    seen = [json.loads(line) for line in job.stdout.splitlines()]
    outer = {*launch_environment(launch), "OMP_NUM_THREADS", "_"}
    assert seen
    for environment, command in seen:
        added = {name: value for name, value in environment.items() if name not in outer}
        shown = explained_environment(explained.stdout, int(environment["RANK"]))
        assert {name: shown.get(name) for name in added if name not in OF_ONE_START} == {
            name: value for name, value in added.items() if name not in OF_ONE_START
        }
        assert f"Command      {shlex.join(command)}\n" in explained.stdout


def launch_environment(launch: Launch) -> set[str]:
    """Return the names of the variables that a launcher has in these tests."""
    found = launch("-c", "import json, os; print(json.dumps(list(os.environ)))", program=["python3"])
    assert found.wait_exit() == 0
    return set(json.loads(found.stdout))

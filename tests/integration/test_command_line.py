"""The command as a process: what it imports to read its words, and how it ends when they are wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = (sys.executable, "-m", "elastic_run")

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


def test_reading_the_command_line_imports_nothing_but_our_own_modules() -> None:
    """Words become values without argparse, re or any other module than ours (and types, which is tiny)."""
    answer = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True)
    imported = answer.stdout.split()
    assert {name for name in imported if not name.startswith("elastic_run")} <= {"__future__", "types"}
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


#: Root may enter every directory; without these two capabilities it is a user as any other.
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


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


def test_the_reference_of_the_docs_is_printed_by_the_table() -> None:
    """`python -m elastic_run.flags --markdown` prints the tables of the command line reference."""
    words = [sys.executable, "-m", "elastic_run.flags", "--markdown"]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert answer.stderr == ""
    assert "| `--nnodes MIN[:MAX]` | `1:1` | `PET_NNODES` |" in answer.stdout

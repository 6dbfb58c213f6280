"""`python -m elastic_run.compat PROGRAM …`: run a Python program for which torch's launcher is elastic-run.

The program runs in this very process, as Python would run it. `--children` sets ELASTIC_RUN_COMPAT=1 for the processes
that it starts as well.
"""

from __future__ import annotations

import os
import runpy
import sys

from elastic_run import compat, contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

#: A wheel can't bring a script on request only, and one that always brought `torchrun` would overwrite torch's. So the
#: command is written where the user says; taking the directory off PATH, or deleting the file, brings torch's back.
_MARK = "# Written by `python -m elastic_run.compat --install-torchrun`; delete it to have torch's torchrun back."

USAGE = """\
Usage: python -m elastic_run.compat [--children] PROGRAM [ARGUMENT...]
       python -m elastic_run.compat [--children] -m MODULE [ARGUMENT...]
       python -m elastic_run.compat --install-torchrun DIRECTORY

Runs a Python program in which torch.distributed.run, .launch, .launcher and .elastic are elastic-run's.

  PROGRAM                       a script's path, or the name of a command such as accelerate
  -m MODULE                     a module, as for python -m
  --children                    also for the Python processes that it starts (sets ELASTIC_RUN_COMPAT=1)
  --install-torchrun DIRECTORY  write a command torchrun that is elastic-run; put DIRECTORY first on PATH
  -h, --help                    show this and exit
"""


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; exit code 2 if it was wrong, 127 if the program wasn't found, else the program's."""
    rest = list(sys.argv[1:] if words is None else words)
    if rest[:1] == ["--children"]:
        os.environ[contract.ENV_COMPAT] = "1"
        del rest[0]
    first = rest[0] if rest else ""
    if first in {"-h", "--help"}:
        sys.stdout.write(USAGE)
    elif first == "--install-torchrun":
        _install_torchrun(rest[1:])
    elif first == "-m" and len(rest) > 1:
        compat.install()
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    elif not first or first.startswith("-"):
        _fail(f"{first!r} is not a program (see --help)" if first else "no program given (see --help)")
    else:
        _run_program(rest)


def _run_program(words: list[str]) -> None:
    path = _find_program(words[0])
    compat.install()
    sys.argv = [path, *words[1:]]
    if not getattr(sys.flags, "safe_path", False):
        # As Python does for a script; so far the working directory stands there, for our own -m.
        sys.path[0] = os.path.dirname(os.path.abspath(path))
    runpy.run_path(path, run_name="__main__")


def _find_program(name: str) -> str:
    """Return the path of a script, or of a Python command: those of this interpreter's environment come first."""
    if os.path.isfile(name):
        return name
    import shutil

    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    found = None if os.sep in name else shutil.which(name, path=path)
    if found is None:
        _fail(f"{name!r} is neither a script nor a command", contract.EXIT_NOT_FOUND)
    with open(found, "rb") as file:
        head = file.read(256)
    # pip writes a shell's line first where the path of the interpreter is too long for the kernel.
    if not head.startswith(b"#!") or b"python" not in head:
        _fail(f"{found} is not a Python program; with {contract.ENV_COMPAT}=1 set its Python children change too")
    return found


def _install_torchrun(words: list[str]) -> None:
    """Write the command, or write it anew, into a directory, which is made; another program's torchrun stays."""
    if len(words) != 1 or not words[0]:
        _fail("--install-torchrun takes one directory")
    if os.pathsep in words[0]:
        _fail(f"--install-torchrun: {words[0]!r} can't stand on PATH: it has a {os.pathsep!r}")
    import shlex

    directory = os.path.abspath(words[0])
    path = os.path.join(directory, "torchrun")
    # A Python script rather than a shell's `python -m`: modules in the working directory can't hide ours. A shell finds
    # an interpreter whose path is too long for the kernel or has a space; to Python the two lines are a string.
    python = sys.executable.replace("'", "'\"'\"'")
    lines = ["#!/bin/sh", f"'''exec' '{python}' \"$0\" \"$@\"", "' '''", _MARK]
    try:
        os.makedirs(directory, exist_ok=True)
        if os.path.lexists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                if _MARK not in file.read(4096):
                    _fail(f"--install-torchrun: {path} exists and is not ours: choose another directory", 1)
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write("\n".join([*lines, "from elastic_run.__main__ import main", "", "main()"]) + "\n")
        os.chmod(path, 0o755)  # noqa: S103 - a command is for all
    except OSError as error:
        _fail(f"--install-torchrun: {error}", contract.EXIT_FAILURE)
    sys.stdout.write(f'{path} is elastic-run. To have it found first: export PATH={shlex.quote(directory)}:"$PATH"\n')


def _fail(text: str, code: int = contract.EXIT_USAGE) -> NoReturn:
    sys.stderr.write(f"elastic_run.compat: error: {text}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()

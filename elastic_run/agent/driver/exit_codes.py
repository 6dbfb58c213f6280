"""The name and the exit code of each way in which a job can end: pure functions between the processes and `core`."""

from __future__ import annotations

import errno
import os
import sys

from elastic_run import contract
from elastic_run.core.agent import messages
from elastic_run.core.agent.restart_policy import Failure
from elastic_run.multiprocessing.process.interpreter import own_interpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.failure.root_cause import WorkerEnd

#: As much as the kernel looks at (BINPRM_BUF_SIZE).
_FIRST_LINE = 256
_EXIT_CODES = {name: code for code, name, _ in contract.EXIT_CODES if isinstance(code, int)}


def failure_of(root: WorkerEnd, uptime: float) -> Failure:
    """Return a failure for the restart policy, of a round that lived `uptime` seconds."""
    from elastic_run.core.failure.root_cause import failure_signature, is_deterministic  # noqa: PLC0415 - only after a failure

    return Failure(
        exit_code=exit_code_of(root),
        signature=repr(failure_signature(root)),
        is_deterministic=is_deterministic(root),
        uptime=uptime,
    )


def start_failed(number: int, error: Exception, program: str) -> messages.RoundFailed:
    """Return the event that says that a program could not be started."""
    if isinstance(error, OSError) and error.errno == errno.ENOEXEC:
        detail = f"{program} is not in a format that can be executed: a script needs a first line such as #!/bin/bash"
        return messages.RoundFailed(number, verdict="not_executable", detail=detail)
    is_program = getattr(error, "filename", None) in (None, program)
    if isinstance(error, FileNotFoundError) and is_program:
        return messages.RoundFailed(number, verdict="not_found", detail=f"{program}: {_name_missing(program)}")
    if isinstance(error, PermissionError) and is_program:
        return messages.RoundFailed(number, verdict="not_executable", detail=_name_denied(program, error.filename))
    return messages.RoundFailed(number, verdict="cannot_start", detail=f"{program} can't be started: {error}")


def _name_denied(program: str, path: object) -> str:
    """Name the file or directory that denies the execution, of the program or of its interpreter."""
    from elastic_run.cluster.programs import find_program, name_denier  # noqa: PLC0415 - only after a failure

    found = path if isinstance(path, str) and os.path.dirname(path) else find_program(program, os.environ) or program
    denier = name_denier(found) if os.path.dirname(found) else ""
    interpreter = _read_interpreter(found)
    if not denier and interpreter and not os.access(interpreter, os.X_OK):
        return f"{program}: its interpreter {interpreter!r} may not be executed{name_denier(interpreter)}"
    return f"{program} may not be executed{denier}"


def _name_missing(program: str) -> str:
    """Name the missing file. The system gives the same error for a missing script and for a missing interpreter."""
    from elastic_run.cluster.programs import find_program  # noqa: PLC0415 - only after a failure

    path = find_program(program, os.environ)
    if path is None:
        return "no such program"
    interpreter = _read_interpreter(path)
    if interpreter and not os.path.exists(interpreter):
        return f"its first line names the interpreter {interpreter!r}, which does not exist"
    return "its interpreter or loader does not exist here"


def _read_interpreter(path: str) -> str:
    """Return the interpreter in the first line of a script, as the kernel reads it; empty for other programs."""
    try:
        with open(path, "rb") as file:
            start = file.read(_FIRST_LINE)
    except OSError:
        return ""
    line = start.partition(b"\n")[0].replace(b"\t", b" ")
    return os.fsdecode(line[2:].strip(b" ").partition(b" ")[0]) if line.startswith(b"#!") else ""


def exit_code_of(root: WorkerEnd) -> int:
    """Return the exit code that a root cause gives its job: 128+n for signal n."""
    return root.exitcode if root.exitcode >= 0 else contract.EXIT_SIGNAL_BASE - root.exitcode


def exit_code(finish: messages.Finish, root: WorkerEnd | None) -> int:
    """Return the launcher's exit code; see `contract.EXIT_CODES`."""
    if finish.exit_code is not None:
        return finish.exit_code
    if finish.signal is not None:
        return contract.EXIT_SIGNAL_BASE + finish.signal
    if finish.verdict == "worker_failed":
        return contract.EXIT_FAILURE if root is None else exit_code_of(root)
    return _EXIT_CODES[finish.verdict]


def program_name(entrypoint: object, args: tuple[object, ...]) -> str:
    """Return the user's name for the program: the script rather than the interpreter."""
    if entrypoint in (sys.executable, own_interpreter(), os.environ.get(contract.ENV_PYTHON_EXEC)):
        return next((str(arg) for arg in args if not str(arg).startswith("-")), str(entrypoint))
    return str(getattr(entrypoint, "__qualname__", entrypoint))


def is_disk_full(directory: str) -> bool:
    """Whether nothing more fits on the disk of a directory."""
    try:
        return bool(directory) and os.statvfs(directory).f_bavail == 0
    except OSError:
        return False

"""Why the workers' program could not be started: the errors of the system, explained in words for the user."""

from __future__ import annotations

import errno
import os

from elastic_run.core.agent import messages

#: As much as the kernel looks at (BINPRM_BUF_SIZE).
_FIRST_LINE = 256


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
    from elastic_run.cluster.paths import find_program, name_denier

    found = path if isinstance(path, str) and os.path.dirname(path) else find_program(program, os.environ) or program
    denier = name_denier(found) if os.path.dirname(found) else ""
    interpreter = _read_interpreter(found)
    if not denier and interpreter and not os.access(interpreter, os.X_OK):
        return f"{program}: its interpreter {interpreter!r} may not be executed{name_denier(interpreter)}"
    return f"{program} may not be executed{denier}"


def _name_missing(program: str) -> str:
    """Name the missing file. The system gives the same error for a missing script and for a missing interpreter."""
    from elastic_run.cluster.paths import find_program

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

"""Reasons why a command can't have warm workers, as far as they are known before anything is started."""

from __future__ import annotations

import os
import sys

from elastic_run import contract
from elastic_run.multiprocessing.process.interpreter import own_interpreter
from elastic_run.utils import macros

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

#: The file whose line lets a process of this interpreter become a template.
_START_FILE = "elastic-run-compat.pth"
#: Python's own options before the program, without those that keep it from reading .pth files (-S) or that change what
#: comes next (-i).
_OPTIONS = frozenset("bBdEIOPqRsuv")
#: Those among them with which it doesn't look into the user's own site directory.
_WITHOUT_USER_SITE = frozenset("Is")
_OPTIONS_WITH_VALUE = ("-X", "-W")


def find_obstacle(argv: Sequence[str]) -> str:
    """Return why workers with a command line can't be forks of a template, or an empty string."""
    program = argv[0]
    if not _is_this_interpreter(program):
        own = own_interpreter() or sys.executable
        return f"the workers run {program}, which is not the Python of elastic-run, {own}"
    position = _find_program(argv)
    if position is None:
        return f"the options of {program} don't allow it"
    beginning = list(argv[: position + 1])
    if macros.substitute(beginning, "0") != macros.substitute(beginning, "1"):
        return f"{argv[position]} differs from worker to worker"
    if not _has_start_file(is_user_site_read=not _leave_out_user_site(argv[1:position])):
        return f"{_START_FILE} isn't there, or is of an older release: install elastic-run into {sys.prefix}"
    return ""


def _is_this_interpreter(program: str) -> bool:
    """Whether it is the same file in the same directory: from another one it may be of another environment."""
    if not os.path.isabs(program):
        return False
    own, others = os.path.normpath(own_interpreter()), os.path.normpath(program)
    return os.path.dirname(own) == os.path.dirname(others) and os.path.realpath(own) == os.path.realpath(others)


def _find_program(argv: Sequence[str]) -> int | None:
    """Return the position of the script, or of the word behind -m or -c."""
    position = 1
    while position < len(argv):
        word = argv[position]
        if word in ("-m", "-c"):
            return position + 1 if position + 1 < len(argv) else None
        if not word.startswith("-") or word == "-":
            return position
        if word in _OPTIONS_WITH_VALUE:
            position += 1
        elif not (word.startswith(_OPTIONS_WITH_VALUE) or set(word[1:]) <= _OPTIONS):
            return None
        position += 1
    return None


def _leave_out_user_site(options: Sequence[str]) -> bool:
    """Whether one of Python's options has it leave out the user's own site directory."""
    return any(
        word[0] == "-" and not word.startswith(_OPTIONS_WITH_VALUE) and _WITHOUT_USER_SITE.intersection(word)
        for word in options
    )


def _has_start_file(*, is_user_site_read: bool) -> bool:
    """Whether the file is where Python reads it at its start; Python reads no .pth file in PYTHONPATH, for example."""
    import site

    is_user_site_read = is_user_site_read and bool(site.ENABLE_USER_SITE)
    read = {*site.getsitepackages(), *([site.getusersitepackages()] if is_user_site_read else ())}
    needle = contract.ENV_TEMPLATE.encode()
    for directory in read.intersection(sys.path):
        try:
            with open(os.path.join(directory, _START_FILE), "rb") as file:
                if needle in file.read():
                    return True
        except OSError:
            pass
    return False

"""Checks of the workers' program: the script, module or command exists, and so does an interpreter for it.

The command of --health-check is checked in the same way.
"""

from __future__ import annotations

import os
import stat
import sys

from elastic_run import contract
from elastic_run.cli.values import nearest
from elastic_run.errors import UsageError
from elastic_run.multiprocessing.process.interpreter import own_interpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.cli.request import Request

_MACROS = ("${local_rank}", "$local_rank")
#: The first bytes of a program that no interpreter runs.
_ELF = b"\x7fELF"
#: Flags of Python without a value; workers are started with -u.
_INTERPRETER_FLAGS = frozenset(("-u", "-B", "-E", "-I", "-O", "-OO", "-s", "-S"))
#: En dash, em dash and minus sign, which text from a page or a chat has in place of hyphens.
_DASHES = "\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"


def check_program(request: Request, environ: Mapping[str, str]) -> None:
    """Refuse a program that can't be run, or flags about it that contradict each other."""
    args = request.args
    name = args.training_script
    if args.no_python and not request.uses_env:
        message = "--no-python: needs --use-env with this command, which otherwise adds the argument --local-rank"
        raise UsageError(message)
    if getattr(args, "local_rank_underscore", False) and request.uses_env:
        message = "--local-rank-underscore: cannot be combined with --use-env, which adds no local rank"
        raise UsageError(message)
    if args.run_path:
        _check_script(name, args.training_script_args)
        return
    if args.no_python:
        if args.module:
            message = "--no-python: cannot be combined with -m: --no-python runs a program, -m a Python module"
            raise UsageError(message)
        _check_command(name, environ, "--no-python")
        return
    _check_interpreter(environ)
    if not args.module:
        _check_script(name, args.training_script_args)
    elif os.sep in name or not name:
        message = f"-m: {name!r} is not the name of a module; leave out -m to run a file"
        raise UsageError(message)


def check_health_check(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse a command of --health-check that can't be started."""
    if words:
        _check_command(words[0], environ, "--health-check")


def _check_interpreter(environ: Mapping[str, str]) -> None:
    chosen = environ.get(contract.ENV_PYTHON_EXEC)
    if not chosen:
        if not own_interpreter():
            reason = f"{sys.executable} is not a Python interpreter" if sys.executable else "sys.executable is empty"
            message = f"{contract.ENV_PYTHON_EXEC}: must name the workers' interpreter: {reason}"
            raise UsageError(message)
        return
    from elastic_run.cluster.paths import find_program, name_denier

    if find_program(chosen, environ) is None:
        denier = name_denier(chosen) if os.path.dirname(chosen) else ""
        message = f"{contract.ENV_PYTHON_EXEC}: {chosen!r} is not a program that can be executed{denier}"
        raise UsageError(message)


def _check_command(name: str, environ: Mapping[str, str], flag: str) -> None:
    from elastic_run.cluster.paths import find_program, is_executable

    if _has_macro(name) or find_program(name, environ) is not None:
        return
    if os.path.isdir(name):
        message = f"{flag}: {name!r} is a directory"
        raise UsageError(message)
    if os.path.dirname(name):
        why = "is not executable (chmod +x)" if _exists(name, f"{flag}: program") else "does not exist"
        message = f"{flag}: program {name!r} {why}"
        raise UsageError(message)
    here = os.path.join(os.curdir, name)
    hint = f", did you mean {here!r}?" if is_executable(here) else ""
    message = f"{flag}: program {name!r} is not on PATH{hint}"
    raise UsageError(message)


def _check_script(name: str, arguments: Sequence[str]) -> None:
    """A directory or a zip file with a __main__.py is a script to Python; so is "-", and any pipe."""
    if name == "-" or _has_macro(name):
        return
    if not _exists(name, "script"):
        message = f"script {name!r} does not exist{_hint_at_launcher(name, arguments) or _script_hint(name)}"
        raise UsageError(message)
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "__main__.py")):
        message = f"script {name!r} is a directory without a __main__.py"
        raise UsageError(message)
    if stat.S_ISSOCK(os.stat(name).st_mode):
        message = f"script {name!r} is a socket"
        raise UsageError(message)
    if not os.access(name, os.R_OK):
        message = f"script {name!r} is not readable: no permission"
        raise UsageError(message)
    if not name.endswith(".py") and os.path.isfile(name):
        with open(name, "rb", buffering=0) as file:
            is_binary = file.read(len(_ELF)) == _ELF
        if is_binary:
            hint = _hint_at_launcher(name, arguments) or f", did you mean --no-python {name}?"
            message = f"script {name!r} is a binary program{hint}"
            raise UsageError(message)


def _hint_at_launcher(name: str, arguments: Sequence[str]) -> str:
    """Return the command line without a word that elastic-run replaces: the interpreter, or torchrun."""
    base = os.path.basename(name)
    if base == "torchrun":
        return f": elastic-run replaces torchrun: elastic-run {' '.join(arguments)}"
    if base.rstrip("0123456789.") != "python":
        return ""
    rest = list(arguments)
    while rest and rest[0] in _INTERPRETER_FLAGS:
        del rest[0]
    is_script = bool(rest) and not rest[0].startswith("-")
    line = " ".join(rest[:2]) if rest[:1] == ["-m"] else rest[0] if is_script else "SCRIPT"
    return f": leave the word out, since elastic-run starts the interpreter itself: elastic-run [flags] {line}"


def _exists(name: str, what: str) -> bool:
    """Whether there is such a file; raises UsageError where the system denies access to it."""
    try:
        os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        from elastic_run.cluster.paths import name_denier

        message = f"{what} {name!r} cannot be accessed: {name_reason(error)}{name_denier(name)}"
        raise UsageError(message) from None
    return True


def _has_macro(name: str) -> bool:
    """A name that differs from worker to worker is known only then."""
    return any(macro in name for macro in _MACROS)


def _script_hint(name: str) -> str:
    bare = name.lstrip(f"{_DASHES}-").partition("=")[0]
    if bare and name[0] in _DASHES:
        flag = f"-{bare}" if len(bare) == 1 else f"--{bare}"
        return f", did you mean {flag!r}? Its dashes are not hyphens, as a word processor writes them"
    if os.path.isfile(name + ".py"):
        return f", did you mean {name + '.py'!r}?"
    if not name.endswith(".py") and _is_module(name):
        return f", did you mean -m {name}?"
    from elastic_run.cluster.paths import find_program

    if find_program(name, os.environ) is not None:
        return _command_hint(name) or f", did you mean --no-python {name}?"
    directory, base = os.path.split(name)
    wanted = base.removesuffix(".py").lower()
    try:
        with os.scandir(directory or os.curdir) as entries:
            scripts = [entry.name for entry in entries if entry.name.endswith(".py") and entry.is_file()]
    except OSError:
        return ""
    known = {script[:-3].lower(): os.path.join(directory, script) for script in scripts}
    return nearest(wanted, known, translate=known) or _command_hint(name)


def _command_hint(name: str) -> str:
    """Return a hint that the word may be a misspelt command, unless it looks like a file or a module."""
    if "." in name or "/" in name:
        return ""
    from elastic_run.cli.commands import COMMANDS

    return nearest(name, COMMANDS, translate={command: f"elastic-run {command}" for command in COMMANDS})


def _is_module(name: str) -> bool:
    """Whether a module of this name lies where `-m` looks for it, as a file or a directory; nothing is imported."""
    parts = name.split(".")
    places = [os.path.join(place or os.curdir, *parts) for place in (os.curdir, *sys.path)]
    is_name = all(part.isidentifier() for part in parts)
    return is_name and any(os.path.isfile(place + ".py") or os.path.isdir(place) for place in places)


def name_reason(error: OSError) -> str:
    """Return the system's reason, as the end of a sentence."""
    return (error.strerror or str(error)).lower()

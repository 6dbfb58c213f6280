"""`python -m elastic_run` is the command `elastic-run`."""

from __future__ import annotations

import gc
import sys

from elastic_run import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main() -> None:
    """Run the command.

    Raises:
        SystemExit: The job didn't succeed, and the code is one of `contract.EXIT_CODES`; or a command has ended.
    """
    if len(sys.argv) > 1 and sys.argv[1].isalpha():  # no flag, and no script with a suffix
        from elastic_run.cli import commands

        if sys.argv[1] in commands.COMMANDS:
            sys.exit(commands.run(sys.argv[1:]))
    # Until the loop answers them, which takes over in time for the first worker.
    for number in (signals.SIGTERM, signals.SIGINT, signals.SIGHUP, signals.SIGQUIT):
        if signals.is_unanswered(number):
            signals.install_handler(number, signals.end_process)
    # A collection in the middle of start-up finds nothing and delays the workers; the launcher turns it on again.
    gc.disable()
    _import_argparse()
    from elastic_run import run

    run.run_command()


def _import_argparse() -> None:
    """Import argparse without gettext and `re`, whose imports take a tenth of the time until the first worker starts.

    The parser needs no translations, since all its lines are our own. argparse gets `re` when it first uses it, such as
    for a help text; see `cli.parser`.
    """
    gettext = type(sys)("gettext")
    gettext.gettext = lambda text: text  # type: ignore[attr-defined]
    gettext.ngettext = lambda one, more, count: one if count == 1 else more  # type: ignore[attr-defined]
    stand_ins: dict[str, Any] = {"gettext": gettext, "re": _Expressions()}
    stand_ins = {name: stand_in for name, stand_in in stand_ins.items() if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        import argparse  # noqa: F401 - for `run`
    except ImportError:
        pass  # it wants more of gettext, and gets it when it is imported again
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules[name] is stand_in:
                del sys.modules[name]  # a plug-in that wants translations gets them


class _Expressions:
    """In place of `re` in argparse. A finder of modules that imports it meanwhile gets what `re` has."""

    __spec__ = None  # which each import reads

    def __getattr__(self, name: str) -> object:
        if name == "compile" and sys._getframe(1).f_globals.get("__name__") == "argparse":  # noqa: SLF001 - the only way
            return _LazyPattern
        if isinstance(sys.modules.get("re"), _Expressions):
            del sys.modules["re"]
        import re

        return getattr(re, name)


class _LazyPattern:
    """A regular expression that is compiled when it is first used."""

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self._words = pattern, flags

    def __getattr__(self, name: str) -> object:
        import re

        return getattr(re.compile(*self._words), name)


if __name__ == "__main__":
    main()

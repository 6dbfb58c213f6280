"""`python -m elastic_run` is the command `elastic-run`."""

from __future__ import annotations

import gc
import sys

from elastic_run import signals


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
    gettext, expressions = type(sys)("gettext"), type(sys)("re")
    gettext.__dict__.update(gettext=lambda text: text, ngettext=lambda one, more, count: one if count == 1 else more)

    def load(name: str) -> object:
        if sys.modules.get("re") is expressions:
            del sys.modules["re"]  # a finder of modules imports it meanwhile
        import re

        return getattr(re, name)

    expressions.__dict__.update(compile=_LazyPattern, __getattr__=load)
    stand_ins = {each.__name__: each for each in (gettext, expressions) if each.__name__ not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        import argparse  # noqa: F401 - for `run`
    except ImportError:
        pass  # it wants more of gettext, and gets it when it is imported again
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]  # a plug-in that wants translations gets them


class _LazyPattern:
    """A regular expression that is compiled when it is first used."""

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self._words = pattern, flags

    def __getattr__(self, name: str) -> object:
        import re

        return getattr(re.compile(*self._words), name)


if __name__ == "__main__":
    main()

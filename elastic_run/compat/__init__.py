"""Lets torch's module paths mean elastic-run's, for programs that import torch's launcher themselves.

    elastic_run.compat.install()                        in a program
    python -m elastic_run.compat accelerate launch …    around a program
    ELASTIC_RUN_COMPAT=1 python …                       for a process and all its children

Rules
- A finder in front of the others answers for the paths of `paths.PATHS`; torch itself is not imported for it.
- What imports `torch.distributed.run` gets an alias of `elastic_run.run`: the same objects, so that ``isinstance``,
  ``except`` and pickles agree, whichever path they came by.
- Modules of torch's that aren't in the table, and private names that we lack, are torch's own: torch itself uses some
  of them in workers. A public name that we lack is an AttributeError which says so; ours never runs half of torch's.
- Children of multiprocessing follow: by spawn and forkserver an object that they unpickle first does it.
- Names that a module of torch's has from others are in ours as well, or else torch's own.
- The variable is read by a .pth file of one line that the wheel brings: the only way in which a variable can act on
  programs that know nothing of us. It costs each start of Python 0.15 ms of 7, and imports nothing unless it is set.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.compat.replacing import ChildrenHook, Replacement

__all__ = ["install", "install_if_asked_for", "is_installed", "uninstall"]

#: All that a process keeps: what `uninstall` has to undo, and what was said already.
_installed: list[Replacement] = []
_hooks: list[ChildrenHook] = []
_reported: list[str] = []


def install() -> None:
    """Let torch's paths mean ours in this process and its multiprocessing children. Doing it again changes nothing.

    Modules of torch's that were imported already are replaced, and so is what other modules imported from them. What
    can't be replaced (a class derived from one of torch's) is told in a warning.
    """
    if not _hooks:
        from elastic_run.compat.replacing import ChildrenHook

        _hooks.append(ChildrenHook())
    _replace()


def _replace() -> None:
    if _installed:
        return
    from elastic_run.compat.replacing import Replacement

    replacement = Replacement()
    replacement.make()
    _installed.append(replacement)


def uninstall() -> None:
    """Let torch's paths mean torch's again; what a module imported meanwhile stays what it got."""
    if _hooks:
        _hooks.pop().undo()
    if _installed:
        _installed.pop().undo()


def is_installed() -> bool:
    """Whether torch's paths mean ours in this process."""
    return bool(_installed)


def install_if_asked_for() -> None:
    """Do as the variable ELASTIC_RUN_COMPAT says; the .pth file calls it where the variable is set."""
    from elastic_run import contract

    value = os.environ.get(contract.ENV_COMPAT, "")
    if value == "1":
        _replace()  # children have the variable as well, and Python's start pays for no import of multiprocessing
    elif value not in {"", "0"} and value not in _reported and sys.stderr is not None:
        _reported.append(value)  # Python reads the .pth files of a virtual environment twice
        sys.stderr.write(f"elastic-run: {contract.ENV_COMPAT}: {value!r} is neither 1 nor 0: it counts as 0\n")

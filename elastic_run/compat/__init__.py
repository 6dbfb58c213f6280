"""Lets torch's module paths mean elastic-run's, for programs that import torch's launcher themselves.

    elastic_run.compat.install()                        in a program
    python -m elastic_run.compat accelerate launch …    around a program
    ELASTIC_RUN_COMPAT=1 python …                       for a process and all its children

What imports `torch.distributed.run` then gets an alias of `elastic_run.run`: the same objects, so that ``isinstance``,
``except`` and pickles agree, whichever path they came by. The variable is read by a .pth file of one line that the
wheel brings: the only way in which a variable can act on programs that know nothing of us. It costs each start of
Python 0.15 ms of 7, and imports nothing unless it is set.
"""

from __future__ import annotations

import os
import sys

__all__ = ["install", "install_if_asked_for", "is_installed"]

#: What this process has done: "modules", and a value of the variable that was refused.
_done: set[str] = set()


def install() -> None:
    """Let torch's paths mean ours in this process, before anything takes names from torch's launcher.

    Modules of torch's that were imported already are replaced; names that the program has taken from them stay torch's.
    Doing it again changes nothing. There is no way back in the same process.
    """
    if "modules" not in _done:
        from elastic_run.compat.alias import replace_modules

        _done.add("modules")
        replace_modules()


def is_installed() -> bool:
    """Whether torch's paths mean ours in this process."""
    return "modules" in _done


def install_if_asked_for() -> None:
    """Do as the variable ELASTIC_RUN_COMPAT says; the .pth file calls it where the variable is set."""
    from elastic_run import contract

    value = os.environ.get(contract.ENV_COMPAT, "")
    if value == "1":
        install()
    elif value not in {"", "0"} and value not in _done and sys.stderr is not None:
        _done.add(value)  # Python reads the .pth files of a virtual environment twice
        sys.stderr.write(f"elastic-run: {contract.ENV_COMPAT}: {value!r} is neither 1 nor 0: it counts as 0\n")

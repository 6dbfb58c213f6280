"""How other nodes join a job whose endpoint nobody could know beforehand: the whole command, to be copied."""

from __future__ import annotations

import shlex

__all__ = ["ENDPOINT", "describe_invitation"]

#: Stands for the endpoint, which is known only when the store is served.
ENDPOINT = "{endpoint}"
#: All nodes of a job must agree on it: the first one starts with the fewest nodes.
_NO_LAST_CALL = "last_call_timeout=0"
_CONF = "--rdzv-conf"
#: Flags that are said otherwise to other nodes: of the rendezvous, and what is true of this node only.
_REPLACED = frozenset((_CONF, "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--local-addr", "--node-rank"))
#: The worker's program comes next, or is a word that ends in .py; what follows are its own flags. Those of a program of
#: another name may be taken for ours: which of our flags have a value isn't known here.
_PROGRAM = ("-m", "--module", "--no-python", "--no_python", "--")


def describe_invitation(run_id: str, command: tuple[list[str], list[str]] | None) -> str:
    """Return the line for the user, with `ENDPOINT` in it.

    Args:
        run_id: The job.
        command: This node's command line, split where flags may be added; None where there is none.

    Returns:
        One line.
    """
    program, rest = command or (["elastic-run"], ["..."])
    given, others = _take_replaced(rest)
    conf = [given] if "last_call_timeout" in given else [given, _NO_LAST_CALL]
    flags = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={ENDPOINT}",
        f"--rdzv-id={run_id}",
        f"--rdzv-conf={','.join(filter(None, conf))}",
    ]
    return f"other nodes join with: {shlex.join(program)} {' '.join(flags)} {shlex.join(others)}".rstrip()


def _take_replaced(words: list[str]) -> tuple[str, list[str]]:
    """Return the user's settings of the rendezvous, and the command line without the flags that are replaced."""
    given, kept = "", []
    left = iter(words)
    for word in left:
        name, is_whole, value = word.partition("=")
        name = name.replace("_", "-")
        if name in _REPLACED:
            value = value if is_whole else next(left, "")
            given = value if name == _CONF else given
            continue
        kept.append(word)
        if word in _PROGRAM or word.endswith(".py"):
            break
    return given, [*kept, *left]

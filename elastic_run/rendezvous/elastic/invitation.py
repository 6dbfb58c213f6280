"""How other nodes join a job whose endpoint nobody could know beforehand: the whole command, to be copied."""

from __future__ import annotations

import shlex

__all__ = ["ENDPOINT", "describe_invitation"]

#: Stands for the endpoint, which is known only when the store is served.
ENDPOINT = "{endpoint}"
#: All nodes of a job must agree on it: the first one starts with the fewest nodes.
_NO_LAST_CALL = "last_call_timeout=0"


def describe_invitation(run_id: str, command: tuple[list[str], list[str]] | None) -> str:
    """Return the line for the user, with `ENDPOINT` in it.

    Args:
        run_id: The job.
        command: This node's command line, split where flags may be added; None where there is none.

    Returns:
        One line.
    """
    program, rest = command or (["elastic-run"], ["..."])
    conf = [_NO_LAST_CALL]
    others = []
    for word in rest:
        if word.startswith(("--rdzv-conf=", "--rdzv_conf=")):
            given = word.partition("=")[2]
            conf = [given] if "last_call_timeout" in given else [given, _NO_LAST_CALL]
        else:
            others.append(word)
    flags = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={ENDPOINT}",
        f"--rdzv-id={run_id}",
        f"--rdzv-conf={','.join(conf)}",
    ]
    return f"other nodes join with: {shlex.join(program)} {' '.join(flags)} {shlex.join(others)}".rstrip()

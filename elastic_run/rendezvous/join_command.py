"""How other nodes join a job whose endpoint nobody could know beforehand: the whole command, to be copied to a shell.

Rules
- A token that was made for this job stands in front of the command, as a variable: `ps` shows no variables to other
  users. A token that the user gave is not shown.
- It has each value that took effect on this node, as a flag: other nodes have neither this node's variables (`PET_…`)
  nor its configuration file. Left out are the values that other nodes need with other values.
"""

from __future__ import annotations

import os
import shlex

from elastic_run import contract
from elastic_run.core.job.node_config import JoinCommand

__all__ = ["describe_join_command"]

#: All nodes of a job must agree on it: the first one starts with the fewest nodes.
_NO_LAST_CALL = "last_call_timeout=0"
_CONF = "--rdzv-conf"
#: Flags that are said otherwise to other nodes: of the rendezvous, and what is true of this node only.
_REPLACED = (_CONF, "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--local-addr", "--node-rank")
_NO_COMMAND = JoinCommand(("elastic-run",), (), ("...",))


def describe_join_command(
    endpoint: str, run_id: str, command: JoinCommand | None, *, token: bytes | None = None
) -> str:
    """Return the command for other nodes, as one line for a shell.

    Args:
        endpoint: Where this node serves the store.
        run_id: The job.
        command: This node's command line; None where there is none.
        token: The token that was made for this job, or None.
    """
    command = command or _NO_COMMAND
    values = dict(word.partition("=")[::2] for word in command.flags)
    settings = [values.get(_CONF, "")]
    if "last_call_timeout" not in settings[0]:
        settings.append(_NO_LAST_CALL)
    words = [
        *command.command,
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={run_id}",
        f"{_CONF}={','.join(filter(None, settings))}",
        *(word for word in command.flags if word.partition("=")[0] not in _REPLACED),
        *command.program,
    ]
    secret = [] if token is None else [f"{contract.ENV_RDZV_TOKEN}={token.decode()}"]
    return " ".join([*secret, *map(_quote, words)])


def _quote(word: str) -> str:
    """Quote a word for a shell, in one line: what a terminal would obey is written as bash, zsh and ksh read it."""
    if word.isprintable():
        return shlex.quote(word)
    plain = range(ord(" "), ord("~") + 1)
    letters = (chr(byte) if byte in plain and byte not in b"'\\" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(letters)}'"

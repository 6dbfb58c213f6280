"""How other nodes join a job whose endpoint nobody could know beforehand: the whole command, to be copied to a shell.

Rules
- A token that was made for this job stands in front of the command, as a variable: `ps` shows no variables to other
  users. A token that the user gave is not shown.
- Flags and variables (`PET_…`) stay as the user gave them. Left out are those that other nodes need with other values.
"""

from __future__ import annotations

import os
import shlex

from elastic_run import contract
from elastic_run.core.node.join_command import JoinCommand

__all__ = ["describe_join_command"]

#: All nodes of a job must agree on it: the first one starts with the fewest nodes.
_NO_LAST_CALL = "last_call_timeout=0"
_CONF = "--rdzv-conf"
#: Flags that are said otherwise to other nodes: of the rendezvous, and what is true of this node only.
_REPLACED = (_CONF, "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--local-addr", "--node-rank")
_VARIABLES = {contract.ENV_FLAG_PREFIX + flag[2:].replace("-", "_").upper(): flag for flag in _REPLACED}
_NO_COMMAND = JoinCommand((), ("elastic-run",), (), ("...",))


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
    variables, conf = _take_variables(command.variables)
    flags, typed_conf = _take_flags(command.flags)
    conf = conf if typed_conf is None else typed_conf
    settings = [conf] if "last_call_timeout" in conf else [conf, _NO_LAST_CALL]
    words = [
        *command.command,
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={run_id}",
        f"{_CONF}={','.join(filter(None, settings))}",
        *flags,
        *command.program,
    ]
    if token is not None:
        variables.insert(0, f"{contract.ENV_RDZV_TOKEN}={token.decode()}")
    return " ".join([*map(_quote_assignment, variables), *map(_quote, words)])


def _take_variables(assignments: tuple[str, ...]) -> tuple[list[str], str]:
    """Return the variables that are true of other nodes too, and the settings of the rendezvous that they hold."""
    kept, conf = [], ""
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        if name not in _VARIABLES:
            kept.append(assignment)
        elif _VARIABLES[name] == _CONF:
            conf = value
    return kept, conf


def _take_flags(words: tuple[str, ...]) -> tuple[list[str], str | None]:
    """Return the flags that are true of other nodes too, and the settings of the rendezvous among the others."""
    kept, conf = [], None
    left = iter(words)
    for word in left:
        name, is_whole, value = word.partition("=")
        flag = _find_replaced(name)
        if flag is None:
            kept.append(word)
            continue
        value = value if is_whole else next(left, "")
        conf = value if flag == _CONF else conf
    return kept, conf


def _find_replaced(name: str) -> str | None:
    """Return the flag that a word means, if it is one of those; flags may be abbreviated."""
    if not name.startswith("--"):
        return None
    found = [flag for flag in _REPLACED if flag.startswith(name.replace("_", "-"))]
    return found[0] if len(found) == 1 else None


def _quote_assignment(assignment: str) -> str:
    """Quote the value only: a shell takes no quoted name for a variable's."""
    name, _, value = assignment.partition("=")
    return f"{name}={_quote(value) if value else ''}"


def _quote(word: str) -> str:
    """Quote a word for a shell, in one line: what a terminal would obey is written as bash, zsh and ksh read it."""
    if word.isprintable():
        return shlex.quote(word)
    plain = range(ord(" "), ord("~") + 1)
    letters = (chr(byte) if byte in plain and byte not in b"'\\" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(letters)}'"

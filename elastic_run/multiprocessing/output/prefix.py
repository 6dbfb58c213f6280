"""The text in front of every tee'd line.

The template's rules are those of `string.Template.safe_substitute`, as under torchrun: ``$name`` or ``${name}``, ``$$``
for a dollar, anything else stays as it is. That module is not imported: it would compile expressions for a millisecond
before the first worker starts.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def render_prefix(
    template: str, *, role_name: str, local_rank: int, rank: int, hostname: str, restart_count: int
) -> bytes:
    """Fill in a prefix template for one worker.

    Args:
        template: Text with ``${role_name}``, ``${local_rank}``, ``${rank}``, ``${hostname}``, ``${restart_count}``.
        role_name: The worker's role.
        local_rank: Its number on this node.
        rank: Its number in the job.
        hostname: This node's name.
        restart_count: Restarts of the job so far.
    """
    values = {
        "role_name": role_name,
        "local_rank": str(local_rank),
        "rank": str(rank),
        "hostname": hostname,
        "restart_count": str(restart_count),
    }
    return _substitute(template, values).encode("utf-8", "surrogateescape")


def _substitute(template: str, values: Mapping[str, str]) -> str:
    text, dollar, rest = template.partition("$")
    while dollar:
        if rest.startswith("$"):
            text += "$"
            rest = rest[1:]
        else:
            name, after = _placeholder(rest)
            text += values.get(name, "$" + rest[: len(rest) - len(after)])
            rest = after
        literal, dollar, rest = rest.partition("$")
        text += literal
    return text


def _placeholder(text: str) -> tuple[str, str]:
    """Split what follows a dollar into a name (empty when there is none) and the rest."""
    if text.startswith("{"):
        name, brace, after = text[1:].partition("}")
        return (name, after) if brace and _is_name(name) else ("", text)
    length = 0
    while length < len(text) and _is_name(text[: length + 1]):
        length += 1
    return text[:length], text[length:]


def _is_name(text: str) -> bool:
    return text.isascii() and text.isidentifier()

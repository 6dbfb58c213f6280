"""Where a value of the command line comes from: recorded once, in the moment in which the value is decided.

The values themselves stay those of torch's parser: plain text, numbers and lists in a namespace. Their origins stand
beside them in a dictionary by name, without the values that have their default. `--explain` shows origins, a message
about a wrong value begins with its origin, and the command for other nodes is made of the values that somebody gave.
"""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, MutableMapping

    from elastic_run.cli.flags import Flag

    #: Origins by the name of the value, as in the namespace.
    Origins = MutableMapping[str, "Origin"]

__all__ = [
    "DERIVED",
    "FILE",
    "FLAG",
    "KUBERNETES",
    "SLURM",
    "VARIABLE",
    "Origin",
    "derive",
    "name_source",
    "write_given",
]

FLAG, VARIABLE, FILE = "flag", "variable", "file"
SLURM, KUBERNETES, DERIVED = "Slurm", "Kubernetes", "derived"
_GIVEN = (FLAG, VARIABLE, FILE)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one value comes from.

    Args:
        kind: FLAG, VARIABLE, FILE, SLURM, KUBERNETES or DERIVED.
        source: The flag, the variable, the file, the scheduler's variables, or the reason.
        text: The value as it was written; for a derived value only where its value says nothing, such as a random id.
        unused: The origin that had a value too, and came second.
    """

    kind: str
    source: str
    text: str = ""
    unused: Origin | None = None

    @property
    def is_given(self) -> bool:
        """Whether the user gave the value."""
        return self.kind in _GIVEN


def derive(args: Namespace, origins: Origins, origin: Origin, **values: object) -> None:
    """Give values that follow from others, unless they are there already."""
    for dest, value in values.items():
        if getattr(args, dest) != value:
            setattr(args, dest, value)
            origins[dest] = Origin(origin.kind, origin.source, origin.text, origins.get(dest))


def name_source(message: str, origins: Mapping[str, Origin]) -> str:
    """Put the variable, or the file, in front of a message about a flag, where the value comes from there."""
    flag, colon, rest = message.partition(":")
    origin = origins.get(flag[2:].replace("-", "_")) if flag.startswith("--") else None
    if origin is None or origin.kind not in (VARIABLE, FILE):
        return message
    return f"{origin.source}{f': {flag[2:]}' * (origin.kind == FILE)}{colon}{rest}"


def write_given(flag: Flag, args: Namespace, origins: Mapping[str, Origin]) -> str:
    """Return a flag with its value as one word, if the user gave it in any way; otherwise ""."""
    origin = origins.get(flag.dest)
    if origin is None or not origin.is_given:
        return ""
    if flag.is_switch:
        return flag.name if getattr(args, flag.dest) else ""
    return f"{flag.name}={origin.text}"

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
    "has_left_slurm",
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
        text: The value as it was written, or as it follows from a scheduler; for another derived value only where its
            value says nothing, such as a random id.
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


def has_left_slurm(args: Namespace) -> bool:
    """Whether Slurm's variables give no value: they are left over from a step in which this launcher does not run.

    The answer is found at the start, since the parent of the launcher may end before the launcher.
    """
    return getattr(args, "has_left_slurm", False)


def name_source(message: str, origins: Mapping[str, Origin], environ: Mapping[str, str]) -> str:
    """Name the variables, or the file, in a message about flags whose values come from there.

    Args:
        message: A message that begins with a flag, and may mention more: as ``--nnodes=3`` or ``leave --nnodes out``.
            Another one is returned as it is.
        origins: Origins of the values.
        environ: The environment.
    """
    if not message.startswith("--"):
        return message
    flag, colon, rest = message.partition(":")
    origin = origins.get(flag[2:].replace("-", "_"))
    if origin is not None:
        flag = _name_subject(flag, origin, environ)
    for dest, other in origins.items():
        if other.text and other.kind in (VARIABLE, FILE, SLURM, KUBERNETES):
            rest = _rename(rest, f"--{dest.replace('_', '-')}", other)
    return f"{flag}{colon}{rest}"


def _name_subject(flag: str, origin: Origin, environ: Mapping[str, str]) -> str:
    if origin.kind == VARIABLE:
        return origin.source
    if origin.kind == FILE:
        return f"{origin.source}: {flag[2:]}"
    if origin.kind not in (SLURM, KUBERNETES):
        return flag
    names = origin.source.split(", ")
    variables = " ".join(f"{name}={environ[name]}" for name in names if name in environ)
    return f"{variables or origin.source or origin.kind}: {flag}"


def _rename(text: str, flag: str, origin: Origin) -> str:
    """Name the origin where a text shows the given value of a flag, and where it says to leave the flag out."""
    import re

    shown, removed = {
        VARIABLE: (f"{origin.source}={origin.text}", f"leave {origin.source} unset"),
        FILE: (f"{flag[2:]}={origin.text} in {origin.source}", f"leave {flag[2:]} out of {origin.source}"),
    }.get(origin.kind, (f"{flag}={origin.text} from {origin.source or origin.kind}", f"leave {flag} out"))
    text = text.replace(f"leave {flag} out", removed)
    return re.sub(rf"{re.escape(f'{flag}={origin.text}')}(?![\w.-]|:\w)", lambda _: shown, text)


def write_given(flag: Flag, args: Namespace, origins: Mapping[str, Origin]) -> str:
    """Return a flag with its value as one word, if the user gave it in any way; otherwise ""."""
    origin = origins.get(flag.dest)
    if origin is None or not origin.is_given:
        return ""
    if flag.is_switch:
        return flag.name if getattr(args, flag.dest) else ""
    return f"{flag.name}={origin.text}"

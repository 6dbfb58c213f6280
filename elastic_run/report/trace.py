"""The lines of a traceback that tell most, if there is room for a few: the user's own code, and the last frame."""

from __future__ import annotations

import re

from elastic_run.core.failure.traceback_text import FOREIGN_PATHS
from elastic_run.records import dataclass, field
from elastic_run.report.text import elide, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.failure.root_cause import ExceptionText

_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+)(?:,? in (?P<name>.+))?$')
_INSTALLED = re.compile(r"^.*/(?:site-packages|dist-packages|lib(?:64)?(?=/python3))/")
#: Where `@record` stands, ours and torch's: in every traceback, and never the reason.
_RECORDERS = (
    "elastic_run/multiprocessing/errors/handlers.py",
    "torch/distributed/elastic/multiprocessing/errors/__init__.py",
)
#: Lines of code of one frame, and frames of libraries, that are shown.
_CODE = 2
_LIBRARY_FRAMES = 2


@dataclass(slots=True)
class _Frame:
    """A place in a traceback and the code that stands there."""

    place: str
    is_own: bool
    code: list[str] = field(default_factory=list)


def trace_lines(exception: ExceptionText, *, width: int, most: int) -> list[str]:
    """Choose the lines of a traceback that tell most.

    Args:
        exception: The exception.
        width: Columns of a line; a place is never cut.
        most: Lines that may be returned.

    Returns:
        Places as `path:line in name` with their code below, outermost first, `...` where some are left out; and the
        members of an exception group.
    """
    frames = _frames(exception)
    members = [elide(printable(line), width) for line in exception.lines if line.startswith("  | ")][: most // 2]
    chosen: set[int] = set()
    for index in _by_worth(frames):
        if len(_layout(frames, chosen | {index}, width)) > most - len(members):
            break
        chosen.add(index)
    return _layout(frames, chosen, width) + members


def find_own_place(exception: ExceptionText) -> tuple[str, str] | None:
    """Return file and line of the innermost frame of the user's own code, or of the innermost frame of all.

    Returns:
        Both as the traceback has them, or None where it names no file.
    """
    found = [match for match in map(_FRAME.match, exception.lines) if match is not None]
    own = [match for match in found if not any(part in match["file"] for part in FOREIGN_PATHS)]
    place = next(reversed(own or found), None)
    return None if place is None else (printable(place["file"]), place["line"])


def _by_worth(frames: list[_Frame]) -> list[int]:
    """The innermost frame, the user's own from the inside out, and a library's next to the innermost."""
    inside_out = range(len(frames) - 1, -1, -1)
    own = [index for index in inside_out if frames[index].is_own]
    foreign = [index for index in inside_out if not frames[index].is_own][:_LIBRARY_FRAMES]
    return [*dict.fromkeys([*inside_out[:1], *own, *foreign])]


def _frames(exception: ExceptionText) -> list[_Frame]:
    frames: list[_Frame] = []
    is_recorder = False
    for line in exception.lines:
        found = _FRAME.match(line)
        if found is not None:
            is_recorder = found["file"].endswith(_RECORDERS)
        if is_recorder:
            continue
        if found is not None:
            name = f" in {found['name']}" if found["name"] else ""
            is_own = not any(part in found["file"] for part in FOREIGN_PATHS)
            path = _INSTALLED.sub("", found["file"])
            frames.append(_Frame(printable(f"{path}:{found['line']}{name}"), is_own=is_own))
        elif frames and line.startswith("    ") and line.strip() and len(frames[-1].code) < _CODE:
            frames[-1].code.append(printable(line.strip()))
    return frames


def _layout(frames: list[_Frame], chosen: set[int], width: int) -> list[str]:
    lines: list[str] = []
    before = -1
    for index in sorted(chosen):
        if index != before + 1:
            lines.append("...")
        lines.append(frames[index].place)  # readers copy it
        lines += [f"  {elide(code, width - 2)}" for code in frames[index].code]
        before = index
    return lines

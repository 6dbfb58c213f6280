"""Find, in the end of a program's stderr, the exception that the program died of.

Pure, and imported only after a failure. A program may write anything before, between and after the lines of a
traceback: progress bars, other threads' logs, C++ warnings at exit. So the text is a list of lines in which blocks
begin, and the last block counts, if the text ends with it. It does not where the block was logged and the program wrote
on, where the program chose an exit code of its own and wrote on, or where it was killed from outside: then a handled
exception would be blamed, and the last lines of stderr say more.

Exit code 1 is Python's for an uncaught exception. There the last block is returned, whatever follows: other threads,
exit handlers and child processes may write any amount. It isn't certain then, and marked so.

A prefix that a writer puts before each line, such as `[rank0]: `, is taken off, and lines without it are another
writer's. Where there is no prefix, lines that can't belong to a traceback are passed over.
"""

from __future__ import annotations

import re

from elastic_run import contract
from elastic_run.core.failure.root_cause import FATAL_ERROR, ExceptionText
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

#: Characters of the text, and of a line, that are looked at.
_TEXT_LIMIT = 256 * 1024
_LINE_LIMIT = 16 * 1024
#: Lines after an exception, from which on the program is taken to have lived on.
_AFTERLIFE = 30
#: Python's exit code for an uncaught exception, and lines of a message that may be other output.
_UNCAUGHT = 1
_UNCERTAIN_LINES = 20
#: HUP, QUIT, KILL, PIPE, ALRM, TERM, XCPU, XFSZ: a worker that one of these ended did not end by an exception.
_KILLS = frozenset((-1, -3, -9, -13, -14, -15, -24, -25))

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]")
_IGNORED = re.compile(r"^Exception ignored (?:in|while)")
_LOGGED = re.compile(r"(?:^|[\s\[|:(])(?:CRITICAL|DEBUG|ERROR|INFO|WARN|WARNING)(?=[\s\]|:)])", re.IGNORECASE)
#: What a program writes that is already going down.
_AT_EXIT = re.compile(
    r"^\s*$|^\s|^frame #|^Exception raised from|^<omitting python frames>|^(?:\[rank\d+\]:)?\[[WEIF]\d{4} "
    r"|^Exception ignored|^wandb: |resource_tracker|destroy_process_group|\d+%\||^srun: |^Aborted|^Extension modules: "
)


def parse_exception(text: str, exitcode: int | None = None) -> ExceptionText | None:
    """Return the exception with which a text ends, or None; after exit code 1 it may be one that isn't certain."""
    if exitcode in _KILLS:
        return None
    lines = _clean(text)
    blocks = list(_find_blocks(lines))
    if not blocks:
        return None
    exception = blocks[-1].exception
    if _is_the_end(lines, blocks[-1], exitcode):
        return exception
    if exitcode != _UNCAUGHT:
        return None
    exception.is_certain = False
    exception.message = "\n".join(exception.message.split("\n")[:_UNCERTAIN_LINES])
    return exception


def _clean(text: str) -> list[str]:
    """Split into lines, one more for each part that a carriage return would overwrite, without a terminal's escapes."""
    text = _ANSI.sub("", text[-_TEXT_LIMIT:]).replace("\r\n", "\n").replace("\r", "\n")
    return [line[:_LINE_LIMIT] for line in text.split("\n")]


def _find_blocks(lines: list[str]) -> Iterator[Block]:
    """Yield the exceptions in a text, first to last."""
    before: Block | None = None
    index = 0
    while index < len(lines):
        block = _read_block(lines, index)
        if block is None:
            index += 1
            continue
        index = block.end
        if block.start > 0 and _IGNORED.search(lines[block.start - 1]):
            continue
        _link(before, block)
        yield block
        before = block


def _link(before: Block | None, block: Block) -> None:
    """Note what an exception was raised from; let a C++ exception keep its name where faulthandler dumps the abort."""
    if before is None:
        return
    exception, cause = block.exception, before.exception
    if block.is_fatal and before.is_fatal and exception.message == "Aborted":
        exception.type, exception.message = cause.type, cause.message
        exception.lines = (*exception.lines[:-1], *cause.lines)
    elif block.is_fatal and _repeats(exception, cause):
        # Another thread, such as NCCL's watchdog, has ended the program by the same error.
        block.exception, block.origin = cause, before.origin
    elif before.is_chained and cause.summary == exception.summary:
        # The same one, raised again where a pool's result was asked for: where it happened tells more.
        exception.where, exception.lines, exception.cause = cause.where, cause.lines, cause.cause
        block.origin = before.origin
    elif before.is_chained:
        # Where all began tells most, and the last step before this exception how it came to that.
        block.origin = exception.cause = before.origin or cause.summary
        if block.origin != cause.summary:
            exception.cause += f" (by way of {cause.summary})"


def _repeats(exception: ExceptionText, cause: ExceptionText) -> bool:
    """Whether the first line of a C++ exception ends with that of an exception of Python."""
    told = cause.message.partition("\n")[0]
    return bool(told) and exception.message.partition("\n")[0].endswith(f": {told}")


def _is_the_end(lines: list[str], block: Block, exitcode: int | None) -> bool:
    """Whether the program died of this exception, as far as what it wrote afterwards tells."""
    if block.is_fatal:
        return True
    if any(contract.LOST_LINES in line for line in lines[block.start :]):
        return False
    others = block.ambiguous + sum(1 for line in lines[block.end :] if not _AT_EXIT.search(line))
    is_logged = block.start > 0 and _LOGGED.search(lines[block.start - 1]) is not None
    is_logged = is_logged or _LOGGED.search(HEADER.sub(r"\g<prefix>", lines[block.start])) is not None
    chose_its_code = exitcode is not None and exitcode > 1
    return others == 0 if is_logged or chose_its_code else others <= _AFTERLIFE


# --- the shapes in which an exception stands in a text, one reader each -----------------------------------------------
#: Lines of a traceback, and characters of a message, that are kept.
_LINES_LIMIT = 120
_MESSAGE_LIMIT = 16 * 1024
#: Lines of others that may stand between two lines of a traceback: threads that write at the same time.
_STRANGERS_LIMIT = 20_000
#: Lines of others that may stand between its header and a writer's next line.
_PREFIX_WAIT = 50
#: Parts of a path that is not the user's own code.
FOREIGN_PATHS = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "<frozen", "<string>")
_LEVELS = frozenset(("CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "NOTE", "NOTICE", "TRACE", "WARN", "WARNING"))

#: The first line of a traceback. torch writes it for an exception of another process ("Original Traceback"), Python for
#: each member of a group, of which the last one counts; the package rich draws a box around it.
HEADER = re.compile(r"^(?P<prefix>.*?)(?:Original )?Traceback \(most recent call last\)(?::|\s─+╮)?\s*$")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+)(?:,? in (?P<name>.+))?$')
_RICH_FRAME = re.compile(r"^│ (?P<file>\S[^│]*?):(?P<line>\d+) in (?P<name>\S+)")
_MARKER = re.compile(r"^\s+[~^]+\s*$")
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_](?:[\w.]|<locals>)*)(?:: ?(?P<message>.*))?$")
_EXCEPTION_NAME = re.compile(r"(?:Error|Exception|Exit|Failure|Interrupt|Timeout|TimeoutExpired|Warning)$")
_SYNTAX_ERROR = re.compile(r"^(?:\w+\.)*(?:SyntaxError|IndentationError|TabError): ")
_CHAIN = re.compile(r"^(?:The above exception was the direct cause of|During handling of the above exception, another)")
_TERMINATE = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']+)'")
_WHAT = re.compile(r"^\s*what\(\):\s+(?P<message>.*)$")
_TRACE_OF_CPP = re.compile(r"^(?:frame #|Exception raised from|<omitting python frames>)")
#: Where a message ends and something else begins.
_OTHER_OUTPUT = re.compile(
    r"^(?:\[rank\d+\]:)?\[[WEIF]\d{4} |^Exception (?:ignored|in thread)|^Fatal Python error: |^terminate called"
    r"|^wandb: |^\S+:\d+: \w*Warning: |^\[?\d{4}-\d\d-\d\d[ T]\d\d:|^srun: "
    r"|^(?:CRITICAL|DEBUG|ERROR|INFO|WARNING)\b|\d+%\|"
)


@dataclass(slots=True)
class Block:
    """An exception, and where in the text it stands."""

    start: int  # Index of its first line
    end: int  # Index of the line after its last
    exception: ExceptionText  # What it says
    is_fatal: bool = False  # Whether nothing but death can follow it
    is_chained: bool = False  # Whether another exception followed from it
    ambiguous: int = 0  # Lines in it that may be more of its message, or output of a program that lived on
    #: The exception with which a chain began that ends with this one, in one line, or ""
    origin: str = field(default="", init=False)


class _Frames:
    """The lines of a traceback, and the innermost place in the user's own code."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._own = ""
        self._any = ""

    def add(self, frame: re.Match[str]) -> None:
        self.lines.append(frame[0].rstrip())
        self._any = place = _place(frame)
        if not any(part in frame["file"] for part in FOREIGN_PATHS):
            self._own = place

    @property
    def where(self) -> str:
        return self._own or self._any


class _Rows:
    """The lines of one writer after its header, without the prefix that it puts before each."""

    def __init__(self, lines: list[str], header: int, prefix: str) -> None:
        following = lines[header + 1 : header + 1 + _PREFIX_WAIT]
        # A letter or a digit ends what another thread was about to write: `step 1`, and then `step 10` is no row.
        may_be_prefix = bool(prefix) and not prefix[-1].isalnum()
        self.is_prefixed = may_be_prefix and any(line.startswith(prefix) for line in following)
        self._lines = lines
        self._prefix = prefix if self.is_prefixed else ""
        self._next = header + 1
        #: Index of the line after the last that was taken.
        self.end = header + 1

    def __iter__(self) -> Iterator[str]:
        while self._next < len(self._lines):
            line = self._lines[self._next]
            self._next += 1
            if line.startswith(self._prefix) or line.rstrip() == self._prefix.rstrip():
                yield line[len(self._prefix) :]

    def take(self) -> None:
        """Count the row that was read last, and all before it, to the block."""
        self.end = self._next


def _read_block(lines: list[str], index: int) -> Block | None:
    """Read the block that begins at a line, or return None where none begins."""
    line = lines[index]
    header = HEADER.match(line)
    if header is not None:
        return _read_traceback(lines, index, header["prefix"])
    if line.startswith("Fatal Python error: "):
        return _read_fatal(lines, index)
    terminate = _TERMINATE.search(line)
    if terminate is not None:
        return _read_terminate(lines, index, terminate["type"])
    if _SYNTAX_ERROR.match(line):
        return _read_syntax_error(lines, index)
    return None


def _read_traceback(lines: list[str], start: int, prefix: str) -> Block | None:
    rows = _Rows(lines, start, prefix)
    frames = _Frames()
    found = _read_frames(rows, frames)
    if found is None:
        return None
    message, is_chained = _read_message(rows)
    ambiguous = 0 if rows.is_prefixed else sum(1 for line in message if _is_ambiguous(line))
    # Python writes no colon behind the name where there is no message: the lines below it are other output.
    text = [] if found["message"] is None else [found["message"], *message]
    exception = _exception(found["type"], text, frames)
    return Block(start, rows.end, exception, is_chained=is_chained, ambiguous=ambiguous)


def _read_frames(rows: _Rows, frames: _Frames) -> re.Match[str] | None:
    """Read up to the line that names the exception, and return it."""
    is_adjacent, strangers = True, 0
    for row in rows:
        frame = _match_frame(row)
        found = _EXCEPTION.match(row)
        if frame is not None:
            frames.add(frame)
            strangers = 0
        elif frames.lines and is_adjacent and row.startswith("    "):
            if not _MARKER.match(row):
                frames.lines.append(row.rstrip())
        elif found is not None and _is_exception(found, is_adjacent=is_adjacent):
            rows.take()
            return found
        elif HEADER.match(row) or strangers > _STRANGERS_LIMIT:
            return None
        else:
            # The lines of rich's box are no strangers, and the exception stands right below it.
            is_box = row[:1] in ("│", "╰")
            is_adjacent, strangers = is_box or row.startswith("  [Previous line"), strangers + (not is_box)
            continue
        is_adjacent = True
    return None


def _match_frame(row: str) -> re.Match[str] | None:
    """Match a frame's first line, also behind other output that has no end of a line."""
    torn = row.find('  File "')
    return _FRAME.match(row) or _RICH_FRAME.match(row) or (_FRAME.match(row[torn:]) if torn > 0 else None)


def _is_exception(found: re.Match[str], *, is_adjacent: bool) -> bool:
    """Whether a line names an exception: some program's log line may look like one."""
    name = found["type"].rpartition(".")[2]
    if found["type"] in _LEVELS or not name:
        return False
    if _EXCEPTION_NAME.search(name):
        return True
    return is_adjacent and ("." in found["type"] or name[0].isupper() or name[0] == "_")


def _read_message(rows: _Rows) -> tuple[list[str], bool]:
    """Read the lines of a message after its first; and whether another exception followed from this one."""
    message: list[str] = []
    for row in rows:
        if _CHAIN.match(row):
            return _strip(message), True
        if HEADER.match(row) or _OTHER_OUTPUT.search(row):
            break
        message.append(row)
        if row.strip():
            rows.take()
    return _strip(message), False


def _is_ambiguous(line: str) -> bool:
    return bool(line.strip()) and not line[0].isspace() and not _TRACE_OF_CPP.match(line)


def _read_fatal(lines: list[str], start: int) -> Block:
    """Read what faulthandler wrote: the thread that crashed, its innermost call first."""
    frames: list[re.Match[str]] = []
    end, is_current = start + 1, False
    for index in range(start + 1, len(lines)):
        frame = _FRAME.match(lines[index])
        if frame is not None and is_current:
            frames.append(frame)
            end = index + 1
        elif frames and not lines[index].strip():
            break
        elif frame is None:
            is_current = is_current or lines[index].startswith("Current thread")
    called = _Frames()
    for frame in reversed(frames):
        called.add(frame)
    message = lines[start].partition(": ")[2]
    return Block(start, end, _exception(FATAL_ERROR, [message], called), is_fatal=True)


def _read_terminate(lines: list[str], start: int, name: str) -> Block:
    """Read the C++ runtime's message about an uncaught exception."""
    message: list[str] = []
    end = start + 1
    for index in range(start + 1, len(lines)):
        what = _WHAT.match(lines[index])
        if _TRACE_OF_CPP.match(lines[index]) or _OTHER_OUTPUT.search(lines[index]) or HEADER.match(lines[index]):
            break
        if what is not None:
            message = [what["message"]]
        elif message:
            message.append(lines[index])
        end = index + 1
    return Block(start, end, _exception(name, _strip(message), _Frames()), is_fatal=True)


def _read_syntax_error(lines: list[str], end: int) -> Block | None:
    """Read a syntax error in the program itself, which has a place but no traceback."""
    for start in range(max(0, end - 4), end):
        frame = _FRAME.match(lines[start])
        if frame is not None:
            frames = _Frames()
            frames.add(frame)
            frames.lines += [line.rstrip() for line in lines[start + 1 : end]]
            name, _, message = lines[end].partition(": ")
            return Block(start, end + 1, _exception(name, [message], frames))
    return None


def _exception(name: str, message: list[str], frames: _Frames) -> ExceptionText:
    text = "\n".join(message)[:_MESSAGE_LIMIT].rstrip()
    exception = ExceptionText(name, text, where=frames.where)
    exception.lines = (*frames.lines[-_LINES_LIMIT:], exception.summary)
    return exception


def _place(frame: re.Match[str]) -> str:
    name = frame["name"]
    place = f"{frame['file'].rpartition('/')[2]}:{frame['line']}"
    return place if name in (None, "<module>") else f"{place} in {name}"


def _strip(lines: list[str]) -> list[str]:
    while lines and lines[-1].strip() in ("", '"""'):
        lines.pop()
    return lines

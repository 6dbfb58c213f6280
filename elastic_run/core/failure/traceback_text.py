"""Find, in the end of a program's stderr, the exception that the program died of.

Pure, and imported only after a failure. A program may write anything before, between and after the lines of a
traceback: progress bars, other threads' logs, C++ warnings at exit. So the text is a list of lines in which blocks
begin (`traceback_blocks` reads them), and the last block counts, if the text ends with it. It does not where the block
was logged and the program wrote on, where the program chose an exit code of its own and wrote on, or where it was
killed from outside: then a handled exception would be blamed, and the last lines of stderr tell more.

Exit code 1 is Python's for an uncaught exception. There the last block is returned, whatever follows:
other threads, exit handlers and child processes may write any amount. It isn't certain then, and marked so. Only there
an exception counts that no whole line names (`torn_names`): other threads wrote into the line.
"""

from __future__ import annotations

import re

from elastic_run import contract
from elastic_run.core.failure.traceback_blocks import HEADER, Block, read_block

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_run.core.failure.exception_text import ExceptionText

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


def find_exception(text: str, exitcode: int | None = None) -> ExceptionText | None:
    """Find the exception with which a text ends.

    Args:
        text: The end of a program's stderr.
        exitcode: How the program ended, minus the signal's number, if known.

    Returns:
        The exception, or None. After exit code 1 it may be one that isn't certain.
    """
    if exitcode in _KILLS:
        return None
    lines = _clean(text)
    blocks = list(_find_blocks(lines, has_torn=exitcode == _UNCAUGHT))
    if not blocks:
        return None
    exception = blocks[-1].exception
    if not blocks[-1].is_torn and _is_the_end(lines, blocks[-1], exitcode):
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


def _find_blocks(lines: list[str], *, has_torn: bool) -> Iterator[Block]:
    """Yield the exceptions in a text, first to last; on request those as well that no whole line names."""
    before: Block | None = None
    index = 0
    while index < len(lines):
        block = read_block(lines, index)
        if block is None or (block.is_torn and not has_torn):
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

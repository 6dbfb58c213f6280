"""The closing report: at most 25 lines, as wide as the terminal, in the order of a reader's questions.

Which worker failed first, how and when; its error message; how the other workers ended; the attempts before; the
place of the logs; a hint. Every section has a maximum of lines, and the traceback, or the last lines of stderr,
gets the lines that the other sections leave. All text of workers passes through `text.printable`.

Paths and commands are neither cut nor wrapped, so that a reader can copy them. So a line may be too wide; then the
terminal wraps it.
"""

from __future__ import annotations

import os
import time

from elastic_run.contract import ENV_HOSTS_MARK, HANG
from elastic_run.core.failure.diagnose import COLLECTIVE, EARLY_EXIT, NODE_EVENT, OOM_KILL, STUCK
from elastic_run.core.failure.job_result import OF_NODE
from elastic_run.core.failure.root_cause import LAST_EXCEPTION, failure_signature
from elastic_run.records import dataclass
from elastic_run.report.closing_report_sections import (
    early_exit,
    equal_errors,
    find_own_place,
    other_worker_lines,
    stuck_workers,
    trace_lines,
)
from elastic_run.report.failure_documents import write_failure_file
from elastic_run.report.lines import failed
from elastic_run.report.text import (
    columns,
    count,
    elide,
    end_verb,
    exception_line,
    printable,
    ranks,
    shorten,
    shows_colors,
    signal_name,
    span,
    wrap,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.core.failure.job_result import Attempt, Cause, JobResult
    from elastic_run.core.failure.root_cause import ExceptionText, WorkerEnd
    from elastic_run.multiprocessing.output.console import Console

MOST_LINES = 25
#: Columns if stderr is no terminal.
WIDTH = 80
_LABEL = 9
#: Lines of evidence.
_MOST_EVIDENCE = 12
_MOST_STUCK = 3
#: Columns of the program's name in the title, and at least where the title is too long.
_MOST_NAME, _LEAST_NAME = 40, 12
#: Runs of attempts that failed in the same way, and lines of a message, that are shown.
_MOST_RUNS = 3
_MOST_MESSAGE = 3
#: Lines of a hang, which names the places of all ranks.
_MOST_HANG = 5
#: Lines of the detail of a job that ended without a worker's failure: it may name two paths, each in its own line.
_MOST_DETAIL = 9
#: Last lines of stderr below a traceback that may not be the cause.
_LAST_LINES = 3
#: Begins of the lines that torch writes below every CUDA error.
_GENERAL_ADVICE = (
    *("Search for `cudaError", "CUDA kernel errors might be asynchronously reported at some other API call"),
    *("For debugging consider passing CUDA_LAUNCH_BLOCKING=1", "Compile with `TORCH_USE_CUDA_DSA`"),
)
#: Begin of the lines with which torch shows the calls of C++ below an exception.
_FRAME_OF_CPP = "frame #"
_TITLES = {
    "cannot_start": "{program} could not be started",
    "internal_error": "a defect of elastic-run ended {program}",
    "not_executable": "{program} could not be started",
    "not_found": "{program} could not be started",
    "nodes_lost": "{program}: too few nodes were left",
    "rendezvous": "{program}: the nodes did not come together",
    "refused": "{program}: the job refused this node",
    "repeated_failure": "{program} failed again in the same way",
    "store_lost": "{program}: the job's store can't be reached",
    "hung": "{program}: no rank made progress",
    "excluded": "{program}: the job excluded this node",
    "unhealthy": "{program}: the health check failed",
    "unkillable_worker": "{program}: a worker can't be killed",
    "usage": "{program} was not started",
}
_BOLD = "\x1b[1m"
_RED = "\x1b[31m"
_PLAIN = "\x1b[0m"


def print_ending(result: JobResult, console: Console, environ: Mapping[str, str]) -> None:
    """Print the report of a job that has failed, and leave it in the log directory and for the launcher above."""
    if result.verdict == "usage":
        console.say(f"error: {result.detail}")
        return
    if result.log_dir:
        result.failure_file = write_failure_file(result, result.log_dir, console.say)
    lines = render(result, width=console.columns, color=shows_colors(2, environ))
    if annotation := find_annotation(result, environ):
        lines.append(annotation)
    text = "\n".join(lines) + "\n"
    data = text.encode(errors="replace")
    if (mark := environ.get(ENV_HOSTS_MARK)) and result.verdict not in OF_NODE:
        from elastic_run.hosts.protocol import write_marked

        # Of the hosts' reports the command shows one: the failure's own, or one that is not brief.
        place = (result.root is not None and result.root.host == os.uname().nodename) + (not result.is_brief)
        data = write_marked(mark, report=text, exit_code=result.exit_code, place=place)
    console.write(2, data)
    if result.verdict in OF_NODE:
        from elastic_run.schedulers.actions import describe_drain

        if drain := describe_drain(environ, result.detail):
            console.say(drain)
    if result.root is not None:
        from elastic_run.multiprocessing.errors.error_file import write_parent_error_file

        write_parent_error_file(result.root, environ)


@dataclass(slots=True)
class _Section:
    """A label in the margin and the lines beside it; the lines to be seen first are marked."""

    label: str
    lines: list[str]
    marked: range = range(0)


def render(result: JobResult, *, width: int = WIDTH, color: bool = False) -> list[str]:
    """Return the report on how a job ended; one line if another node shows the whole report."""
    if result.is_brief:
        return [_in_one_line(result)]
    width = max(60, min(width, 120))
    room = width - _LABEL
    causes, rest = _causes(result, room), _rest(result, room)
    left = MOST_LINES - 1 - sum(len(section.lines) for section in causes)
    _shorten(rest, left)
    left -= sum(len(section.lines) for section in rest)
    lines = [_title(result, width, color=color)]
    for section in (*causes, *_evidence(result.root, room, min(_MOST_EVIDENCE, left)), *rest):
        lines += _margin(section, color=color)
    return lines


def _in_one_line(result: JobResult) -> str:
    """Return the cause, and the place of the whole report: the reports of 64 nodes would fill a job's output file."""
    cause, place, root = result.detail, "", result.root
    if root is not None:
        cause = _elsewhere(result, root, result.causes[0]) or failed(root, elide(root.host, 30))
        place = f"; the whole report is in the output of {elide(root.host, 30)} and of the node with rank 0"
        place += f", and as JSON in {result.failure_file}" if result.failure_file else ""
    end = f"{ending_sentence(result)}, exit code {result.exit_code}"
    return printable(f"elastic-run: {end}{f': {cause}' if cause else ''}{place}")


def _shorten(sections: list[_Section], most: int) -> None:
    """Shorten the longest of the sections that can spare lines, then of all but the logs, until all sections fit.

    Each section keeps a line, so a report may be longer where that is not enough.
    """
    spare = [section for section in sections if section.label in ("others", "workers", "before", "stuck")]
    for shortened in (spare, [section for section in sections if section.label != "logs"]):
        while sum(len(section.lines) for section in sections) > most:
            longest = max(shortened, key=lambda section: len(section.lines))
            if len(longest.lines) <= 1:
                break
            del longest.lines[len(longest.lines) // 2]


def _title(result: JobResult, width: int, *, color: bool) -> str:
    right = f" exit code {result.exit_code} --"
    room = width - len(right) - len("--  -")
    # The program's name is shortened first, then the launcher's is left out; the sentence stays whole.
    sizes = range(_MOST_NAME, _LEAST_NAME - 1, -1)
    forms = (launcher + ending_sentence(result, most) for launcher in ("elastic-run: ", "") for most in sizes)
    left = next((form for form in forms if columns(form) <= room), elide(ending_sentence(result, _LEAST_NAME), room))
    title = f"-- {left} {'-' * (room - columns(left) + 1)}{right}"
    return f"{_BOLD}{_RED}{title}{_PLAIN}" if color else title


def ending_sentence(result: JobResult, most: int = _MOST_NAME) -> str:
    """Return the sentence of the title: the program, of a long path the last part, and how its job ended."""
    program = printable(result.entrypoint or "the program")
    if columns(program) > most:
        program = elide(program.rstrip("/").rpartition("/")[2], most, tail=0.7)
    if result.signal is not None:
        return f"{program} was stopped by {signal_name(result.signal)}"
    if result.verdict in _TITLES:
        return _TITLES[result.verdict].format(program=program)
    again = f" after {count(result.restarts_used, 'restart')}" if result.restarts_used else ""
    return f"{program} failed{again}"


def _margin(section: _Section, *, color: bool) -> list[str]:
    lines = []
    for index, text in enumerate(section.lines):
        label = (section.label if index == 0 else "").ljust(_LABEL)
        if color and label.strip():
            label = f"{_BOLD}{label}{_PLAIN}"
        is_marked = color and index in section.marked
        lines.append(f"{label}{_RED}{text}{_PLAIN}" if is_marked else f"{label}{text}".rstrip())
    return lines


def _causes(result: JobResult, room: int) -> list[_Section]:
    """Return the likeliest cause, and below it the first failure if another worker had it."""
    root, causes = result.root, result.causes
    if root is None:
        return [_Section("cause", _paragraph(result.detail, room, _MOST_DETAIL))]
    told = _elsewhere(result, root, causes[0])
    lines = _paragraph(told, room, 3)
    first = _failure(root, room, label="first" if told else "cause", cause=causes[0], versions=result.versions)
    return [*([_Section("cause", lines, marked=range(len(lines)))] if told else []), first]


def _elsewhere(result: JobResult, root: WorkerEnd, cause: Cause) -> str:
    """Name the rank that has the cause if it is not the rank that failed first; otherwise return ""."""
    if cause.kind == COLLECTIVE and result.recorder is not None:
        return result.recorder.text
    if cause.kind == NODE_EVENT:
        return result.detail
    if cause.kind == STUCK:
        return stuck_workers(cause.ranks, result.ends, result.stuck)
    return early_exit(root, result.ends, cause.ranks) if cause.kind == EARLY_EXIT else ""


def _failure(root: WorkerEnd, room: int, *, label: str, cause: Cause, versions: str) -> _Section:
    host = elide(printable(root.host), 30)
    first = wrap(f"rank {root.rank} on {host} (local rank {root.local_rank}, pid {root.pid}) {end_verb(root)}", room, 2)
    again = f", attempt {root.restart_count}" if root.restart_count else ""
    first += _paragraph(f"at {_moment(root.ended_at)}, {span(root.uptime)} after its start{again}", room, 1)
    first += _paragraph(root.remark, room, 2)
    first += _paragraph(f"the nodes differ: {versions}" if versions else "", room, 2)
    if root.exception is not None and not root.exception.is_certain:
        first += _paragraph(f"{LAST_EXCEPTION}:", room, 1)
    killer = cause.why[-1] if cause.kind == OOM_KILL else ""
    said = _paragraph(f"the kernel's log: {root.kernel_line}" if root.kernel_line else killer, room, 3)
    said += _exception(root.exception, room) if root.exception is not None else []
    return _Section(label, first + said, marked=range(len(first), len(first) + len(said)))


def _exception(exception: ExceptionText, room: int) -> list[str]:
    lines = _paragraph(exception_line(exception), room, _MOST_HANG if exception.type == HANG else 3)
    # The lines below an uncertain exception may be other output.
    more = [line for line in exception.message.splitlines()[1:] if line.strip() and exception.is_certain]
    more = [line for line in more if not line.startswith(_GENERAL_ADVICE)]
    if len(more) > _MOST_MESSAGE:
        more = [more[0], "...", more[-1]]
    lines += [shorten(printable(line), room) for line in more]
    if exception.cause:
        lines += _paragraph(f"caused by {exception.cause}", room, 2)
    return lines


def _evidence(root: WorkerEnd | None, room: int, most: int) -> list[_Section]:
    """Return the worker's traceback, and the last lines of its stderr if the traceback is not the whole cause."""
    if root is None or most <= 0:
        return []
    sections = []
    if root.exception is not None:
        most_trace = most if root.exception.is_certain else max(1, most - _LAST_LINES)
        trace = trace_lines(root.exception, width=room, most=most_trace)
        sections = [_Section("trace", trace)] if trace else []
        most -= len(trace)
    if most > 0 and (not sections or root.certain_exception is None):
        tail = [printable(line) for line in root.stderr_tail if line.strip()]
        telling = [line for line in tail if not line.startswith(_FRAME_OF_CPP)] or tail
        said = [shorten(line, room) for line in telling][-min(most, _LAST_LINES if sections else most) :]
        target = root.stderr_target
        missing = f"(not captured: it went to {target})" if target else "(nothing was written)"
        sections.append(_Section("stderr", said or _paragraph(missing, room, 2)))
    return sections


def _rest(result: JobResult, room: int) -> list[_Section]:
    kind = result.causes[0].kind if result.root is not None else ""
    said = result.recorder.text if result.recorder is not None and kind != COLLECTIVE else ""
    if result.root is not None and result.root.exception is not None and said in result.root.exception.message:
        said = ""  # the cause says it
    equal = "" if result.root is None else equal_errors(result.ends, result.root, result.equal_errors)
    early = {rank for cause in result.causes if cause.kind == EARLY_EXIT for rank in cause.ranks}
    others = other_worker_lines(result.ends, result.root, early, has_early=kind != EARLY_EXIT)
    lines = [*_paragraph(equal, room, 3), *(shorten(line, room, tail=0.0) for line in others)]
    # Beside a worker that failed, this is said with its failure.
    differ = f"the nodes differ: {result.versions}" if result.versions and result.root is None else ""
    return [
        _Section("nodes", _paragraph(differ, room, 2)),
        _Section("recorder", _paragraph(said, room, 3)),
        _Section("others" if result.root is not None else "workers", lines),
        _Section("before", [*_attempts(result, room), *_last_words(result, room)]),
        # Why there is no other attempt, unless that is the cause itself.
        _Section("verdict", _paragraph(result.detail, room, 2) if kind not in ("", NODE_EVENT) else []),
        _Section("stuck", _survivors(result.survivors, room)),
        _Section("logs", _logs(result, room)),
        _Section("hint", _paragraph(result.advice or "", room, 3)),
    ]


def _attempts(result: JobResult, room: int) -> list[str]:
    """Return a line for each run of attempts that failed in the same way; of many runs the first and the last."""
    runs: list[tuple[str, list[Attempt]]] = []
    for attempt in result.attempts:
        text = _attempt_cause(attempt, result.root)
        if runs and runs[-1][0] == text:
            runs[-1][1].append(attempt)
        else:
            runs.append((text, [attempt]))
    lines = [shorten(f"{_attempt_numbers(run)}{_kept(run[-1])}: {text}", room, tail=0.2) for text, run in runs]
    if len(lines) > _MOST_RUNS:
        lines = [lines[0], f"... ({max(len(result.attempts), result.restarts_used)} attempts in all)", lines[-1]]
    return lines


def _last_words(result: JobResult, room: int) -> list[str]:
    """Return a line for each exception that ranks had written last when a signal stopped them; of many only some."""
    ranks_of: dict[str, list[int]] = {}
    for end in result.ends:
        if end.last_words:
            ranks_of.setdefault(end.last_words, []).append(end.rank)
    found = list(ranks_of.items())[:_MOST_RUNS]
    return [line for words, of in found for line in _paragraph(f"{ranks(of)} {words}", room, 2)]


def _attempt_cause(attempt: Attempt, last: WorkerEnd | None) -> str:
    root = attempt.root
    if root is None:
        return "no worker failed by itself"
    if last is not None and failure_signature(root) == failure_signature(last):
        return f"rank {root.rank} in the same way"
    exception = root.certain_exception
    what = f" {end_verb(root)}" if exception is None else f", {exception_line(exception)}"
    return printable(f"rank {root.rank}{what}")


def _attempt_numbers(run: list[Attempt]) -> str:
    first, last = run[0], run[-1]
    if first is last:
        return f"attempt {first.restart_count} failed after {span(first.uptime)}"
    lives = sorted(attempt.uptime for attempt in run)
    low, high = span(lives[0]), span(lives[-1])
    lived = low if low == high else f"{low} to {high}"
    return f"attempts {first.restart_count}-{last.restart_count} failed after {lived}"


def _kept(attempt: Attempt) -> str:
    return "" if attempt.kept_state is None else f" at step {printable(attempt.kept_state)}"


def _survivors(survivors: tuple[tuple[int, str], ...], room: int) -> list[str]:
    places = ((pid, f" in {printable(channel)}" if channel else "") for pid, channel in survivors)
    lines = [elide(f"pid {pid} sleeps in the kernel{place}", room) for pid, place in places]
    return lines if len(lines) <= _MOST_STUCK else [*lines[: _MOST_STUCK - 1], f"... ({len(lines)} in all)"]


def _logs(result: JobResult, room: int) -> list[str]:
    if not result.log_dir:
        return ["none kept; --log-dir=DIR keeps them"] if result.root is not None else []
    found = []
    if result.root is not None and result.root.log_file:
        found.append(printable(f"rank {result.root.rank}: {_inside(result.root.log_file, result.log_dir)}"))
    if result.failure_file:
        found.append(printable(f"report as JSON: {_inside(result.failure_file, result.log_dir)}"))
    line = ", ".join(found)
    return [printable(result.log_dir), *([line] if found and columns(line) <= room else found)]


def _paragraph(text: str, room: int, most: int) -> list[str]:
    """Wrap a text, if there is any; the limit is `most` lines at 80 columns, and more on a narrower terminal."""
    return wrap(printable(text), room, -(-most * (WIDTH - _LABEL) // room)) if text else []


def _inside(path: str, directory: str) -> str:
    return path.removeprefix(directory.rstrip(os.sep) + os.sep) if directory else path


def _moment(seconds: float) -> str:
    """Return a wall-clock time with milliseconds, as local logs have it."""
    milliseconds = int(seconds * 1000 + 0.5)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(milliseconds // 1000))}.{milliseconds % 1000:03d}"


def find_annotation(result: JobResult, environ: Mapping[str, str]) -> str:
    """Return the report of a failure in one line for GitHub Actions, which shows it beside the code; else "".

    Source: "Workflow commands for GitHub Actions" in its documentation. The runner takes commands from both streams.
    """
    if environ.get("GITHUB_ACTIONS") != "true" or result.signal is not None:
        return ""
    properties = {"title": ending_sentence(result)}
    if result.root is not None and result.root.exception is not None:
        place = find_own_place(result.root.exception)
        if place is not None:
            file, line = place
            properties = {
                "file": _inside(os.path.abspath(file), environ.get("GITHUB_WORKSPACE", "")),
                "line": line,
                **properties,
            }
    message = failed(result.root, result.root.host) if result.root is not None else printable(result.detail)
    text = ",".join(f"{name}={_escape(value, ':,')}" for name, value in properties.items())
    return f"::error {text}::{_escape(message)}"


def _escape(text: str, more: str = "") -> str:
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text

"""The lines of the launcher while the job runs.

Pure: each function returns the text; the console puts `elastic-run: ` in front of it.
"""

from __future__ import annotations

from elastic_run.report.text import count, elide, end_verb, exception_line, printable, ranks, signal_name, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.core.failure.root_cause import ExceptionText, WorkerEnd

#: Characters of an exception that a line shows.
_EXCEPTION_LIMIT = 120
#: Background processes that a line names, and characters of each one's command.
_NAMED = 4
_COMMAND_LIMIT = 60


def failed(root: WorkerEnd, host: str = "") -> str:
    """Say in a clause which worker failed, how, and after how long."""
    where = f" on {host}" if host else ""
    who = (
        f"rank {root.rank}{where} (local {root.local_rank}, pid {root.pid}) {end_verb(root)} after {span(root.uptime)}"
    )
    if root.certain_exception is None:
        return who
    return f"{who}: {elide(printable(exception_line(root.certain_exception)), _EXCEPTION_LIMIT)}"


def restarting(
    root: WorkerEnd, size: int, restart_count: int, max_restarts: int, pause: float = 0.0, *, window: str = ""
) -> str:
    """Say that the workers are started again."""
    when = f" in {span(pause)}" if pause > 0 else ""
    limit = f" of {max_restarts}" if max_restarts > 0 else ""
    allowed = f" (at most {window})" if window else ""
    workers = "the worker" if size == 1 else f"all {size} workers"
    return f"{failed(root)}; restarting {workers}{when}, restart {restart_count}{limit}{allowed}"


def lives_on(rank: int, exception: ExceptionText, survival: str, left: float) -> str:
    """Say that a rank has failed and does not end."""
    said = elide(printable(exception_line(exception)), _EXCEPTION_LIMIT)
    follows = f"in {span(left)}" if left > 0 else "now"
    return (
        f"rank {rank} has raised {said}, and has not ended: {printable(survival)}; "
        f"it counts as failed {follows} (--shutdown-timeout)"
    )


def lived_on(seconds: float, survival: str) -> str:
    """Say of a worker that has failed that its process had not ended when the workers were stopped."""
    return f"it had not ended {span(seconds)} later: {survival}" if seconds >= 1 else ""


def last_words(exception: ExceptionText, silence: float | None) -> str:
    """Say that a worker, which a signal stopped, had written an exception last; it may have handled the exception."""
    when = "" if silence is None else f" {span(silence)} before the stop"
    return f"wrote {exception_line(exception)}{when}, and had not ended"


def awaiting_cause(seconds: float) -> str:
    """Say why the workers are not stopped yet."""
    return f"a worker has lost a peer: waiting up to {span(seconds)} for the worker with the cause to report it"


def stopping(number: int, size: int, grace: float, *, sender: str = "", reason: str = "") -> str:
    """Say that a signal stops the job, or, with a reason, what stops it as a signal would."""
    if reason:
        return f"stopping {count(size, 'worker')}, up to {grace:.10g} s: {printable(reason)}"
    hint = "; Ctrl-C again kills them now" if signal_name(number) == "SIGINT" else ""
    origin = f" from {printable(sender)}" if sender else ""
    return f"{signal_name(number)} received{origin}: stopping {count(size, 'worker')}, up to {grace:.10g} s{hint}"


def offered(number: int, sender: str, told: Sequence[int], *, size: int, has_workers: bool) -> str:
    """Say which workers have got a signal that no flag names."""
    signal = f"{signal_name(number)} from {printable(sender)}" if sender else signal_name(number)
    if not told:
        return f"{signal}: {'no worker handles it' if has_workers else 'no worker runs'}: nothing was sent"
    others = "" if len(told) == size else "; the other workers don't handle it"
    return f"{signal}: passed on to {ranks(told)}{others}"


def passed_on(number: int, sender: str) -> str:
    """Say of a worker that died of a signal that it got the signal from this launcher."""
    return f"elastic-run passed on the {signal_name(number)} that it got{f' from {sender}' if sender else ''}"


def warned_with(number: int) -> str:
    """Say of a worker that died of --scale-up-signal that this launcher sent it."""
    return f"elastic-run sent {signal_name(number)} to say that new nodes wait (--scale-up-signal)"


def sent_by(number: int, sender: str) -> str:
    """Say where the signal came from that stopped the job."""
    return f"{signal_name(number)} came from {sender}"


def waiting_for_call(call: str, seconds: float, limit: float | None = None) -> str:
    """Say which call of a plug-in has not returned; with a limit in seconds, after the first stop signal."""
    end = "a signal ends" if limit is None else f"waiting up to {limit:.10g} s more; a second signal ends"
    return f"{printable(call)} has not returned for {span(seconds)}: {end} elastic-run without it"


def left_call(call: str, seconds: float) -> str:
    """Say which call of a plug-in is not waited for any more."""
    return f"{printable(call)} has not returned for {span(seconds)}: elastic-run ends without it"


def hurrying() -> str:
    """Say that the user asked twice."""
    return "asked to stop again: killing the workers now"


def slow_rank(rank: int, host: str, share: float, reason: str) -> str:
    """Say which rank the others wait for, and why if that is known."""
    where = f" on {printable(host)}" if host else ""
    why = f": {printable(reason)}" if reason else ""
    return f"rank {rank}{where} is slower than the others (they wait {100 * share:.0f} % of the time for it){why}"


def background(processes: list[tuple[int, str]]) -> str:
    """Say which background processes keep running after a success."""
    named = [f"pid {pid} ({elide(printable(command), _COMMAND_LIMIT)})" for pid, command in processes[:_NAMED]]
    others = [f"{len(processes) - _NAMED} more"] if len(processes) > _NAMED else []
    who, verb = ("process", "keeps running") if len(processes) == 1 else ("processes", "keep running")
    return (
        f"{len(processes)} background {who} of the workers {verb}: {', '.join([*named, *others])} "
        "(--kill-background-processes ends them with the job)"
    )

"""What a waiting node says: which nodes are there, which are missing, how long is left, or why no store answers.

A waiting node asks the coordinator for the status after two seconds, then at every keep-alive interval, or in a large
job every ten seconds if the agent does not show it as one line that it rewrites. On a terminal the agent rewrites one
line, so each text has forms of different length; elsewhere it writes ordinary lines. All agents of a Slurm job write to
one file: 64 agents that repeat a line every ten seconds for ten minutes write 3,840 lines there. So a line that says
the same is shown after pauses that grow. A spare node says once that it is a spare.
"""

from __future__ import annotations

import math

from elastic_run.rendezvous.events import Notice, Waiting
from elastic_run.report.text import columns, elide, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from elastic_run.core.job.node_status import WaitStatus
    from elastic_run.loop import Loop, Timer
    from elastic_run.multiprocessing.output.console import Console

    Texts: TypeAlias = Callable[[float], tuple[str, ...]]

#: Seconds of waiting after which the first line comes; between two lines; at most between two lines that say the same.
FIRST = 2.0
INTERVAL = 10.0
LONGEST_INTERVAL = 60.0
#: Seconds after which a rewritten line begins, and between two of its texts.
LIVE_INTERVAL = 1.0
_MINUTE = 60


class Repetition:
    """The line of one wait."""

    def __init__(self) -> None:
        self._text = ""
        self._shown_at = -math.inf
        self._pause = INTERVAL

    def is_due(self, text: str, now: float) -> bool:
        """Whether the line is shown now, which this notes."""
        pause = self._pause if text == self._text else INTERVAL
        if now - self._shown_at < pause:
            return False
        self._pause = min(2 * pause, LONGEST_INTERVAL) if text == self._text else INTERVAL
        self._text, self._shown_at = text, now
        return True


def describe_missing(
    hosts: Sequence[str], present: int, wanted: int, left: float | None, *, starts: bool = False
) -> str:
    """Say which nodes are there, such as ``waiting: 10/11 nodes (node[0-3,5-10]), gives up in 9:50``."""
    shown = f" ({', '.join(hosts)})" if hosts else ""
    return f"waiting: {present}/{wanted} nodes{shown}{_describe_end(left, 'starts' if starts else 'gives up')}"


def describe_trouble(store: str, trouble: str, silent_for: float, left: float | None) -> str:
    """Say why the store can't be reached, and for how long it has been so."""
    fact = f"the store at {store} has been out of reach for {silent_for:.0f} s"
    return f"waiting: {fact}: {trouble}{_describe_end(left)}"


def trouble_texts(store: str, trouble: str, silent_for: float, left: float | None, *, reason: str) -> tuple[str, ...]:
    """Return the forms of `describe_trouble`, the longest first."""
    end = _describe_end(left)
    shorter = (f"waiting: store {store}: {reason}{end}", f"waiting: store: {reason}{end}")
    return describe_trouble(store, trouble, silent_for, left), *shorter


def _describe_end(left: float | None, verb: str = "gives up") -> str:
    if left is None:
        return ""
    minutes, seconds = divmod(max(0, round(left)), _MINUTE)
    return f", {verb} in {minutes}:{seconds:02d}"


# Why a node waits: it has not been in a round yet, or its last round is over.
NEW = "new"
READY = "ready"
#: Phases of the job, as its status names them.
_GATHERING = "gathering"
_RUNNING = ("running", "warned")
#: Most nodes of a job in which every waiting node may look with each heartbeat.
_OFTEN = 256
#: Seconds until the next look where the coordinator had written nothing yet; it was elected just now.
_AGAIN = 0.25


class WaitNotices:
    """One node's view of the nodes that are there.

    `state` says why this node waits for a round, None while it doesn't. `doubt` returns a mistake that the user may
    have made, or ""; its argument says whether no other node is there. `spare_hint` is for a node that comes late.
    """

    def __init__(
        self,
        *,
        state: Callable[[], str | None],
        doubt: Callable[[bool], str],
        shows_waiting: bool,
        deliver: Callable[[Notice | Waiting], None],
        spare_hint: str = "",
    ) -> None:
        self._state = state
        self._doubt = doubt
        self._shows_waiting = shows_waiting
        self._deliver = deliver
        self._spare_hint = spare_hint
        self._since: float | None = None
        self._status_at: float | None = None
        self._looks_often = shows_waiting
        self._last_look = -math.inf
        self._repetition = Repetition()
        self._is_shown = False
        self._shown_spare = ""
        self._shown_lost: tuple[str, ...] = ()
        #: Which nodes were there at the last look of the current wait, and which are missing; otherwise "".
        self.described = ""

    def first_due(self, now: float) -> float:
        """Return the monotonic time of the first look of a wait, infinity where none is due; a wait may begin."""
        if self._state() is None:
            self._since = self._status_at = None
            return math.inf
        if self._since is None:
            self._since = now
            self._repetition = Repetition()
        return math.inf if self._status_at is not None else max(self._since + FIRST, self._last_look + _AGAIN)

    def next_look(self, now: float, interval: float) -> float:
        """Return the monotonic time at which to ask for the status, infinity while this node waits for nobody."""
        due = self.first_due(now)
        if self._state() is None:
            self._shown_spare = self.described = ""
            self._is_shown = False  # the line is over with the event that ends the wait
        if self._status_at is None:
            return due
        return max(self._last_look + interval, 0.0 if self._looks_often else self._status_at + INTERVAL)

    def note_look(self, now: float) -> None:
        """Note that the status was asked for."""
        self._last_look = now

    def take(self, status: WaitStatus, now: float) -> None:
        """Tell the agent what the status says, if that is due."""
        state = self._state()
        # Before it has heard of any node the coordinator, elected just now, knows nothing.
        if not status.present or state is None:
            return
        self._status_at = now
        self._looks_often = self._shows_waiting or status.max_nodes <= _OFTEN
        self.described = ""
        if status.phase == _GATHERING:
            self._shown_spare = ""
            self._show_missing(status, now)
        elif status.phase in _RUNNING and state != READY:
            self._show_spare(is_full=status.present > status.max_nodes, wanted=status.max_nodes)
        elif self._is_shown:
            self._is_shown = False
            self._deliver(Waiting(None, is_for_nodes=True))

    def _show_missing(self, status: WaitStatus, now: float) -> None:
        hosts, present, wanted, left = status.hosts, status.present, status.max_nodes, status.seconds_left
        lost = f"not in the job: {', '.join(status.lost)}" if status.lost else ""
        remarks = tuple(filter(None, (self._doubt(present == 1), status.missing, lost)))
        self.described = "; ".join((describe_missing(hosts, present, wanted, None), *remarks))

        def texts(at: float) -> tuple[str, ...]:
            rest = None if left is None else left - (at - now)
            whole, short = (
                describe_missing(shown, present, wanted, rest, starts=status.starts) for shown in (hosts, ())
            )
            return "; ".join((whole, *remarks)), whole, short

        if self._shows_waiting:
            for clause in status.lost:
                if clause not in self._shown_lost:
                    # Once in a line that stays: a line that is rewritten may have no room.
                    self._deliver(Notice(f"not in the job: {clause}"))
            self._shown_lost = status.lost
            self._show(texts)
        elif self._repetition.is_due(self.described, now):
            self._deliver(Notice(texts(now)[0]))

    def _show_spare(self, *, is_full: bool, wanted: int) -> None:
        line = f"waiting: as a spare, until one of the job's {wanted} nodes is lost"
        line = line if is_full else "waiting: the job runs, and adds this node soon"
        if self._shows_waiting:
            self._show(lambda _: (line,))
        elif line != self._shown_spare:
            self._deliver(Notice(line))
        if not self._shown_spare and self._spare_hint:
            self._deliver(Notice(self._spare_hint))
        self._shown_spare = line

    def _show(self, texts: Texts) -> None:
        self._is_shown = True
        self._deliver(Waiting(texts, is_for_nodes=True))


_NAME = "elastic-run: "


class WaitLine:
    """The line of one agent."""

    def __init__(self, loop: Loop, console: Console) -> None:
        self._loop = loop
        self._console = console
        self._texts: Texts | None = None
        self._is_live = True
        self._since = 0.0
        self._last_plain: float | None = None
        self._timer: Timer | None = None

    def show(self, texts: Texts, *, is_live: bool) -> None:
        """Begin to show a wait."""
        if self._texts is None:
            self._since = self._loop.now()
            self._last_plain = None
        self._texts, self._is_live = texts, is_live
        if self._timer is None:
            self._rewrite()

    def end(self, last: str | None = None) -> None:
        """Remove the line; do nothing if there is none."""
        if self._texts is None:
            return
        texts, self._texts = self._texts, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._console.hide_line()
        if last is None:
            self._console.say(printable(texts(self._loop.now())[0]))
        elif last:
            minutes, seconds = divmod(round(self._loop.now() - self._since), _MINUTE)
            self._console.say(f"{last} after {minutes}:{seconds:02d}")

    def _rewrite(self) -> None:
        if self._texts is None:
            return
        now = self._loop.now()
        forms = [printable(text) for text in self._texts(now)]
        is_shown = self._is_live and not self._console.is_in_background and self._console.show_line(self._fit(forms))
        if not is_shown:
            self._console.hide_line()
        if is_shown:
            self._last_plain = now
        elif self._last_plain is None or now - self._last_plain >= INTERVAL:
            self._console.say(forms[0])
            self._last_plain = now
        self._timer = self._loop.call_later(LIVE_INTERVAL, self._rewrite)

    def _fit(self, forms: list[str]) -> str:
        """Return the longest form that fits; the last column stays free, since some terminals break the line there."""
        room = self._console.columns - 1
        whole = [*(f"{_NAME}{form}" for form in forms), *forms]
        return next((text for text in whole if columns(text) <= room), elide(whole[-1], room))

"""The thread that speaks for this node: it opens the store, says the node's facts, and beats.

Rules
- It wakes when there is a fact to say, and at every keep-alive interval; else it waits. While workers run it also looks
  at the coordinator's beat several times in an interval, as that one does at all: else a node that goes right after a
  beat, and the store that may go with it, would be missed an interval after the lease.
- It is the one that knows whether the store answers. A broken connection is opened anew, quietly for a lease, then with
  a line every ten seconds; after a stated time the store is given up and the agent is told `Lost`.
- A thousand nodes may come at once: what a node asks before its first fact is one question. Its beats begin after that
  rush, since the coordinator gives whom it has not heard yet a lease; and at a random moment, so that those of all
  nodes never come in step.
- A beat replaces the last one of this node. Where that is gone the coordinator has dropped the node, which says again
  where it stands: so a machine that was suspended, or a process that was stopped, needs no clock to learn it.
- The store says who it is: the first agent leaves a birth mark. After an outage another mark means another, emptied
  store, in which all that matters has to be said again.
"""

from __future__ import annotations

import math
import os
import time

from elastic_run.core.node import machine as member
from elastic_run.core.protocol import job_keys, messages
from elastic_run.rendezvous.elastic.audience import say_heard
from elastic_run.rendezvous.elastic.beats import BeatReader, BeatWriter
from elastic_run.rendezvous.elastic.link import BIRTH
from elastic_run.rendezvous.elastic.log import make_head, raise_start
from elastic_run.rendezvous.elastic.patience import Patience
from elastic_run.rendezvous.elastic.reunion import Reunion
from elastic_run.rendezvous.elastic.session import Lost, Notice, Refused, Waiting
from elastic_run.report.wait_status import WaitStatus
from elastic_run.store.errors import StoreAccessError, StoreError, StoreForgedError, StoreTokenError
from elastic_run.store.retreat import draw_fraction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.rendezvous.elastic.affairs import Affairs
    from elastic_run.rendezvous.elastic.membership import Membership
    from elastic_run.store.job_store import JobStore

__all__ = ["Speaker"]

_MARK = b"born "
#: The first beat comes before two of so many parts of the lease are over.
_FIRST_BEAT = 3
#: Looks in a keep-alive interval; and a second, by all nodes of a job together: a store has more to do.
_LOOKS = 8
_ALL_LOOKS = 200.0


class Speaker:
    """Speaks for one node.

    Args:
        affairs: What the session's threads share.
        begin: Called once, when the store was reached: makes the member and starts the other threads. It is given where
            the log stands, if that is known.
        follow: Called whenever it is another store from then on: lets its log be followed.
        draw: Returns a random number from 0 to 1.
    """

    def __init__(
        self,
        affairs: Affairs,
        begin: Callable[[member.HeadRead | None], None],
        follow: Callable[[], None],
        draw: Callable[[], float] = draw_fraction,
    ) -> None:
        self._affairs = affairs
        self._begin = begin
        self._follow = follow
        self._draw = draw
        self._link = affairs.make_link()
        self._beats = BeatReader()
        self._next_beat = 0.0
        self._writer = BeatWriter(affairs.node)
        self._restores = 0
        self._last_look = 0.0
        self._last_read: float | None = None
        self._wait_status = WaitStatus(
            state=affairs.member_state,
            doubt=lambda: affairs.backend.doubt,
            shows_waiting=affairs.shows_waiting,
            deliver=affairs.deliver,
        )
        self._patience = Patience(affairs)
        self._link.time_left = lambda: self._patience.attempt_limit
        self._reunion = Reunion(affairs)

    def run(self) -> None:
        """Speak until the session ends."""
        self._patience.begin()
        try:
            self._affairs.backend.prepare()
        except OSError as error:
            self._affairs.deliver(Lost("rendezvous", f"the rendezvous store can't be served here: {error}"))
            return
        while not (self._affairs.closing.is_set() or self._affairs.is_lost):
            asked_at = time.monotonic()
            try:
                self._turn(self._link.store)
            except StoreTokenError as error:
                self._link.drop()
                if not self._refuse(error, asked_at):
                    return
            except StoreAccessError as error:
                self._affairs.deliver(Lost("rendezvous", f"the store at {self._affairs.backend.name}: {error}"))
                return
            except StoreError as error:
                self._link.drop()
                if not self._endure(error, asked_at):
                    return
        self._link.drop()

    # --- the store answers ---------------------------------------------------------------------------------------
    def _turn(self, store: JobStore) -> None:
        """Greet a store that was opened just now; then say what there is to say, and wait."""
        affairs = self._affairs
        if self._patience.is_tried or affairs.birth is None:
            self._greet(store)
            if affairs.is_over.is_set() and affairs.membership is None:
                affairs.closing.wait()
                return
        if store.restores != self._restores and affairs.membership is not None:
            self._say_all_again(store, affairs.membership)
            self._restores = store.restores
        if affairs.move_to is not None:
            self._move(affairs.move_to)
            return
        self._say_facts(store)
        now = time.monotonic()
        if now >= self._next_beat:
            self._beat(store, now)
            others = self._reunion.find_others(store)
            if others is not None:
                self._rejoin(others)
                return
        elif now >= self._next_look:
            self._look(store)
        elif now >= self._wait_status.first_due(now):
            self._wait_status.tell(store, now)
        # Asked again after all of this: a round may have begun, or be over.
        now = time.monotonic()
        if affairs.wake.wait(max(0.0, min(self._next_beat, self._next_look, self._wait_status.first_due(now)) - now)):
            # Cleared before facts are looked for, so that none is overlooked.
            affairs.wake.clear()

    def _greet(self, store: JobStore) -> None:
        birth, head, start = store.get([BIRTH, job_keys.HEAD, job_keys.LOG_START])
        is_new = birth is None
        birth = self._prove_birth(store, birth)
        if birth is None:
            return
        recovered = self._patience.recovered()
        if recovered:
            self._affairs.deliver(Notice(recovered))
            if self._affairs.shows_waiting:
                self._affairs.deliver(Waiting(None, is_for_nodes=False))
        affairs, membership = self._affairs, self._affairs.membership
        if affairs.backend.notice:
            affairs.deliver(Notice(affairs.backend.notice))
            affairs.backend.notice = ""
        if membership is None:
            affairs.birth = birth
            self._next_beat = time.monotonic() + self._first_pause()
            # Beside a birth mark that came only now it may be too old.
            self._begin(None if is_new else make_head(store, head, start))
            return
        if birth == affairs.birth:
            membership.feed(member.Interrupted())
            membership.feed(member.Reconnected())
        else:
            self._change_store(membership, birth)
        self._next_beat = 0.0

    def _first_pause(self) -> float:
        """Return the seconds to the first beat: one to two intervals, and well before the lease is over."""
        settings = self._affairs.settings
        return min(settings.keep_alive_interval, settings.lease / _FIRST_BEAT) * (1 + self._draw())

    def _prove_birth(self, store: JobStore, birth: bytes | None) -> bytes | None:
        """Return the store's birth mark, or None after telling the agent that its token is not the job's."""
        name = self._affairs.backend.name
        try:
            if birth is None:
                # Random, not this node's name: the same node may be the first in two stores one after another.
                birth = store.create(BIRTH, _MARK + os.urandom(8).hex().encode())
        except StoreForgedError:
            self._affairs.deliver(Refused(f"the job at {name} has another token than this node, or none"))
            return None
        if not birth.startswith(_MARK):
            self._affairs.deliver(Refused(f"the job at {name} has a token, and this node was given none"))
            return None
        return birth

    def _change_store(self, membership: Membership, birth: bytes) -> None:
        """Say all again: this store knows nothing of the job."""
        affairs = self._affairs
        membership.change_store(birth, serves_store=affairs.backend.is_host)
        self._writer = BeatWriter(affairs.node)
        # Last, so that nobody takes the new store for the old one.
        affairs.birth = birth
        for link in tuple(affairs.links):
            if link is not self._link:
                link.interrupt()
        self._follow()

    def _say_all_again(self, store: JobStore, membership: Membership) -> None:
        """Go on in a store that was restored from a backup: nobody decides again what has been decided since."""
        known = membership.member
        if known.next_slot is not None and known.term:
            raise_start(store, messages.LogStart(known.next_slot, known.term))
        name = self._affairs.backend.name
        self._affairs.deliver(
            Notice(f"the store at {name} was restored from a backup: this node says again where it stands")
        )
        membership.feed(member.Interrupted())
        membership.feed(member.Reconnected())
        membership.feed(member.Beaten(was_dropped=True))

    def _say_facts(self, store: JobStore) -> None:
        """Append what was not confirmed, and do the member's errands."""
        membership = self._affairs.membership
        if membership is None:
            return
        affairs = self._affairs
        affairs.deaths.tell(store, affairs.birth, membership.member.known_round)
        while (fact := membership.next_fact) is not None:
            affairs.deaths.note_fact(fact, affairs.birth)
            store.append(job_keys.FACTS, messages.to_json(fact))
            membership.feed(member.Appended(fact.sequence))
        if self._affairs.is_over.is_set() and not self._affairs.has_heard_the_end:
            say_heard(store, self._affairs.node)
            self._affairs.has_heard_the_end = True
        membership.run_errands(store, self._affairs.birth)
        self._affairs.has_spoken.set()

    def _beat(self, store: JobStore, now: float) -> None:
        affairs, membership = self._affairs, self._affairs.membership
        interval = affairs.settings.keep_alive_interval
        self._next_beat = now + interval
        if affairs.has_heard_the_end:
            return  # nobody watches any more, and the job may be removed at any moment: nothing must come after that
        state = None if membership is None else membership.member.state
        # A node that was dropped before its first beat reads so in the log, unless it waited all the time.
        is_unknown = self._writer.is_first and state == member.WAITING
        was_dropped = self._writer.write(store, comes_back=state != member.LEAVING) or is_unknown
        affairs.heard_at, affairs.fenced_for = now, 0.0
        if membership is None:
            return
        membership.feed(member.Beaten(was_dropped))
        if membership.member.state != member.RUNNING:
            affairs.deaths.look()
        self._look(store)
        self._wait_status.tell(store, now)

    @property
    def _next_look(self) -> float:
        membership = self._affairs.membership
        place = None if membership is None else membership.member.place
        if place is None or self._affairs.has_heard_the_end:
            return math.inf  # after the end the store may go at any moment, and nobody is to take its place
        pause = max(self._affairs.settings.keep_alive_interval / _LOOKS, place.group_world_size / _ALL_LOOKS)
        return self._last_look + pause

    def _look(self, store: JobStore) -> None:
        """See how the coordinator is, and in any case that the store answers; do what follows from it."""
        membership = self._affairs.membership
        if membership is None:
            return
        self._last_look = now = time.monotonic()
        watched = membership.member.watched
        if self._last_read is not None and now - self._last_read > 2 * self._affairs.settings.keep_alive_interval:
            # We were stopped, or the machine slept: what did not change meanwhile says nothing.
            membership.feed(member.Interrupted())
        read = watched or self._affairs.node
        value = self._beats.read(store, [read])[read]
        self._last_read = time.monotonic()
        if watched:
            membership.feed(member.CoordinatorBeatRead(watched, value))
        membership.run_errands(store, self._affairs.birth)

    # --- it doesn't ----------------------------------------------------------------------------------------------
    def _refuse(self, error: StoreTokenError, asked_at: float) -> bool:
        """Tell the agent that its token is not the job's; returns whether there is to be another attempt."""
        if self._affairs.membership is not None:
            return self._endure(error, asked_at)  # this node is in the job: what listens there now is another one's
        self._affairs.deliver(Refused(str(error)))
        return False

    def _endure(self, error: StoreError, asked_at: float) -> bool:
        """Wait a moment before the next attempt; returns whether there is to be one."""
        news = self._patience.failed(error, asked_at)
        if isinstance(news, Lost) and self._succeed(news):
            return True
        if news is not None:
            self._affairs.deliver(news)
        if isinstance(news, Lost):
            return False
        self._link.pause(error)
        return not self._affairs.closing.is_set()

    # --- it goes on elsewhere ------------------------------------------------------------------------------------
    def _succeed(self, lost: Lost) -> bool:
        """Go on at the next endpoint, if there is one; returns whether."""
        affairs = self._affairs
        if affairs.birth is None or affairs.closing.is_set() or not affairs.backend.advance():
            return False
        affairs.deliver(Notice(f"{lost.detail}; going on at {affairs.backend.name}"))
        return self._settle_down()

    def _move(self, endpoint: str) -> None:
        """Follow the host that has said where the store goes on."""
        affairs = self._affairs
        affairs.move_to = None
        before = affairs.backend.name
        if affairs.closing.is_set() or affairs.is_leaving or not affairs.backend.advance(endpoint):
            return
        self._link.drop()
        affairs.deliver(
            Notice(f"the node that serves the store at {before} leaves; going on at {affairs.backend.name}")
        )
        self._settle_down()

    def _rejoin(self, endpoint: str) -> None:
        """Leave a store that nobody else uses for the one where the job has gone on."""
        if self._affairs.backend.advance(endpoint):
            self._link.drop()
            self._affairs.deliver(Notice(f"the job has gone on at {endpoint}: joining it again"))
            self._settle_down()

    def _settle_down(self) -> bool:
        """Serve the store here if it is this node's turn, and wait for it anew."""
        self._patience.restart()
        for link in tuple(self._affairs.links):
            link.interrupt()
        try:
            self._affairs.backend.prepare()
        except OSError as error:
            self._affairs.deliver(Lost("store_lost", f"the rendezvous store can't be served here: {error}"))
            return False
        return True

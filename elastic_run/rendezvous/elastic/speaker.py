"""The thread that speaks for this node: it opens the store, says the node's facts, and beats.

Rules
- It wakes when there is a fact to say, and at every keep-alive interval; else it waits.
- It is the one that knows whether the store answers. A broken connection is opened anew, quietly for a lease, then with
  a line every ten seconds; after a stated time the store is given up and the agent is told `Lost`.
- The store says who it is: the first agent leaves a birth mark. After an outage another mark means another, emptied
  store, in which all that matters has to be said again.
"""

from __future__ import annotations

import os
import time

from elastic_run.core import job_keys, member, messages
from elastic_run.core.codec import MessageError
from elastic_run.rendezvous.elastic.audience import say_heard
from elastic_run.rendezvous.elastic.beats import BeatReader
from elastic_run.rendezvous.elastic.link import BIRTH
from elastic_run.rendezvous.elastic.patience import Patience
from elastic_run.rendezvous.elastic.reunion import Reunion
from elastic_run.rendezvous.elastic.session import Lost, Notice, Refused
from elastic_run.rendezvous.elastic.waiting import INTERVAL, describe_missing
from elastic_run.store.errors import StoreAccessError, StoreError, StoreForgedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.rendezvous.elastic.affairs import Affairs
    from elastic_run.rendezvous.elastic.membership import Membership
    from elastic_run.store.job_store import JobStore

__all__ = ["Speaker"]

_MARK = b"born "
#: Phases of the job in which a node waits for others.
_GATHERING = "gathering"


class Speaker:
    """Speaks for one node.

    Args:
        affairs: What the session's threads share.
        begin: Called once, when the store was reached: makes the member and starts the other threads.
    """

    def __init__(self, affairs: Affairs, begin: Callable[[], None]) -> None:
        self._affairs = affairs
        self._begin = begin
        self._link = affairs.make_link()
        self._beats = BeatReader()
        self._next_beat = 0.0
        self._last_read: float | None = None
        self._last_line = time.monotonic()
        self._patience = Patience(affairs)
        self._reunion = Reunion(affairs)

    def run(self) -> None:
        """Speak until the session ends."""
        try:
            self._affairs.backend.prepare()
        except OSError as error:
            self._affairs.deliver(Lost("rendezvous", f"the rendezvous store can't be served here: {error}"))
            return
        while not (self._affairs.closing.is_set() or self._affairs.is_lost):
            try:
                self._turn(self._link.store)
            except StoreAccessError as error:
                self._affairs.deliver(Lost("rendezvous", f"the store at {self._affairs.backend.name}: {error}"))
                return
            except StoreError as error:
                self._link.drop()
                if not self._endure(error):
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
        if affairs.wake.wait(max(0.0, self._next_beat - time.monotonic())):
            # Cleared before facts are looked for, so that none is overlooked.
            affairs.wake.clear()

    def _greet(self, store: JobStore) -> None:
        birth = self._read_birth(store)
        if birth is None:
            return
        recovered = self._patience.recovered()
        if recovered:
            self._affairs.deliver(Notice(recovered))
        affairs, membership = self._affairs, self._affairs.membership
        if membership is None:
            affairs.birth = birth
            store.beat(affairs.node)
            self._next_beat = time.monotonic() + affairs.settings.keep_alive_interval
            self._begin()
            return
        if birth == affairs.birth:
            membership.feed(member.Interrupted())
            membership.feed(member.Reconnected())
        else:
            self._change_store(membership, birth)
        self._next_beat = 0.0

    def _read_birth(self, store: JobStore) -> bytes | None:
        """Return the store's birth mark, or None after telling the agent that its token is not the job's."""
        name = self._affairs.backend.name
        try:
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
        membership.change_store(birth, has_copy=affairs.state_copy is not None)
        # Last, so that nobody takes the new store for the old one.
        affairs.birth = birth
        for link in tuple(affairs.links):
            if link is not self._link:
                link.interrupt()

    def _say_facts(self, store: JobStore) -> None:
        """Append what was not confirmed, and do the member's errands."""
        membership = self._affairs.membership
        if membership is None:
            return
        while (fact := membership.next_fact) is not None:
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
        store.beat(affairs.node)
        if membership is None:
            return
        membership.feed(member.Beaten())
        watched = membership.member.watched
        if watched:
            if self._last_read is not None and now - self._last_read > 2 * interval:
                # We were stopped, or the machine slept: what did not change meanwhile says nothing.
                membership.feed(member.Interrupted())
            value = self._beats.read(store, [watched])[watched]
            self._last_read = time.monotonic()
            membership.feed(member.CoordinatorBeatRead(watched, value))
        membership.run_errands(store, self._affairs.birth)
        self._tell_who_is_missing(store, now)

    def _tell_who_is_missing(self, store: JobStore, now: float) -> None:
        membership = self._affairs.membership
        if membership is None or membership.member.state not in (member.BEGINNING, member.WAITING, member.READY):
            self._last_line = now
            return
        if now - self._last_line < INTERVAL:
            return
        self._last_line = now
        raw = store.get([job_keys.STATUS])[0]
        if raw is None:
            return
        try:
            status = messages.read_status(raw)
        except MessageError:
            return
        if status.phase == _GATHERING:
            line = describe_missing(status.hosts, status.present, status.max_nodes, status.seconds_left)
            self._affairs.deliver(Notice("; ".join((line, *status.lost))))

    # --- it doesn't ----------------------------------------------------------------------------------------------
    def _endure(self, error: StoreError) -> bool:
        """Wait a moment before the next attempt; returns whether there is to be one."""
        line = self._patience.failed(getattr(error, "reason", str(error)))
        if isinstance(line, Lost):
            if self._succeed(line):
                return True
            self._affairs.deliver(line)
            return False
        if line is not None:
            self._affairs.deliver(Notice(line))
        self._link.pause()
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

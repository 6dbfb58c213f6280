"""The session of one agent: puts the threads together, and stands between them and the agent.

From `start` to `close`: the speaker opens the store and begins the membership; then the follower follows the log; while
this node is the coordinator there is an office as well. What the member says is for the agent is delivered from here.
"""

# ruff: noqa: D102 - Session says what the methods promise
from __future__ import annotations

import threading
import time

from elastic_run.core.node import machine as member
from elastic_run.core.protocol import messages
from elastic_run.records import replace
from elastic_run.rendezvous.elastic import audience, handover
from elastic_run.rendezvous.elastic.addresses import find_listening
from elastic_run.rendezvous.elastic.copies import StateCopy
from elastic_run.rendezvous.elastic.deaths import find_notice_limit
from elastic_run.rendezvous.elastic.entrance import Entrance
from elastic_run.rendezvous.elastic.follower import Follower
from elastic_run.rendezvous.elastic.membership import Membership
from elastic_run.rendezvous.elastic.session import Ended, Halted, Lost, Notice, Offer, Refused, Session, Warned
from elastic_run.rendezvous.elastic.speaker import Speaker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.rendezvous.elastic.affairs import Affairs
    from elastic_run.rendezvous.elastic.office import Office
    from elastic_run.rendezvous.elastic.session import Document, SessionEvent

__all__ = ["JobSession"]

_WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
#: Seconds for the threads to end once their connections were closed; where this node was told to go.
_PATIENCE = 5.0
_MOMENT = 0.2
#: Seconds for a node that was told to go to say so, and to give its office back.
_LAST_WORDS = 1.0
#: Seconds for a name server to say which of this machine's addresses others use.
_LOOK_UP = 3.0


class JobSession(Session):
    """One agent's membership of one job.

    Args:
        affairs: What the session's threads share.
        shares_server: Whether workers and agents share one server.
        describe_join: Says how others join, once the store is there at a host and a port; None where they know.
        is_fenced: Whether the workers are stopped when this node has not reached its job for a lease.
    """

    def __init__(
        self,
        affairs: Affairs,
        *,
        shares_server: bool = False,
        describe_join: Callable[[str, int], str] | None = None,
        is_fenced: bool = False,
    ) -> None:
        self.node = affairs.node
        self._affairs = affairs
        self._offer = Offer("", 0, use_agent_store=True)
        self._open_offer: Callable[[str], Offer] = lambda _: self._offer
        self._listening_host = ""
        self._offices: list[Office] = []
        self._is_prepared = False
        self._leaving: member.Leaving | None = None
        self._follower: Follower | None = None
        self._threads: dict[str, threading.Thread] = {}
        self._describe_join = describe_join
        self._is_fenced = is_fenced
        self._end: Ended | None = None
        self._is_refused = False
        self._unreadable: set[str] = set()
        self._lock = threading.RLock()
        self._entrance = Entrance(affairs, feed=self._feed, offer=self._advertised, shares_server=shares_server)

    @property
    def local_addr(self) -> str:
        """The address at which others reach this node, empty until it is known."""
        return self._affairs.local_addr

    @property
    def listening_host(self) -> str:
        return self._listening_host

    # --- what the agent says -------------------------------------------------------------------------------------
    def start(self, open_offer: Callable[[str], Offer], deliver: Callable[[SessionEvent], None]) -> None:
        self._open_offer = open_offer
        affairs = self._affairs
        affairs.deliver_to_agent = deliver
        affairs.deaths.say = lambda text: affairs.deliver(Notice(text))
        affairs.deaths.open(affairs.node)
        speaker = Speaker(affairs, self._begin, self._follow)
        self._threads["speaker"] = affairs.spawn("speaker", speaker.run)

    def report_failing(self, round: int, *, is_consequence: bool = False) -> None:  # noqa: A002 - the events' word
        self._feed(member.WorkersFailing(round, is_consequence))

    def report_ready(
        self,
        round: int,  # noqa: A002 - the events' word
        outcome: str,
        *,
        report: Document | None,
        offer: Offer,
        detail: str = "",
        verdict: str = "",
    ) -> None:
        self._offer = offer
        self._feed(
            member.WorkersGone(
                round,
                outcome,
                self._advertised(),
                report=None if report is None else dict(report),
                verdict=verdict,
                detail=detail,
            )
        )

    def leave(self, reason: str, detail: str = "") -> None:
        self._affairs.is_leaving = True
        self._leaving = member.Leaving(reason, detail)
        self._feed(self._leaving)

    def _feed(self, event: member.Event) -> None:
        membership = self._affairs.membership
        if membership is not None:
            membership.feed(event)
            self._affairs.wake.set()

    def _advertised(self) -> messages.Offer:
        host = self._affairs.local_addr if self._offer.host in _WILDCARDS else self._offer.host
        if self.worker_store is not None:
            host = self.worker_store.host  # what the user calls rank 0 on every node
        return messages.Offer(host, self._offer.port, use_agent_store=self._offer.use_agent_store)

    # --- what the job says ---------------------------------------------------------------------------------------
    def _begin(self, head: member.HeadRead | None) -> None:
        """Join: the store was reached just now, by the speaker's thread, which may have seen where the log stands."""
        affairs = self._affairs
        if not affairs.local_addr:
            affairs.local_addr = affairs.backend.find_local_address()
        self._choose_listening_host()
        try:
            self._offer = self._open_offer(self._listening_host)
        except OSError as error:
            affairs.deliver(Lost("rendezvous", f"the workers' store can't be served here: {error}"))
            return
        if self._describe_join is not None:
            affairs.deliver(Notice(self._describe_join(affairs.local_addr, affairs.backend.port)))
        card = replace(affairs.card, serves_store=affairs.backend.is_host)
        begun = member.begin(
            affairs.node, card=card, rules=affairs.rules, offer=self._advertised(), now=time.monotonic()
        )
        affairs.membership = Membership(
            begun,
            perform=self._perform,
            on_facts=affairs.wake.set,
            copy=StateCopy(affairs.backend),
            renew_offer=self._renew_offer,
            birth=affairs.birth,
        )
        if head is not None:
            affairs.membership.take_head(head)
        if self._leaving is not None:
            affairs.membership.feed(self._leaving)  # said while the store was being reached
        if self._is_fenced:
            from elastic_run.rendezvous.elastic.fence import Fence  # noqa: PLC0415 - imported when asked for

            affairs.heard_at = time.monotonic()
            self._threads["fence"] = affairs.spawn("fence", Fence(affairs, affairs.membership).run)
        self._follow()

    def _renew_offer(self) -> messages.Offer | None:
        """Offer another workers' store: a round may have been formed with the last one in a store that is lost."""
        if not self.offers_store:
            return None
        try:
            self._offer = self._open_offer(self._listening_host)
        except OSError as error:
            self._affairs.deliver(Lost("rendezvous", f"the workers' store can't be served here: {error}"))
            return None
        return self._advertised()

    def _choose_listening_host(self) -> None:
        """Choose where this node's workers' stores listen; told to the user where that is everywhere."""
        affairs = self._affairs
        found = find_listening(affairs.local_addr, _LOOK_UP)
        reason = found.reason
        if len(found.hosts) == 1:
            self._listening_host = found.hosts[0]
        elif found.hosts:
            reason = f"{affairs.local_addr} has several addresses ({', '.join(found.hosts)})"
        if reason and self.offers_store:
            affairs.deliver(Notice(f"the workers' store listens on all interfaces: {reason}"))

    def _follow(self) -> None:
        """Follow the log of the store that is the job's now."""
        membership = self._affairs.membership
        if self._follower is not None:
            self._follower.abandon()
        if membership is not None:
            self._follower = Follower(self._affairs, membership)
            self._threads["follower"] = self._affairs.spawn("follower", self._follower.run)

    def _perform(self, command: member.Command) -> None:
        """Hand on what the member says, to the agent or to the coordinator's thread."""
        affairs = self._affairs
        if isinstance(command, member.Formed):
            affairs.deaths.note_round(command.assignment, affairs.birth)
            self._entrance.announce(command.assignment)
            affairs.wake.set()  # the speaker looks more often now
            if not self._is_prepared:
                self._is_prepared = True
                affairs.spawn("prepare", _prepare_to_coordinate)
        elif isinstance(command, member.Warned):
            affairs.deliver(Warned(command.round))
        elif isinstance(command, member.Halted):
            if not self._entrance.has_withdrawn(command.round):
                affairs.deliver(Halted(command.round, command.reason, command.detail))
        elif isinstance(command, member.Refused):
            self._is_refused = True
            affairs.deliver(Refused(command.detail + handover.describe_consequence(affairs)))
        elif isinstance(command, member.Ended):
            end = command.end
            self._end = Ended(end.verdict, end.exit_code, end.detail, end.root, list(end.attempts), end.nodes)
            affairs.deliver(self._end)
        elif isinstance(command, member.Settled | member.Unreadable):
            self._tell_user(command)
        elif isinstance(command, member.MovedTo):
            self._move(command)
        else:
            self._coordinate(command)

    def _tell_user(self, command: member.Settled | member.Unreadable) -> None:
        """Tell the user what this node has found out; that a document of the job is garbage only once."""
        if isinstance(command, member.Settled):
            self._affairs.deliver(Notice(command.detail))
        elif command.key not in self._unreadable:
            self._unreadable.add(command.key)
            where = f"{command.key} at {self._affairs.backend.name}"
            self._affairs.deliver(Notice(f"{where} can't be read: {command.detail}; the coordinator writes it again"))

    def _coordinate(self, command: member.Command) -> None:
        if isinstance(command, member.Coordinate):
            from elastic_run.rendezvous.elastic.office import Office  # noqa: PLC0415 - only the elected node needs it

            office = Office(self._affairs, command)
            del self._offices[:-1]  # those of terms long past have ended, and each holds a state of the whole job
            self._offices.append(office)
            office.start()
        elif isinstance(command, member.StopCoordinating) and self._offices:
            self._offices[-1].stop()
        elif isinstance(command, member.HandOver) and self._offices:
            self._offices[-1].resign()

    def _move(self, command: member.MovedTo) -> None:
        affairs = self._affairs
        affairs.has_moved.set()
        if affairs.is_leaving:
            return
        if command.endpoint:
            affairs.move_to = command.endpoint
            affairs.wake.set()
        else:
            affairs.deliver(Lost("store_lost", command.detail))

    # --- the end -------------------------------------------------------------------------------------------------
    def close(self, timeout: float) -> None:
        affairs = self._affairs
        with self._lock:
            if affairs.closing.is_set():
                return
            deadline = time.monotonic() + timeout
            if affairs.is_leaving:
                self._take_leave(min(deadline, time.monotonic() + _LAST_WORDS))
            else:
                audience.wait_until_said(affairs, min(deadline, time.monotonic() + affairs.settings.lease))
            if self._end is not None and (affairs.backend.is_host or self._has_ended_the_job):
                audience.wait_until_heard(affairs, deadline, removes_job=not affairs.backend.dies_with_host)
            elif (affairs.is_leaving or self._is_refused) and affairs.backend.is_host and not affairs.is_lost:
                handover.hand_over(affairs, deadline, is_refused=self._is_refused)
            affairs.closing.set()
            affairs.wake.set()
            for link in tuple(affairs.links):
                link.interrupt()
        # One that just opens a connection can't be woken; a node that was told to go doesn't wait for it.
        joined_by = time.monotonic() + (_MOMENT if affairs.is_leaving else _PATIENCE)
        for thread in tuple(self._threads.values()):
            thread.join(max(0.0, joined_by - time.monotonic()))
        for office in self._offices:
            office.join(max(0.0, joined_by - time.monotonic()))
        affairs.backend.close()
        affairs.deaths.close(is_over=self._end is not None or self._is_refused)

    def _take_leave(self, deadline: float) -> None:
        """Say that this node goes, and give its office back, so that nobody has to find out by a lease."""
        audience.wait_until_said(self._affairs, deadline)
        if self._offices and not self._affairs.has_more_to_say:
            self._offices[-1].join(max(0.0, deadline - time.monotonic()))

    @property
    def _has_ended_the_job(self) -> bool:
        return bool(self._offices) and self._offices[-1].has_ended

    def farewell(self) -> dict[str, Any] | None:
        affairs = self._affairs
        return {
            **affairs.backend.describe(),
            "node": affairs.node,
            "job": affairs.deaths.job,
            "record": affairs.deaths.path,
            "seconds": find_notice_limit(affairs.settings.lease),
        }


def _prepare_to_coordinate() -> None:
    """Import what only a coordinator needs: by the time that it does, the installation may have been upgraded."""
    import elastic_run.rendezvous.elastic.office  # noqa: F401, PLC0415

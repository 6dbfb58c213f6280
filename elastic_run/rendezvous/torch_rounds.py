"""torch's plain rendezvous on a session: for agents that ask for a round, watch a number, and ask again.

Such an agent knows nothing of reports. When it comes back for another round, its workers are gone: because the round
was halted (then `num_nodes_waiting` had told it to), or because they failed. Its own restart budget counts; the job's
has no limit here. The store of the round's agents and workers is torch's, served by rank 0's process: these agents are
written against torch, and import it.
"""

from __future__ import annotations

import threading
from datetime import timedelta

from elastic_run.core.job.documents import StoreAddress
from elastic_run.core.job.membership import Ended, Formed, Halted, Refused, Warned
from elastic_run.core.job.restart_policy import DONE, FAILED, STOPPED
from elastic_run.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from elastic_run.rendezvous.events import Lost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.core.job.documents import Assignment
    from elastic_run.rendezvous.events import SessionEvent
    from elastic_run.rendezvous.session import Session

#: Time to wait for the server, and for keys unless the caller says otherwise.
_TIMEOUT = timedelta(seconds=300)


class TorchStyleRounds:
    """The rounds of one plain handler, on a session that has not started yet."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._changed = threading.Condition()
        self._formed: Assignment | None = None
        self._current: Assignment | None = None
        self._end: Ended | Lost | Refused | None = None
        self._is_halted = False
        self._is_finished = False
        self._store: Any = None  # the server of the next round, or of this one where this node has rank 0

    @property
    def is_over(self) -> bool:
        """Whether no further round comes."""
        return self._end is not None

    @property
    def num_nodes_waiting(self) -> int:
        """1 if the agent has to restart the workers for another round, or to stop them for the end; otherwise 0."""
        return int(self._current is not None and (self._is_halted or self.is_over))

    def next_round(self) -> RendezvousInfo:
        """Come back, and wait for the next round."""
        if self._current is None:
            self._session.start(self._renew_store, self._take)
        else:
            self._come_back(self._current, self._renew_store())
        with self._changed:
            self._changed.wait_for(lambda: self._formed is not None or self._end is not None)
            place, self._formed = self._formed, None
            if place is None:
                raise self._closed()
            self._current, self._is_halted = place, False
        host, port, stores = place.master.host, place.master.port, _import_stores()
        connection = stores.TCPStore(host, port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
        store = stores.PrefixStore(f"agents/{place.round}", connection)
        return RendezvousInfo(store, place.group_rank, place.group_world_size, RendezvousStoreInfo(host, port))

    def _come_back(self, current: Assignment, store_address: StoreAddress) -> None:
        if self._is_halted:
            self._session.report_ready(current.round, STOPPED, report=None, store_address=store_address)
            return
        self._session.report_failing(current.round)
        report = {"exit_code": 1, "signature": None, "is_deterministic": False, "uptime": 0.0, "severity": 0}
        self._session.report_ready(current.round, FAILED, report=report, store_address=store_address)

    def finish(self) -> None:
        """Say that this node's workers are done; once."""
        if self._current is None or self._is_finished or self.is_over:
            return
        self._is_finished = True
        store_address = StoreAddress("", self._store.port if self._store else 0, use_agent_store=True)
        self._session.report_ready(self._current.round, DONE, report=None, store_address=store_address)

    def close(self, timeout: float) -> None:
        """Wait for the end of the other nodes, for this many seconds at most, and close the session."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self._current is None, timeout)
        self._session.close(timeout)
        self._store = None

    def _take(self, event: SessionEvent) -> None:
        with self._changed:
            if isinstance(event, Formed):
                self._formed = event.assignment
            elif isinstance(event, Halted | Warned):
                self._is_halted = True
            elif isinstance(event, Ended | Lost | Refused):
                self._end = event
            self._changed.notify_all()

    def _renew_store(self, _host: str = "") -> StoreAddress:
        self._store = None  # torch's server ends with its object
        self._store = _import_stores().TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return StoreAddress("", self._store.port, use_agent_store=True)

    def _closed(self) -> RendezvousError:
        end = self._end
        if isinstance(end, Refused):
            return RendezvousStateError(end.detail)
        if isinstance(end, Lost):
            return RendezvousConnectionError(end.detail)
        if isinstance(end, Ended) and end.end.verdict == "rendezvous":
            return RendezvousTimeoutError(end.end.detail)
        return RendezvousClosedError((end.end.detail if end is not None else "") or "the job is over")


def _import_stores() -> Any:
    import torch.distributed

    return torch.distributed

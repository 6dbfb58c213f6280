"""Launchers of one step that contradict each other: they are refused, instead of waiting for each other in vain.

`srun bash -c 'elastic-run --rdzv-endpoint=$HOSTNAME:29400 …'` gives each node a place of its own, and $RANDOM in the
same position an id of its own. A job that needs all launchers of its step can know that. The launcher that serves a
store says there which job it waits for. The others look there, and at the same port of the step's first node.

Only a launcher that waits says so, and what it says dies with it: a later job of the same step is no contradiction.
"""

from __future__ import annotations

import math

from elastic_run.core.node.state import BEGINNING, READY, WAITING
from elastic_run.rendezvous.elastic.other_jobs import PLACE, describe_launchers
from elastic_run.store.errors import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.node.config import LaunchStep
    from elastic_run.rendezvous.elastic.backend.tcp import TcpBackend
    from elastic_run.rendezvous.elastic.context import SessionContext
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["StepCheck"]

_WAITING = (BEGINNING, WAITING, READY)
#: After the key: what the last launcher has said that came to this store and found a contradiction.
_VISITOR = " visitor"
#: Seconds from one look to the next: launchers start within a second of each other, or much later.
_PAUSES = (0.15, 0.25, 0.4, 1.0, 3.0)
_LAST_PAUSE = 10.0
#: Seconds for a store to answer.
_ANSWER = 0.5
#: Nodes that may look within a second.
_LOOKS_A_SECOND = 500


class StepCheck:
    """One launcher's comparison with the others of its step.

    Args:
        context: The data that the session's threads share.
        backend: The job's store.
        step: The step.
        draw: A random number from 0 to 1: in a large job not all nodes look at once.
    """

    def __init__(self, context: SessionContext, backend: TcpBackend, step: LaunchStep, draw: float) -> None:
        self._context = context
        self._backend = backend
        self._host = step.first_host
        self._key = f"step {step.name}"
        self._pauses = iter(_PAUSES)
        self._delay = draw * context.config.min_nodes / _LOOKS_A_SECOND
        self._next: float | None = None
        self._has_said = False

    @property
    def next_look(self) -> float:
        """Monotonic seconds of the next look; infinity where none is due any more."""
        if self._is_waiting:
            return self._next or 0.0
        # What this launcher has said must be gone before a later job of the step comes.
        return 0.0 if self._has_said else math.inf

    @property
    def _is_waiting(self) -> bool:
        """Whether the first round is waited for; later ones must not wait for a look."""
        return self._context.signals.formed_at is None and self._context.member_state() in _WAITING

    def look(self, now: float) -> str:
        """Look whether another launcher of the step contradicts this one.

        Args:
            now: Monotonic seconds.

        Returns:
            The contradiction and the mend, for the user; "" where none is known.
        """
        if not self._is_waiting:
            self._say("")
            self._has_said = False
            return ""
        is_first = self._next is None
        self._next = now + next(self._pauses, _LAST_PAUSE) + self._delay
        # Most jobs need no look: their nodes are there by the next one.
        return "" if is_first else self._compare()

    def _compare(self) -> str:
        self._say(self._describe())
        nearest = self._backend.nearest_endpoint
        for place in dict.fromkeys((nearest, (self._host, nearest[1]))):
            try:
                with self._backend.look_at(place, _ANSWER, PLACE) as store:
                    found = self._read_other(store)
            except StoreError:
                continue  # there is none, or this node's own connection tells of it
            if found:
                return found
        return ""

    def _read_other(self, store: JobStore) -> str:
        """Return how the launcher that serves a store, or a visitor of it, contradicts this one; tell it."""
        own = self._describe()
        for text in store.get([self._key, self._key + _VISITOR]):
            other = (text or b"").decode(errors="replace")
            if other and _identify(other) != _identify(own):
                store.write({self._key + _VISITOR: own.encode()})
                return describe_launchers(own, other)
        return ""

    def _say(self, text: str) -> None:
        """Say in the store that this launcher serves which job it waits for, "" for none."""
        if not self._backend.is_host:
            return
        self._has_said = True
        try:
            with self._backend.look_at(self._backend.nearest_endpoint, _ANSWER, PLACE) as store:
                store.write({self._key: text.encode()} if text else {self._key: b"", self._key + _VISITOR: b""})
        except StoreError:
            return  # this node's own connection tells of it

    def _describe(self) -> str:
        """Return this launcher's host, its job's id, where it waits, and the id of the store there."""
        store_id = (self._context.sender.store_id or b"").decode(errors="replace")
        return f"{self._context.node_info.host}\n{self._backend.run_id}\n{self._backend.name}\n{store_id}"


def _identify(text: str) -> tuple[str, ...]:
    """Return what must be the same in all launchers of a step: one place may have several names."""
    _, run_id, _, store_id = (*text.split("\n"), "", "", "")[:4]
    return run_id, store_id

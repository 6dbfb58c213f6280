"""Launchers of one step that contradict each other: they are refused, instead of waiting for each other in vain.

`srun bash -c 'elastic-run --rdzv-endpoint=$HOSTNAME:29400 …'` gives each node a place of its own, and $RANDOM in the
same position an id of its own. A job that needs all launchers of its step can know that. Each launcher says its step
and its place with its first words. Until its first round it also looks at the same port of the step's first node. The
agent that it meets tells both users. With a token it tells its own user nothing: a look has proved nothing.

A launcher with a round says nothing of its step: a later job of the same step is no contradiction.
"""

from __future__ import annotations

import os
import threading

from elastic_run.core.job.discovery import COORDINATES, KNOWS_NOTHING
from elastic_run.records import replace
from elastic_run.rendezvous.coordination.opening import CONTRADICTS, ask
from elastic_run.store.errors import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop
    from elastic_run.rendezvous.coordination.opening import Answer, Hello, Identity

__all__ = ["StepCheck", "find_contradiction"]

#: Seconds from one look to the next: launchers start within a second of each other, or much later.
_PAUSES = (0.15, 0.25, 0.4, 1.0, 3.0)
_LAST_PAUSE = 10.0
#: Seconds for an agent to answer.
_ANSWER = 0.5
#: Nodes that may look within a second.
_LOOKS_A_SECOND = 500


def find_contradiction(own: Identity, answer: Answer, hello: Hello) -> tuple[str, str]:
    """Return how a launcher that comes contradicts the agent to which it comes; pure.

    Args:
        own: The agent.
        answer: What it is.
        hello: The launcher.

    Returns:
        A sentence for the launcher's user and one for the agent's; empty if there is no contradiction.
    """
    is_waiting = answer.role == COORDINATES and answer.standing == KNOWS_NOTHING
    if not own.step or hello.step != own.step or not is_waiting:
        return "", ""
    if hello.job != own.job:
        flag, here, there = "--rdzv-id", hello.job, own.job
    elif hello.coordinator not in ("", own.node) and hello.place != own.place:
        flag, here, there = "--rdzv-endpoint", hello.place, own.place  # one place may have several names
    else:
        return "", ""
    return _describe(flag, here, there, own.host), _describe(flag, there, here, hello.host)


def _describe(flag: str, here: str, there: str, host: str) -> str:
    return (
        f"{flag}: is {here} here and {there} on {host} of the same Slurm step, so that the nodes never meet: give all "
        "of them the same, or leave it out"
    )


class StepCheck:
    """One launcher's looks at the first node of its step, in the loop of its node's thread.

    In a large step not all of its `nodes` look at once. `find_coordinator` returns the node that coordinates for this
    agent, "" for none, and None once it has a round. `refuse` is called with a contradiction, a sentence for the user.
    """

    def __init__(
        self,
        loop: Loop,
        identity: Identity,
        endpoint: tuple[str, int],
        *,
        nodes: int,
        find_coordinator: Callable[[], str | None],
        refuse: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._identity = identity
        self._endpoint = endpoint
        self._delay = int.from_bytes(os.urandom(2), "big") / 65536 * nodes / _LOOKS_A_SECOND
        self._find_coordinator = find_coordinator
        self._refuse = refuse
        self._pauses = iter(_PAUSES)

    def plan(self) -> None:
        """Look a moment later: most jobs need no look, since their nodes are there by then."""
        self._loop.call_later(next(self._pauses, _LAST_PAUSE) + self._delay, self._look)

    def _look(self) -> None:
        coordinator = self._find_coordinator()
        if coordinator is None:
            return
        hello = replace(self._identity.make_hello(joins=False), coordinator=coordinator)

        def look() -> None:
            detail = ""
            try:
                answer, _, _ = ask(self._endpoint, hello, _ANSWER, self._identity.credentials, dark_after=_ANSWER)
                detail = answer.detail if answer.role == CONTRADICTS else ""
            except StoreError:
                pass  # nobody is there, or this node's own connection tells of it
            self._loop.call_soon_threadsafe(lambda: self._take(detail))

        threading.Thread(target=look, name="rendezvous-step", daemon=True).start()

    def _take(self, detail: str) -> None:
        if detail:
            self._refuse(detail)
        else:
            self.plan()

"""What an agent tells its rendezvous of several nodes at first, and the events with which the rendezvous answers.

What the job decides comes as the member's own commands (`core.job.membership`): `Formed` (rank 0's store was seen to
be reachable: start the workers), `Warned`, `Halted`, `Refused` and `Ended`. What only the rendezvous knows stands here.
Events come in the order in which they were decided.
"""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from elastic_run.core.config import JobConfig, NodeConfig
    from elastic_run.core.job.documents import NodeInfo
    from elastic_run.core.job.membership import Ended, Formed, Halted, Refused, Warned


@dataclass(frozen=True, slots=True)
class Setup:
    """The agent's description of its job."""

    job_config: JobConfig  # the rendezvous adds its own settings
    node_config: NodeConfig
    node_info: NodeInfo
    shows_waiting: bool = False  # else what is waited for comes as a `Notice` from time to time, not as a `Waiting`


@dataclass
class Lost:
    """There is no coordinator, for good: stop the workers. Nothing follows."""

    verdict: str  # a name of `contract.EXIT_CODES`
    detail: str  # one sentence for the user


@dataclass
class Notice:
    """One line for the user: nodes are missing, the store is unreachable, how others join."""

    text: str


@dataclass
class Waiting:
    """What this node waits for now, for one line that is rewritten; only where `Setup.shows_waiting` asks for it."""

    #: Returns the line at a monotonic time, the longest form first; None when the wait is over.
    texts: Callable[[float], tuple[str, ...]] | None
    is_for_nodes: bool  # other nodes are waited for, so that it is over with the next `Formed`; else the store is


@dataclass
class StatusAsked:
    """Another node asks all nodes a question of `core.job.node_status`: answer with `Session.tell_status`."""

    question: str


if TYPE_CHECKING:
    SessionEvent: TypeAlias = Formed | Warned | Halted | Ended | Refused | Lost | Notice | Waiting | StatusAsked

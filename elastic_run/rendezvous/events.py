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

    from elastic_run.core.job.config import JobConfig, NodeConfig
    from elastic_run.core.job.documents import NodeInfo
    from elastic_run.core.job.membership import Ended, Formed, Halted, Refused, Warned


@dataclass(frozen=True, slots=True)
class Setup:
    """The agent's description of its job.

    Args:
        job_config: The job's configuration; the rendezvous adds its own settings.
        node_config: This node's.
        node_info: This node.
        shows_waiting: Whether the agent shows `Waiting`; else what is waited for comes as a `Notice` from time to time.
    """

    job_config: JobConfig
    node_config: NodeConfig
    node_info: NodeInfo
    shows_waiting: bool = False


@dataclass
class Lost:
    """There is no coordinator, for good: stop the workers. Nothing follows.

    Args:
        verdict: A name of `contract.EXIT_CODES`.
        detail: One sentence for the user.
    """

    verdict: str
    detail: str


@dataclass
class Notice:
    """One line for the user: nodes are missing, the store is unreachable, how others join."""

    text: str


@dataclass
class Waiting:
    """What this node waits for now, for one line that is rewritten; only where `Setup.shows_waiting` asks for it.

    Args:
        texts: Returns the line at a monotonic time, the longest form first; None when the wait is over.
        is_for_nodes: Whether other nodes are waited for, so that it is over with the next `Formed`; else the store is.
    """

    texts: Callable[[float], tuple[str, ...]] | None
    is_for_nodes: bool


@dataclass
class StatusAsked:
    """Another node asks all nodes a question of `core.job.node_status`: answer with `Session.tell_status`."""

    question: str


if TYPE_CHECKING:
    SessionEvent: TypeAlias = Formed | Warned | Halted | Ended | Refused | Lost | Notice | Waiting | StatusAsked

"""What an agent and its rendezvous say to each other in a job of several nodes.

The agent makes one `Session` per run, tells it what becomes of its workers, and is told what the job has decided:
events, each with its round, in the order in which they were decided. What the job decides comes as the member's own
commands (`core.job.node_events`): `Formed` (rank 0's store was seen to be reachable: start the workers), `Warned`,
`Halted`, `Refused` and `Ended`. What only the rendezvous knows stands here. An event is made once and never changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeAlias

    from elastic_run.core.job.config import JobConfig, NodeConfig
    from elastic_run.core.job.node_events import Ended, Formed, Halted, Refused, Warned
    from elastic_run.core.protocol.facts import NodeEnds, NodeInfo, StoreAddress
    from elastic_run.store.tcpstore.worker_store import WorkerStore

    Document: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """The agent's description of its job, for the rendezvous.

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


# --- events ----------------------------------------------------------------------------------------------------------
@dataclass
class Lost:
    """The job's store is gone for good, or was never reached: stop the workers. Nothing follows.

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
    """Another node asks all nodes: answer with `Session.tell_status`.

    Args:
        question: See `core.protocol.node_status`.
    """

    question: str


if TYPE_CHECKING:
    SessionEvent: TypeAlias = Formed | Warned | Halted | Ended | Refused | Lost | Notice | Waiting | StatusAsked


# --- the session -----------------------------------------------------------------------------------------------------
class Session(ABC):
    """This node's membership of one job, from its first join to its end; all methods may be called from any thread.

    Attributes:
        node: This run's id among the nodes of the job.
        worker_store: What the agent must use as the workers' store instead of opening one, where the rendezvous has one
            port for both (static, on rank 0); else None.
        offers_store: Whether the agent opens a workers' store for each round at all; with static only rank 0 has one.
    """

    node: str
    worker_store: WorkerStore | None = None
    offers_store = True

    @property
    @abstractmethod
    def local_addr(self) -> str:
        """The address at which others reach this node; empty until the store was reached."""

    @property
    @abstractmethod
    def listening_host(self) -> str:
        """The numeric address at which this node's workers' stores listen; empty for all interfaces."""

    @abstractmethod
    def start(self, open_worker_store: Callable[[str], StoreAddress], deliver: Callable[[SessionEvent], None]) -> None:
        """Join the job; returns at once.

        Args:
            open_worker_store: Opens this node's workers' store of the first round at a `listening_host`, and returns
                where it listens; an empty host, or a wildcard, stands for this node's own. Called by a thread of the
                session when the store was reached, and again when the job goes on in another store while this node
                waits; it may raise OSError.
            deliver: Called with each event, from the session's threads, one at a time; it must not block.
        """

    @abstractmethod
    def report_failing(self, round: int, *, is_secondary: bool = False) -> None:  # noqa: A002 - the events' word
        """Say that a worker of the round has failed, before the others are stopped. Never blocks.

        Args:
            round: The round.
            is_secondary: Whether all that failed so far look as if they had lost a peer. To be said again without
                this when a failure of another kind follows.
        """

    @abstractmethod
    def report_ready(
        self,
        round: int,  # noqa: A002 - the events' word
        outcome: str,
        *,
        report: Document | None,
        store_address: StoreAddress,
        detail: str = "",
        verdict: str = "",
        ends: NodeEnds | None = None,
    ) -> None:
        """Say that no process of the round lives any more on this node. Never blocks.

        Args:
            round: The round.
            outcome: Of `core.protocol.outcomes`: `done` (all workers exited 0), `failed`, `stopped` (because the round
                was halted) or `cannot_start` (which ends the job).
            report: This node's root cause, JSON-able: ``exit_code``, ``signature``, ``is_deterministic``, ``uptime``
                (seconds), ``severity`` and ``summary`` (a line for the user) are read by the policy, the rest is
                carried to every node. With `stopped`: what had failed by itself before the halt, or None.
            store_address: Where this node's workers' store of the next round listens.
            detail: For `cannot_start`: one sentence for the user.
            verdict: For `cannot_start`: a name of `contract.EXIT_CODES`.
            ends: How this node's workers ended, or None if all of them obeyed the stop.
        """

    @abstractmethod
    def leave(self, reason: str, detail: str = "") -> None:
        """Say that this node goes. Never blocks; `close` waits until it was heard.

        Args:
            reason: Of `core.protocol.outcomes`: `signal`, `unkillable` or `unhealthy`.
            detail: One sentence for the user.
        """

    @property
    @abstractmethod
    def has_place(self) -> bool:
        """Whether this node runs a round, or was in the job's last one; not if the job went on without it."""

    @abstractmethod
    def tell_status(self, document: Document, question: str) -> None:
        """Answer for this node, after `StatusAsked`. Never blocks.

        Args:
            document: JSON-able, with the fields that `core.protocol.node_status` has for this question.
            question: The question that was asked.
        """

    @abstractmethod
    def gather_status(self, question: str, wait_limit: float, deliver: Callable[[list[dict[str, Any]]], None]) -> None:
        """Ask all nodes; returns at once.

        Args:
            question: Of `core.protocol.node_status`.
            wait_limit: Seconds to wait for them.
            deliver: Called once, from another thread, with the documents that have come.
        """

    @abstractmethod
    def list_left_out(self) -> list[dict[str, Any]]:
        """Return the nodes that the job goes on without, as far as this node knows: the coordinator does.

        Returns:
            Documents as `rendezvous.coordination.coordinator_thread.list_left_out` makes them.
        """

    @abstractmethod
    def describe_wait(self) -> str:
        """Return which nodes are there, and which are missing, while this node waits for others; otherwise ""."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """Flush what was said, linger where others depend on this node, and stop all threads; harmless when closed.

        A node that hosts the store stays until the live agents have read the verdict. If it has left since it is
        unhealthy, and no other node can serve the store, it stays until the other nodes have ended; before the first
        round it waits a moment for other nodes.

        Args:
            timeout: Seconds that all this may take; an unhealthy node does not heed it.
        """

    @abstractmethod
    def hold_connections_with(self, hold: Callable[[int], None]) -> None:
        """Let the guardian hold this node's connection to its job as well.

        Args:
            hold: Called with the descriptor of each connection, from the session's thread; it takes a duplicate.
        """

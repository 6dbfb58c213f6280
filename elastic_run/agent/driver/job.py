"""This node's part in a job of several nodes: decisions of the job come in as events, reports of this node go out.

The session has threads of its own; everything here runs in the loop's thread. A round has one number, the job's.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

from elastic_run.agent.script_name import find_script_file, name_script
from elastic_run.agent.worker_launch import assign_ranks
from elastic_run.cluster.torch_devices import find_torch_version
from elastic_run.contract import LONGEST_WAIT
from elastic_run.core.agent import messages
from elastic_run.core.job.documents import NodeInfo, StoreAddress
from elastic_run.core.job.membership import Ended, Formed, Halted, Refused, Warned
from elastic_run.core.job.node_status import DRAIN, kind_of
from elastic_run.core.job.restart_policy import UNHEALTHY
from elastic_run.multiprocessing.fork_exec import own_interpreter
from elastic_run.records import replace
from elastic_run.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from elastic_run.rendezvous.events import Notice, Setup, StatusAsked, Waiting
from elastic_run.schedulers.actions import find_machine_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    from elastic_run.agent.api import WorkerSpec
    from elastic_run.agent.context import AgentContext, AgentOptions
    from elastic_run.agent.worker_launch import RoundJoin
    from elastic_run.core.job.documents import Assignment, End, NodeEnds
    from elastic_run.rendezvous.api import RendezvousError
    from elastic_run.rendezvous.events import Lost, SessionEvent
    from elastic_run.rendezvous.session import Session
    from elastic_run.report.waiting import WaitLine

    Deliver: TypeAlias = Callable[[dict[str, Any]], None]

#: Seconds that the nodes have to read the end, however short the exit barrier: without its store a node ends with 207.
_SHORTEST_BARRIER = 2.0
#: Seconds that an agent may take to write its last facts if no other node needs it to stay.
_LAST_WORDS = 3.0
#: Seconds for the loop to open a store, which never blocks.
_OPENING = 10.0

#: Why the job stops a round, by the reasons of `Halted`. A failure has its own detail.
_HALTS = {
    "loss": "nodes lost",
    "leave": "nodes left",
    "join": "nodes joined",
    "replaced": "the job went on without this node",
    "fenced": "this node can't reach its job (--fence-after=lease)",
}


class MultiNodeJob:
    """This node's part in a job of several nodes; it sets the ranks and the master address of the context's group."""

    def __init__(self, context: AgentContext, round_join: RoundJoin) -> None:
        self.ended: End | None = None  # The job's verdict
        self.place: Assignment | None = None  # This node's place in the current round, or None before the first
        self.halt = ""  # Why the job has stopped its last round, in words
        self.use_agent_store = True  # Whether rank 0's agent serves the workers' store of the current round
        self.error: RendezvousError | None = None
        #: The calls of `answer` before the control socket is open, which answers them.
        self.unanswered: list[tuple[str, Deliver]] = []
        #: Passes this node's answer to a question of `core.job.node_status` to a function, a bit later.
        self.answer: Callable[[str, Deliver], object] = lambda *call: self.unanswered.append(call)
        self._session: Session | None = None
        self._context = context
        self._group = context.group
        self._options = context.options
        self._round_join = round_join
        self._loop = context.loop
        self._wait_line: WaitLine | None = None
        self._is_running = False
        self._round = -1
        self._has_left = False
        self._is_unhealthy = False

    def join(self, first: Callable[[Session], None] = lambda _: None) -> None:
        """Join the job; `first` is called before the session goes to the store."""
        handler: Any = self._group.spec.rdzv_handler
        has_live_line = self._context.console.has_live_line
        setup = make_setup(self._group.spec, self._options, shows_waiting=has_live_line)
        self._session = session = handler.open_session(setup)
        first(session)
        session.start(lambda host: self._open_worker_store(session, host), self._deliver)
        if not self._has_left:
            session.hold_connections_with(self._entrust_connection)

    def _entrust_connection(self, descriptor: int) -> None:
        """Let the guardian hold this node's connection to its job, whose end then proves that no worker is left."""
        duplicate = os.dup(descriptor)

        def hand_over() -> None:
            self._context.guardian.hold(duplicate)
            os.close(duplicate)

        self._loop.call_soon_threadsafe(hand_over)

    @property
    def nodes(self) -> int:
        """Number of nodes in the current round."""
        return self._group.group_world_size or 1

    def is_member(self, document: dict[str, Any]) -> bool:
        """Whether an answer to a question to all nodes comes from a node of the current round."""
        return self.place is not None and document["round_id"] == self.place.round_id

    def describe_round(self) -> dict[str, Any]:
        """Return the round that this node runs or ran last; none if the job went on without this node."""
        place = self.place if self._session is not None and self._session.has_place else None
        nodes, round_id = (0, "") if place is None else (place.group_world_size, place.round_id)
        return {"round_id": round_id, "round_nodes": nodes}

    def report_failing(self, *, is_secondary: bool) -> None:
        """Say that a worker of the current round has failed."""
        if self._session is not None:
            self._session.report_failing(self._round, is_secondary=is_secondary)

    def report_ready(self, command: messages.ReportReady, report: dict[str, Any] | None, ends: NodeEnds | None) -> None:
        """Say that the round is over on this node; OSError says that the next round's store can't be opened."""
        self._is_running = False
        if self._session is None:
            return
        self._session.report_ready(
            command.round,
            command.outcome,
            report=report,
            store_address=self._worker_store_address(self._session, self._session.listening_host),
            detail=command.detail,
            verdict=command.verdict,
            ends=ends,
        )

    def gather_status(self, question: str, wait_limit: float, deliver: Callable[[list[dict[str, Any]]], None]) -> None:
        """Ask all nodes a question; without other nodes only to drain one. `deliver` gets the answers, once."""
        if self._session is None or not (self.nodes > 1 or kind_of(question) == DRAIN):
            deliver([])
            return
        self._session.gather_status(
            question, wait_limit, lambda found: self._loop.call_soon_threadsafe(lambda: deliver(found))
        )

    def list_left_out(self) -> list[dict[str, Any]]:
        """Return the nodes that the job goes on without; [] where this node does not coordinate the job."""
        return [] if self._session is None else self._session.list_left_out()

    def describe_wait(self) -> str:
        """Return which nodes are there, and which are missing, while this node waits for others; otherwise ""."""
        return "" if self._session is None else self._session.describe_wait()

    def leave(self, reason: str, detail: str = "") -> None:
        """Tell the job that this node leaves. A node that is found unhealthy before it joined joins to tell it."""
        self._has_left = True
        self._is_unhealthy = reason == UNHEALTHY
        self._end_wait()
        if self._session is not None:
            self._session.leave(reason, detail)
        elif reason == UNHEALTHY:
            self.join(lambda session: session.leave(reason, detail))

    def close(self, barrier: float, *, is_hurried: Callable[[], bool]) -> None:
        """Write the last facts; stay for others, `barrier` seconds at most, not after a second stop signal."""
        session = self._session
        if session is None:
            return
        timeout = max(barrier, _SHORTEST_BARRIER) if self.ended is not None and not self._has_left else _LAST_WORDS
        if self._is_unhealthy:
            timeout = LONGEST_WAIT  # the session knows how long the other nodes need its store
        is_closed = threading.Event()

        def close() -> None:
            try:
                session.close(timeout)
            finally:
                is_closed.set()
                self._loop.call_soon_threadsafe(lambda: None)  # wakes the loop

        # In a thread: while this node stays for the others, the loop must answer signals.
        threading.Thread(target=close, name="close session", daemon=True).start()
        self._loop.run_until(lambda: is_closed.is_set() or is_hurried(), self._loop.now() + timeout + _LAST_WORDS)

    def _open_worker_store(self, session: Session, host: str) -> StoreAddress:
        """Open the first round's store; the session's thread asks, and the loop's thread owns stores."""
        opened: list[StoreAddress | OSError] = []
        is_done = threading.Event()

        def open_store() -> None:
            try:
                opened.append(self._worker_store_address(session, host))
            except OSError as error:
                opened.append(error)
            is_done.set()

        self._loop.call_soon_threadsafe(open_store)
        is_done.wait(_OPENING)
        store_address = opened[0] if opened else TimeoutError(f"the agent did not open it within {_OPENING:.0f} s")
        if isinstance(store_address, OSError):
            raise store_address
        return store_address

    def _worker_store_address(self, session: Session, host: str) -> StoreAddress:
        if not session.offers_store:
            # One port for the store of the agents and of the workers, on the node that serves it.
            self._round_join.store = session.worker_store
            port = 0 if session.worker_store is None else session.worker_store.port
            return StoreAddress("", port, use_agent_store=True)
        store = self._round_join.open_next_store(host)
        return StoreAddress("", store.port, use_agent_store=store.use_agent_store)

    # --- what the job says -----------------------------------------------------------------------------------------
    def _deliver(self, event: SessionEvent) -> None:
        self._loop.call_soon_threadsafe(lambda: self._take(event))

    def _take(self, event: SessionEvent) -> None:
        say = self._context.say
        if isinstance(event, Notice):
            say(event.text)
        elif isinstance(event, Waiting):
            self._show_wait(event)
        elif isinstance(event, StatusAsked):
            self._pass_question(event.question)
        elif isinstance(event, Formed):
            self._take_place(event.assignment)
        elif isinstance(event, Warned):
            say("new nodes wait to join: the workers get a warning, and will be stopped soon")
            self._context.feed(messages.RoundWarned(event.round))
        elif isinstance(event, Halted):
            self.halt = _describe_halt(event)
            say(f"stopping the workers: {self.halt}")
            self._context.feed(messages.RoundHalted(event.round))
        elif isinstance(event, Ended):
            self.ended = end = event.end
            if end.verdict == "success":
                self._tell_success(end)
            self._end(end.verdict, self._name_error(end, RendezvousTimeoutError), exit_code=end.exit_code)
        elif isinstance(event, Refused):
            self._end(event.verdict, event.detail)
        else:
            self._end(event.verdict, self._name_error(event, RendezvousConnectionError))

    def _pass_question(self, question: str) -> None:
        if (session := self._session) is not None:
            self.answer(question, lambda document: session.tell_status(document, question))

    def _name_error(self, end: End | Lost, kind: type[RendezvousError]) -> str:
        """Return the detail of an end, behind it the name of torch's error, which programs look for in logs."""
        if end.verdict != "rendezvous":
            return end.detail
        self.error = kind(end.detail)
        return f"{end.detail} ({kind.__name__})"

    def _tell_success(self, end: End) -> None:
        if end.detail:
            self._context.say(end.detail)
        if self._round < 0 and not self._has_left:
            others = f"{end.nodes} node{' was' if end.nodes == 1 else 's were'}" if end.nodes else "others were"
            spare = f"this node was a spare, the script never ran here: {others} enough"
            self._context.say(f"the job has ended with success; {spare}")

    def _show_wait(self, event: Waiting) -> None:
        if event.is_for_nodes and self._is_running:
            return  # the round was formed while this was being said
        if event.texts is None:
            self._end_wait("")
            return
        if self._wait_line is None:
            from elastic_run.report.waiting import WaitLine

            self._wait_line = WaitLine(self._loop, self._context.console)
        # Workers own the terminal: beside their progress bars there is no room for a line that is rewritten.
        self._wait_line.show(event.texts, is_live=not self._is_running)

    def _end_wait(self, last: str | None = None) -> None:
        if self._wait_line is not None:
            self._wait_line.end(last)

    def _end(self, verdict: str, detail: str, exit_code: int | None = None) -> None:
        self._end_wait()
        self._context.feed(messages.JobOver(messages.Finish(verdict, detail=detail, exit_code=exit_code)))

    def _take_place(self, place: Assignment) -> None:
        nodes = place.group_world_size
        self._end_wait("" if self._round >= 0 else f"{nodes} node{'s are' if nodes > 1 else ' is'} there")
        self._is_running = True
        is_first = place.round == 1
        if place.group_rank == 0 and (is_first or not place.news) and self._options.node_config.notice:
            self._context.say(self._options.node_config.notice)
        if place.versions and (self.place is None or place.versions != self.place.versions):
            mend = "if collectives fail or hang, install the same version on all nodes"
            self._context.say(f"the nodes have different versions of torch: {place.versions}; {mend}")
        if self._round >= 0 or (is_first and place.news):
            self._context.say(_describe_round(place, self._options.job_config.max_restarts))
        self._round_join.close_old_store()
        self.place = place
        self._round = place.round
        self.use_agent_store = place.master.use_agent_store
        group = self._group
        group.master_addr, group.master_port = place.master.host, place.master.port
        ranks = (place.base_rank, place.world_size, place.role_rank, place.role_world_size)
        assign_ranks(group, place.group_rank, place.group_world_size, ranks)
        self._context.feed(messages.RoundFormed(self._round, restart_count=place.restart_count))


def _describe_halt(halt: Halted) -> str:
    """Say why the job stops a round, in words that end a line."""
    what = _HALTS.get(halt.reason)
    return ": ".join(text for text in (what, halt.detail) if text) or halt.reason


def _describe_round(place: Assignment, max_restarts: int) -> str:
    limit = f" of {max_restarts}" if max_restarts else ""
    nodes = "1 node" if place.group_world_size == 1 else f"{place.group_world_size} nodes"
    workers = "1 worker" if place.world_size == 1 else f"{place.world_size} workers"
    news = f" ({place.news})" if place.news else ""
    if place.round == 1:
        return f"first round: {nodes}, {workers}; this is node {place.group_rank}{news}"
    return f"new round: {nodes}, {workers}, restart {place.restart_count}{limit}; this is node {place.group_rank}{news}"


def make_setup(spec: WorkerSpec, options: AgentOptions, *, shows_waiting: bool) -> Setup:
    """Return the description of this node's workers and the user's settings for the rendezvous."""
    config, node_config = options.job_config, options.node_config
    if not node_config.scale_up_signal:
        config = replace(config, scale_up_grace=0.0)  # the workers are not warned, so they need no time
    # Programs of another interpreter may have another torch.
    is_other = isinstance(spec.entrypoint, str) and spec.entrypoint not in (sys.executable, own_interpreter())
    node_info = NodeInfo(
        host=socket.gethostname(),
        pid=os.getpid(),
        local_world_size=spec.local_world_size,
        role=spec.role,
        preferred_rank=node_config.preferred_rank,
        location=node_config.location,
        script=name_script(spec.entrypoint, spec.args),
        machine=find_machine_name(os.environ),
        torch="" if is_other else find_torch_version(sys.path),
        script_file=find_script_file(spec.entrypoint, spec.args),
    )
    return Setup(config, node_config, node_info, shows_waiting=shows_waiting)

"""Events and metrics of an agent's steps, with the names that torch's agent gives them.

Torch measures its own methods and polls the workers every `monitor_interval`. This agent has no such methods and is
notified of each exit, so it publishes each step of a round once: the rendezvous, the assignment of ranks, the start,
the state of the group (healthy, then succeeded or failed), the stop.

Without a listener nothing is built or imported: events need a handler other than "null", and a program can have
configured a handler of metrics only if it has imported `elastic_run.metrics`.

Source of the names: torch 2.13, torch.distributed.elastic.agent.server.api and local_elastic_agent.
"""

from __future__ import annotations

import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.simple_elastic_agent import SimpleElasticAgent

# Steps of a round. The first three are states in torch's events as well.
RENDEZVOUS = "RENDEZVOUS"
ASSIGN_WORKER_RANKS = "ASSIGN_WORKER_RANKS"
START = "START"
FAILED = "FAILED"
STOP = "STOP"

#: For each step the methods of torch's agents that do the same, in the order in which they end.
_METHODS = {
    RENDEZVOUS: ("SimpleElasticAgent._rendezvous",),
    ASSIGN_WORKER_RANKS: ("SimpleElasticAgent._assign_worker_ranks",),
    START: ("LocalElasticAgent._start_workers", "SimpleElasticAgent._initialize_workers"),
    STOP: ("LocalElasticAgent._stop_workers",),
}
_RESTART = "SimpleElasticAgent._restart_workers"
_MONITOR = "LocalElasticAgent._monitor_workers"
_RUN = "SimpleElasticAgent.run"


class StepRecorder:
    """Publishes the steps of one agent."""

    def __init__(self, agent: SimpleElasticAgent, remaining_restarts: Callable[[], int]) -> None:
        self._agent = agent
        self._remaining_restarts = remaining_restarts
        self._spec = agent.get_worker_group().spec
        self._state = ""
        self._rounds = 0
        self._started = time.monotonic()

    def record(self, step: str, duration_ms: float) -> None:
        """Publish a step of a round."""
        if self._spec.event_log_handler != "null" and step in {RENDEZVOUS, ASSIGN_WORKER_RANKS, START}:
            self._record_event(step, duration_ms)
        for name in _METHODS.get(step, ()):
            self._put_call(name, duration_ms)
        if step == START:
            self._rounds += 1
            if self._rounds > 1:
                self._put_call(_RESTART, duration_ms)
            self._state = ""
            self.put_state("healthy")
        elif step == FAILED:
            self.put_state("failed")

    def put_state(self, state: str) -> None:
        """Publish the state of the worker group, once for each state that a round comes to."""
        if state == self._state:
            return
        self._state = state
        self._put_call(_MONITOR, 0.0)
        self._put(f"workers.{self._spec.role}.remaining_restarts", self._remaining_restarts())
        self._put(f"workers.{self._spec.role}.{state}", 1)

    def put_run(self, *, is_success: bool) -> None:
        """Publish the end of the agent's run."""
        self._put_call(_RUN, (time.monotonic() - self._started) * 1000, is_success=is_success)

    def _record_event(self, step: str, duration_ms: float) -> None:
        from functools import partial

        from elastic_run.events import EventSource

        agent = self._agent
        if step != START:
            agent.record_event(lambda: agent._construct_event(step, EventSource.AGENT, duration_ms=duration_ms))  # noqa: SLF001 - torch's hook
            return
        for worker in agent.get_worker_group().workers:
            agent.record_event(partial(agent._construct_event, step, EventSource.WORKER, worker))  # noqa: SLF001 - ditto

    def _put_call(self, name: str, duration_ms: float, *, is_success: bool = True) -> None:
        """Publish a call as `metrics.prof` does."""
        self._put(f"{name}.{'success' if is_success else 'failure'}", 1)
        self._put(f"{name}.duration.ms", int(duration_ms))

    def _put(self, name: str, value: int) -> None:
        if "elastic_run.metrics" in sys.modules:
            self._agent.put_metric(name, value)

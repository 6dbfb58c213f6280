"""An agent of one's own as others have written it for torch: workers are started with subprocess.

Usage: agent.py SCRIPT WORKERS RESTARTS; prints what became of the job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import meeting
from torch.distributed.elastic.agent.server import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters


class SubprocessAgent(SimpleElasticAgent):
    """Starts a command for each worker.

    Args:
        spec: What the workers are.
        command: Their command.
    """

    def __init__(self, spec: WorkerSpec, command: list[str]) -> None:
        super().__init__(spec)
        self._command = command
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for worker in worker_group.workers:
            environment = {
                "RANK": worker.global_rank,
                "LOCAL_RANK": worker.local_rank,
                "WORLD_SIZE": worker.world_size,
                "MASTER_ADDR": worker_group.master_addr,
                "MASTER_PORT": worker_group.master_port,
                "TORCHELASTIC_RUN_ID": worker_group.spec.rdzv_handler.get_run_id(),
                "TORCHELASTIC_USE_AGENT_STORE": worker_group.spec.rdzv_handler.use_agent_store,
                "TORCHELASTIC_RESTART_COUNT": worker_group.spec.max_restarts - self._remaining_restarts,
            }
            self._processes[worker.local_rank] = subprocess.Popen(
                self._command, env=os.environ | {name: str(value) for name, value in environment.items()}
            )
        return {rank: process.pid for rank, process in self._processes.items()}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - the hook's signature
        self._shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        if any(codes.values()):
            failures = {
                worker_group.workers[rank].global_rank: ProcessFailure(rank, self._processes[rank].pid, code, "")
                for rank, code in codes.items()
                if code
            }
            return RunResult(WorkerState.FAILED, failures=failures)
        if None in codes.values():
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(codes, "fine"))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        for process in self._processes.values():
            process.send_signal(death_sig)
            process.wait(timeout)
        self._processes.clear()


def main() -> None:
    """Run the job and tell what came of it."""
    script, workers, restarts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    handler = meeting.Meeting(RendezvousParameters("by-hand", "127.0.0.1", "job7", 1, 1))
    spec = WorkerSpec(
        role="trainer",
        local_world_size=workers,
        rdzv_handler=handler,
        entrypoint=script,
        max_restarts=restarts,
        monitor_interval=0.05,
    )
    agent = SubprocessAgent(spec, [sys.executable, script])
    result = agent.run()
    print(result.state.name, sorted(result.return_values), sorted(result.failures), agent._remaining_restarts)
    print("agent:", SimpleElasticAgent.__module__.partition(".")[0])


if __name__ == "__main__":
    main()

"""A process context over a process group: what commands and functions of `start_processes` have in common.

Each process leads a session; `close` stops all processes of the session, and none outlives this program. Their stdout
and stderr are this program's own unless `logs_specs` says otherwise; the group's thread passes on tee'd lines.
"""

from __future__ import annotations

import abc
import os
import signal

from elastic_run.multiprocessing.errors import ProcessFailure
from elastic_run.multiprocessing.functions.contexts import PContext, RunProcsResult
from elastic_run.multiprocessing.output.wiring import Wiring
from elastic_run.multiprocessing.process.fork_exec import ensure_standard_descriptors
from elastic_run.multiprocessing.starter import WorkerStarter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.cluster.numa import NumaOptions
    from elastic_run.multiprocessing.functions.process_group import ProcessGroup
    from elastic_run.multiprocessing.output.console import Console
    from elastic_run.multiprocessing.starter import StartedWorker

#: Seconds that processes get to stop when one of them has failed, as with torch.
_GRACE = 30


class GroupContext(PContext):
    """A `PContext` whose processes belong to a process group."""

    _group: ProcessGroup | None = None
    _is_started = False
    _environments: dict[int, dict[str, str]]
    _result: RunProcsResult | None = None
    _numa_options: NumaOptions | None = None

    def pids(self) -> dict[int, int]:
        """Return the processes by local rank."""
        return {} if self._group is None else self._group.pids

    def _start(self) -> None:
        from elastic_run.multiprocessing.functions.process_group import ProcessGroup

        if self._is_started:
            message = f"{self.name} was started already: a context starts its processes once"
            raise ValueError(message)
        self._is_started = True
        self._environments = {rank: _read_environment(env, rank) for rank, env in self.envs.items()}
        self._prepare()
        ensure_standard_descriptors()
        wiring, group = Wiring(capture=False), ProcessGroup(say=self._say)
        self._group = group
        try:
            self._start_all(group, wiring)
        finally:
            # After any error: the processes that run by now are stopped through it.
            group.serve()

    def _start_all(self, group: ProcessGroup, wiring: Wiring) -> None:
        starter = WorkerStarter(group.guardian, wiring, self._logs, self._affinities())
        try:
            group.start_guardian()
            for rank in range(self.nprocs):
                group.adopt(rank, self._launch(starter, group, rank))
        finally:
            self._listen(group, wiring)

    def _affinities(self) -> dict[int, frozenset[int]]:
        if self._numa_options is None:
            return {}
        from elastic_run.cluster.numa import worker_affinities
        from elastic_run.multiprocessing.process.interpreter import own_interpreter

        return worker_affinities(self._numa_options, self.nprocs, python=own_interpreter())

    def _listen(self, group: ProcessGroup, wiring: Wiring) -> None:
        if not any(wiring.lines.values()):
            return
        from elastic_run.multiprocessing.output.console import Console
        from elastic_run.multiprocessing.output.worker_output import WorkerOutput

        console = Console(group.loop)
        output = WorkerOutput(group.loop, console, wiring)
        output.open_filtered(self._logs, *self._filters)
        prefixes = self._prefixes or {rank: f"[{self.name}{rank}]:" for rank in range(self.nprocs)}
        output.attach(lambda rank: prefixes.get(rank, ""))

        def finish() -> None:
            output.close()
            _flush(console, group)

        group.at_end(finish)

    @staticmethod
    def _say(text: str) -> None:
        import logging

        logging.getLogger(__name__).warning("%s", text)

    def _prepare(self) -> None:
        """Refuse functions and arguments that can't be started, before the first process starts."""

    @abc.abstractmethod
    def _launch(self, starter: WorkerStarter, group: ProcessGroup, local_rank: int) -> StartedWorker:
        """Start one process."""

    def _wait_news(self, timeout: float | None, period: float) -> None:  # noqa: ARG002 - nothing is looked at
        group = self._group
        if group is not None:
            group.wait(lambda: group.is_decided, timeout)

    def _poll(self) -> RunProcsResult | None:
        group = self._group
        if group is None:
            message = f"{self.name} was not started"
            raise AssertionError(message)
        if self._result is None and group.is_decided:
            failed_first = [rank for rank, code in group.ended.items() if code]
            self._stop(signal.SIGTERM, _GRACE)
            self._result = self._conclude(group, failed_first)
            if not self._result.failures:
                self._clean_up()
        return self._result

    def _conclude(self, group: ProcessGroup, failed: list[int]) -> RunProcsResult:
        result = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        for rank in self._blamed(group, failed):
            result.failures[rank] = ProcessFailure(
                rank, group.pids[rank], group.ended[rank], self.error_files.get(rank, "")
            )
        if not result.failures:
            result.return_values = self._values(group)
        return result

    def _blamed(self, group: ProcessGroup, failed: list[int]) -> list[int]:
        """Return the ranks that count as failed: the processes that failed before the others were stopped."""
        own = [rank for rank, code in group.ended.items() if code and rank not in group.stopped]
        return own or failed

    @abc.abstractmethod
    def _values(self, group: ProcessGroup) -> dict[int, Any]:
        """Return the values that the processes returned."""

    def _stop(self, death_sig: int, timeout: float) -> None:
        if self._group is not None:
            self._group.stop(death_sig, timeout)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self._stop(death_sig, timeout)

    def _clean_up(self) -> None:
        cleanup = getattr(self._logs_specs, "cleanup", None)
        if cleanup is not None:
            cleanup()


def _read_environment(env: dict[str, Any], rank: int) -> dict[str, str]:
    """Return a process's variables as text.

    Raises:
        TypeError: One is none, such as a number.
        ValueError: The kernel takes no variable of that name or value.
    """
    found = {}
    for name, value in env.items():
        try:
            key, text = os.fsdecode(name), os.fsdecode(value)
        except TypeError:
            message = f"envs of local rank {rank}: names and values are texts, got {name!r}: {value!r}"
            raise TypeError(message) from None
        if not key or "=" in key or "\0" in key + text:
            message = f"envs of local rank {rank}: {name!r}: {value!r} can't be an environment variable"
            raise ValueError(message)
        found[key] = text
    return found


def _flush(console: Console, group: ProcessGroup) -> None:
    """Wait for a slow reader of the tee'd lines."""
    group.loop.run_until(lambda: console.is_idle)
    console.close()

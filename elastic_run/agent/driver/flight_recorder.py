"""torch's flight recorder in the workers of this node: the variables that switch it on, and its dumps.

Imported only with --flight-recorder. The workers write the dumps; the agent asks for them before it stops a round.
"""

from __future__ import annotations

import os
import select
import socket
import time

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elastic_run.core.failure.evidence import RecorderFinding
    from elastic_run.multiprocessing.output.logs import LogsDest

#: Name of a dump in the directory of an attempt; the rank follows.
FILE_PREFIX = "flight_recorder_rank_"
#: Entries that the recorder of a worker keeps.
_ENTRIES = 2000
#: Seconds that the stop of the round waits for dumps with stacks; those without take milliseconds.
_PATIENCE = 3.0


class FlightRecorder:
    """The flight recorders of one agent's workers."""

    def __init__(self) -> None:
        self._token = os.urandom(8).hex()
        self._attempt = 0
        self._started_at = 0.0
        self._paths: dict[int, str] = {}

    def switch_on(self, envs: Mapping[int, dict[str, str]], logs: LogsDest, parent: Mapping[str, str]) -> None:
        """Add the variables to the workers' environments; a value that the user has set stays.

        Args:
            envs: The workers' environments by local rank.
            logs: The files for their output.
            parent: The launcher's environment, which the workers inherit.
        """
        self._attempt += 1
        self._started_at = time.time()
        self._paths.clear()
        given = next((parent[name] for name in contract.ENV_RECORDER_PREFIX if parent.get(name)), "")
        for local_rank, env in envs.items():
            if not any(name in parent for name in contract.ENV_RECORDER_SIZE):
                env[contract.ENV_RECORDER_SIZE[0]] = str(_ENTRIES)
            own = logs.error_files.get(local_rank, "")
            prefix = given or (own and os.path.join(os.path.dirname(os.path.dirname(own)), FILE_PREFIX))
            if prefix:
                env[contract.ENV_RECORDER_PREFIX[0]] = prefix
                env[contract.ENV_FLIGHT_RECORDER] = self._socket_name(local_rank)
                self._paths[local_rank] = f"{prefix}{env[contract.ENV_RANK]}"

    def _socket_name(self, local_rank: int) -> str:
        return f"elastic-run-recorder-{self._token}-{self._attempt}-{local_rank}"

    def collect(self) -> None:
        """Let the workers that live write their dumps; return when all have, or after some seconds."""
        poll, deadline = select.poll(), time.monotonic() + _PATIENCE
        asked: dict[int, socket.socket] = {}
        try:
            for local_rank in self._paths:
                connection = socket.socket(socket.AF_UNIX)
                connection.setblocking(False)  # noqa: FBT003 - the method's own signature
                if connection.connect_ex(f"\0{self._socket_name(local_rank)}"):
                    connection.close()  # it has ended, or has not imported torch.distributed
                    continue
                asked[connection.fileno()] = connection
                poll.register(connection, select.POLLIN)
            while asked and (left := deadline - time.monotonic()) > 0:
                for descriptor, _ in poll.poll(left * 1000):
                    poll.unregister(descriptor)
                    asked.pop(descriptor).close()
        finally:
            for connection in asked.values():
                connection.close()

    def explain(self, *, is_whole_job: bool) -> RecorderFinding | None:
        """Return what the dumps of the last round say is the cause, or None.

        Args:
            is_whole_job: Whether this node has all ranks of the job; else a rank without dump says nothing.
        """
        from elastic_run.core.failure.evidence import RecorderFinding  # noqa: PLC0415 - only after a failure
        from elastic_run.diagnosis.dump_files import find_dumps  # noqa: PLC0415
        from elastic_run.diagnosis.trace_analysis import analyse  # noqa: PLC0415
        from elastic_run.diagnosis.trace_findings import ALONE, NO_DUMP  # noqa: PLC0415
        from elastic_run.diagnosis.trace_text import first_line  # noqa: PLC0415

        found = find_dumps(list(self._fresh()))
        analysis = analyse(found.dumps)
        text = first_line(analysis)
        if not text or (not is_whole_job and analysis.findings[0].kind in (ALONE, NO_DUMP)):
            return None
        accused = () if analysis.findings[0].kind == ALONE else analysis.findings[0].ranks
        return RecorderFinding(text, accused, is_whole_job=is_whole_job)

    def _fresh(self) -> Iterable[str]:
        """Return the dumps of this round: a path that the user gave may hold older ones."""
        for path in self._paths.values():
            try:
                # A file system may have coarse times.
                if os.stat(path).st_mtime >= self._started_at - 2:
                    yield path
            except OSError:
                pass

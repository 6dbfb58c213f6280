"""torch's flight recorder in the workers of this node: the variables that switch it on, and its dumps.

Imported only with --flight-recorder or --hang-timeout. The workers write the dumps. The agent asks for them before it
stops a round, and when the job hangs; its loop goes on meanwhile.
"""

from __future__ import annotations

import os
import time
from functools import partial

from elastic_run import contract
from elastic_run.diagnosis.recorder import make_name, send_request

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping

    from elastic_run.core.failure.job_result import RecorderFinding
    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.logs import LogsDest

#: Name of a dump in the directory of an attempt; the rank follows.
FILE_PREFIX = "flight_recorder_rank_"
#: Entries that the recorder of a worker keeps.
_ENTRIES = 2000
#: Entries up to which the times of collectives are asked for: to read one holds up its worker for 10 us.
_MOST_ENTRIES = 10_000
#: Seconds that the stop of the round waits for dumps with stacks; those without take milliseconds.
WAIT_LIMIT = 3.0
_COUNT_WAIT = 0.7
_CALLS_WAIT = 10.0
_READ_SIZE = 1 << 16


class RecorderQuestion:
    """One question to the recorders of some workers; `on_done` gets the whole answers by local rank, once."""

    def __init__(
        self,
        loop: Loop,
        sockets: Mapping[int, str],
        question: bytes,
        wait_limit: float,
        on_done: Callable[[dict[int, str]], None],
    ) -> None:
        self._loop = loop
        self._on_done = on_done
        self._connections: dict[int, socket.socket] = {}
        self._received: dict[int, bytes] = {}
        self._answers: dict[int, str] = {}
        for local_rank, name in sockets.items():
            connection = send_request(name, question)
            if connection is not None:  # else it has ended, or has not imported torch.distributed
                self._connections[local_rank] = connection
                loop.add_reader(connection.fileno(), partial(self._read, local_rank))
        self._timer = loop.call_later(wait_limit if self._connections else 0.0, self.finish)

    def _read(self, local_rank: int) -> None:
        try:
            data = self._connections[local_rank].recv(_READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._received[local_rank] = self._received.get(local_rank, b"") + data
            return
        self._close(local_rank)
        self._answers[local_rank] = self._received.get(local_rank, b"").decode(errors="replace")
        if not self._connections:
            self.finish()

    def finish(self) -> None:
        """Wait no longer; harmless when all is over."""
        self._timer.cancel()
        for local_rank in [*self._connections]:
            self._close(local_rank)
        on_done, self._on_done = self._on_done, lambda _: None
        on_done({rank: answer for rank, answer in self._answers.items() if answer})

    def _close(self, local_rank: int) -> None:
        connection = self._connections.pop(local_rank)
        self._loop.remove_reader(connection.fileno())
        connection.close()


class FlightRecorder:
    """The flight recorders of one agent's workers."""

    def __init__(self) -> None:
        self.has_times = True  # Whether the workers may be asked for the times of their collectives
        self._started_at = 0.0
        self._paths: dict[int, str] = {}
        self._sockets: dict[int, str] = {}

    def switch_on(self, envs: Mapping[int, dict[str, str]], logs: LogsDest, parent: Mapping[str, str]) -> None:
        """Add the variables to the workers' environments by local rank; a value that the user has set stays."""
        self._started_at = time.time()
        self._paths.clear()
        self._sockets = {}
        given = next((parent[name] for name in contract.ENV_RECORDER_PREFIX if parent.get(name)), "")
        sizes = (parent[name] for name in contract.ENV_RECORDER_SIZE if parent.get(name, "").isdecimal())
        self.has_times = int(next(sizes, _ENTRIES)) <= _MOST_ENTRIES
        for local_rank, env in envs.items():
            if not any(name in parent for name in contract.ENV_RECORDER_SIZE):
                env[contract.ENV_RECORDER_SIZE[0]] = str(_ENTRIES)
            own = logs.error_files.get(local_rank, "")
            prefix = given or (own and os.path.join(os.path.dirname(os.path.dirname(own)), FILE_PREFIX))
            if prefix:
                env[contract.ENV_RECORDER_PREFIX[0]] = prefix
                env[contract.ENV_FLIGHT_RECORDER] = self._sockets[local_rank] = make_name("recorder")
                self._paths[local_rank] = f"{prefix}{env[contract.ENV_RANK]}"

    def collect(self, loop: Loop, on_done: Callable[[], None], *, wait_limit: float = WAIT_LIMIT) -> RecorderQuestion:
        """Let the living workers write their dumps; `on_done` is called from the loop, at the wait limit at last."""
        return RecorderQuestion(loop, self._sockets, contract.RECORDER_DUMP, wait_limit, lambda _: on_done())

    def count(self, loop: Loop, on_done: Callable[[dict[int, str]], None]) -> RecorderQuestion:
        """Ask the living workers for their collectives, `open 0=2/-1/1` or `done 0=1/-1/1`, by local rank."""
        return RecorderQuestion(loop, self._sockets, contract.RECORDER_COUNT, _COUNT_WAIT, on_done)

    def list_calls(self, loop: Loop, on_done: Callable[[dict[int, str]], None]) -> RecorderQuestion:
        """Ask the living workers for the times of their collectives since the last question, by local rank."""
        return RecorderQuestion(loop, self._sockets, contract.RECORDER_CALLS, _CALLS_WAIT, on_done)

    def explain(self, *, is_whole_job: bool) -> RecorderFinding | None:
        """Return the cause that the dumps of the last round show, or None.

        A rank without a dump says nothing unless this node has all ranks of the job.
        """
        from elastic_run.core.failure.job_result import RecorderFinding
        from elastic_run.diagnosis.dumps import DumpError, find_dumps
        from elastic_run.diagnosis.trace_analysis import analyse
        from elastic_run.diagnosis.trace_findings import ALONE, NO_DUMP, first_line

        try:
            found = find_dumps(list(self._fresh()))
        except DumpError:  # it was removed just now
            return None
        analysis = analyse(found.dumps)
        text = first_line(analysis)
        if not text or (not is_whole_job and analysis.findings[0].kind in (ALONE, NO_DUMP)):
            return None
        return RecorderFinding(text, analysis.findings[0].ranks, is_whole_job=is_whole_job)

    def _fresh(self) -> Iterable[str]:
        """Return the dumps of this round: a path that the user gave may hold older ones."""
        for path in self._paths.values():
            try:
                # A file system may have coarse times.
                if os.stat(path).st_mtime >= self._started_at - 2:
                    yield path
            except OSError:
                pass

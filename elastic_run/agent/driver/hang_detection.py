"""Watches one round for a hang: reads signs at each tick, takes looks, and brings both to `core.diagnosis.hang`.

Runs only with --hang-timeout. A look asks all workers that run for their stacks, and their flight recorders for the
number of collectives; what the processes did is read before, since the answer takes processor time itself.
"""

from __future__ import annotations

from elastic_run.agent.driver.hang_signs import make_look, read_signs, sample_processes
from elastic_run.core.diagnosis import hang
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.agent.driver.flight_recorder import FlightRecorder
    from elastic_run.agent.driver.hang_signs import ProcessSample
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.diagnosis.hang import Stillness
    from elastic_run.core.diagnosis.stack_groups import Dump
    from elastic_run.loop import Loop, Timer

#: Seconds that workers get for their stacks: a verdict waits for that.
_PATIENCE = 1.5


@dataclass(frozen=True, slots=True)
class Hang:
    """A job that hangs.

    Args:
        seconds: For how long no rank has made progress.
        ranks: How long each rank has been still, by global rank.
        dumps: The stacks of this node's workers, by global rank.
    """

    seconds: float
    ranks: Mapping[int, Stillness]
    dumps: Mapping[int, Dump]


class HangDetection:
    """The detection in one round.

    Args:
        loop: The agent's.
        current: The round, whose workers run.
        timeout: Seconds without progress that are a hang; 0 for `auto`.
        heartbeats: Path of the file of each worker's heartbeats, by local rank.
        recorder: The workers' flight recorders, or None.
        on_hang: Called once for each hang.
    """

    def __init__(
        self,
        loop: Loop,
        current: Round,
        *,
        timeout: float,
        heartbeats: Mapping[int, str],
        recorder: FlightRecorder | None,
        on_hang: Callable[[Hang], None],
    ) -> None:
        self._loop = loop
        self._round = current
        self._heartbeats = heartbeats
        self._recorder = recorder
        self._on_hang = on_hang
        self._watch = hang.HangWatch(timeout)
        self._is_looking = False
        self._is_closed = False
        self._timer: Timer
        self._tick()

    def close(self) -> None:
        """Watch no more."""
        self._is_closed = True
        self._timer.cancel()

    def _tick(self) -> None:
        signs = read_signs(self._round, self._heartbeats)
        self._watch, wants_look = hang.tick(self._watch, self._loop.now(), signs)
        self._timer = self._loop.call_later(self._watch.period, self._tick)
        if wants_look and not self._is_looking and signs:
            self._is_looking = True
            _Questions(self._loop, self._round, self._recorder, self._conclude)

    def _conclude(
        self, dumps: Mapping[int, Dump], answers: Mapping[int, str], samples: Mapping[int, ProcessSample]
    ) -> None:
        self._is_looking = False
        if self._is_closed:
            return
        alive = samples.keys() & dumps.keys() & self._round.workers.alive
        looks = {rank: make_look(dumps[rank], samples[rank], answers.get(rank, "")) for rank in alive}
        now = self._loop.now()
        self._watch = hang.look(self._watch, now, looks)
        ranks = hang.measure(self._watch, now)
        seconds = hang.count_seconds(ranks)
        if seconds < self._watch.timeout or self._watch.told is not None:
            return
        self._watch = hang.tell(self._watch)
        names = self._round.global_ranks
        self._on_hang(
            Hang(
                seconds,
                {names[rank]: still for rank, still in ranks.items()},
                {names[rank]: dump for rank, dump in dumps.items()},
            )
        )


class _Questions:
    """The questions of one look; calls when all of them are answered, or are not waited for any longer."""

    def __init__(
        self,
        loop: Loop,
        current: Round,
        recorder: FlightRecorder | None,
        on_done: Callable[[Mapping[int, Dump], Mapping[int, str], Mapping[int, ProcessSample]], None],
    ) -> None:
        self._samples = sample_processes(current)
        self._on_done = on_done
        self._dumps: Mapping[int, Dump] | None = None
        self._answers: Mapping[int, str] | None = {} if recorder is None else None
        if recorder is not None:
            recorder.count(loop, self._take_answers)
        pids = {rank: current.workers.pids[rank] for rank in current.workers.alive}
        current.listen_for_stacks().ask(pids, _PATIENCE, self._take_dumps)

    def _take_answers(self, answers: Mapping[int, str]) -> None:
        self._answers = answers
        self._conclude()

    def _take_dumps(self, dumps: Mapping[int, Dump]) -> None:
        self._dumps = dumps
        self._conclude()

    def _conclude(self) -> None:
        if self._dumps is not None and self._answers is not None:
            self._on_done(self._dumps, self._answers, self._samples)

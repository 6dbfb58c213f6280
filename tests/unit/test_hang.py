"""When a job hangs: what counts as progress, and when looks agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.core.failure import hang
from elastic_run.core.failure.hang import (
    NO_DETECTION,
    NOT_YET,
    HangWatch,
    Look,
    Owner,
    Signs,
    Stillness,
    describe_rank,
    join_nodes,
)
from elastic_run.core.failure.stacks import Place
from elastic_run.core.job.node_status import HANG as NODE_STATUS_HANG
from elastic_run.core.job.node_status import is_sound
from elastic_run.records import replace

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Document = dict[str, Any]

WAITS = Look("all_reduce", Place("all_reduce", "train.py", 88, is_waiting=True))
LOADS = Look("load_batch", Place("load_batch", "data.py", 41))
COMPUTES = Look("sort", Place("sort", "train.py", 7))

#: What a rank shows, by the seconds since the start.
Rank = "Callable[[float], tuple[Signs, Look]]"


def still(look: Look) -> Callable[[float], tuple[Signs, Look]]:
    """Return a rank that shows always the same."""
    return lambda _: (Signs((0,), 0.0), look)


def spins(look: Look) -> Callable[[float], tuple[Signs, Look]]:
    """Return a rank that uses a whole processor at one place."""
    return lambda now: (Signs((0,), now), replace(look, cpu=now, is_running=True))


def writes_until(last: float) -> Callable[[float], tuple[Signs, Look]]:
    """Return a rank that writes up to a moment, and never again."""
    return lambda now: (Signs((round(min(now, last) * 1e6),), 0.0), LOADS)


def find_verdict(
    *ranks: Callable[[float], tuple[Signs, Look]], timeout: float = 60.0, until: float = 2000.0, delay: float = 1e-6
) -> tuple[float, int] | None:
    """Play a watch over some ranks.

    Args:
        ranks: What each rank shows.
        timeout: The hang timeout in seconds.
        until: Seconds after which the job does not hang.
        delay: Seconds by which each tick is late: a timer is never early.

    Returns:
        When the job was said to hang, in seconds, and the number of looks before; or None.
    """
    watch, now, looks = HangWatch(timeout), 0.0, 0
    while now < until:
        watch, wants_look = hang.tick(watch, now, {rank: show(now)[0] for rank, show in enumerate(ranks)})
        if wants_look:
            looks += 1
            watch = hang.look(watch, now, {rank: show(now)[1] for rank, show in enumerate(ranks)})
            if hang.count_seconds(hang.measure(watch, now)) >= watch.timeout:
                return now, looks
        now += hang.count_pause(watch, now) + delay
    return None


def test_a_rank_that_is_stuck_and_ranks_that_wait_are_a_hang() -> None:
    """The verdict comes at most a tick after the timeout, and needs few looks."""
    found = find_verdict(still(WAITS), still(WAITS), still(LOADS))
    assert found is not None
    assert 60 <= found[0] <= 62
    assert found[1] <= 6


def test_the_verdict_counts_from_the_last_sign() -> None:
    """Output of one rank is progress of the job."""
    found = find_verdict(still(WAITS), lambda now: (Signs((min(int(now), 100),), 0.0), LOADS))
    assert found is not None
    assert 160 <= found[0] <= 162.5


@pytest.mark.parametrize("last", [100.0, 100.15, 100.3, 100.45, 100.59])
def test_the_verdict_comes_soon_after_the_timeout(last: float) -> None:
    """It is late by a tick: the other nodes' answers and the looks themselves have to fit into the rest of the 2 s."""
    found = find_verdict(still(WAITS), writes_until(last))
    assert found is not None
    assert 60 <= found[0] - last <= 60.81


@pytest.mark.parametrize("last", [100.0, 100.15, 100.3, 100.45, 100.79])
def test_the_verdict_about_a_spinning_wait_comes_soon_after_the_timeout(last: float) -> None:
    """The processor time of a rank whose collective is open does not make the verdict later."""
    busy = replace(WAITS, is_open=True, is_running=True)
    found = find_verdict(lambda now: (Signs((round(min(now, last) * 1e6),), now), replace(busy, cpu=now)))
    assert found is not None
    assert 60 <= found[0] - last <= 60.81


@pytest.mark.parametrize("delay", [1e-6, 3e-4, 2e-3])
@pytest.mark.parametrize("timeout", [1.0, 3.0, 4.9, 10.0, 60.0, 300.0, pytest.param(3600.0, marks=pytest.mark.long)])
def test_the_verdict_comes_soon_after_every_timeout(timeout: float, delay: float) -> None:
    """Late ticks add up in a long timeout; 1.15 s stay for the looks and the answers of other nodes."""
    for last in (2.0, 2.26, 2.49):
        found = find_verdict(still(WAITS), writes_until(last), timeout=timeout, until=timeout + 10, delay=delay)
        assert found is not None
        assert timeout <= found[0] - last <= timeout + 0.85


@pytest.mark.parametrize(
    "show",
    [
        lambda now: (Signs((0,), 0.0), replace(LOADS, stack=f"line {int(now / 20)}")),
        lambda now: (Signs((0,), 0.0), replace(LOADS, collectives=f"{int(now / 20)}")),
        lambda now: (Signs((0,), 0.0), replace(LOADS, moved=int(now * 1e6), children_cpu=now)),
        lambda now: (Signs((int(now / 40),), 0.0), LOADS),
    ],
    ids=["stacks", "collectives", "bytes", "output"],
)
def test_one_rank_with_progress_is_enough(show: Callable[[float], tuple[Signs, Look]]) -> None:
    """Evaluation, a checkpoint, compilation and loading on one rank are no hang of the ranks that wait for it."""
    assert find_verdict(still(WAITS), still(WAITS), show) is None


@pytest.mark.parametrize(
    "show",
    [
        lambda now: (Signs((0,), 0.0), replace(LOADS, children_cpu=now / 2)),
        lambda _: (Signs((0,), 0.0), replace(LOADS, has_running_child=True)),
    ],
    ids=["children", "starved child"],
)
def test_children_that_compute_for_ever_are_a_hang_after_longer(show: Callable[[float], tuple[Signs, Look]]) -> None:
    """A data loader in an endless loop is found after ten timeouts, while another rank waits."""
    found = find_verdict(still(WAITS), still(WAITS), show)
    assert found is not None
    assert 600 <= found[0] <= 602
    assert find_verdict(show, show) is None


def test_processor_time_is_progress_where_no_other_rank_waits() -> None:
    """A long computation at one line is no hang."""
    assert find_verdict(spins(COMPUTES), spins(COMPUTES)) is None
    assert find_verdict(spins(COMPUTES), still(LOADS)) is None


def test_a_main_thread_that_wakes_up_often_is_progress() -> None:
    """It takes pieces of a file from a network; a loop that polls is none."""
    assert find_verdict(lambda now: (Signs((0,), 0.0), replace(LOADS, wakes=int(now * 50)))) is None
    assert find_verdict(lambda now: (Signs((0,), 0.0), replace(LOADS, wakes=int(now * 10)))) is not None


def test_a_gpu_that_computes_is_progress_unless_the_rank_waits() -> None:
    """The main thread sleeps until the GPU is done; a GPU on which NCCL waits is busy, too."""
    assert find_verdict(still(replace(COMPUTES, is_gpu_busy=True)), still(LOADS)) is None
    for look in (WAITS, replace(COMPUTES, is_open=True)):
        found = find_verdict(still(replace(look, is_gpu_busy=True)), still(LOADS))
        assert found is not None
        assert found[0] <= 62


def test_a_gpu_that_is_busy_beside_a_rank_that_waits_is_a_hang_after_longer() -> None:
    """It may be the wait of a collective that no stack shows."""
    found = find_verdict(still(replace(COMPUTES, is_gpu_busy=True)), still(WAITS))
    assert found is not None
    assert 600 <= found[0] <= 602


def test_a_spinning_wait_that_the_recorder_knows_is_a_hang_at_once() -> None:
    """NCCL waits with a whole processor, in whatever function needs the result."""
    found = find_verdict(spins(replace(COMPUTES, is_open=True, collectives="5")), still(LOADS))
    assert found is not None
    assert found[0] <= 62


def test_a_spinning_wait_that_nobody_knows_is_a_hang_after_longer() -> None:
    """Ten times the timeout, and only while another rank waits."""
    found = find_verdict(spins(COMPUTES), still(WAITS))
    assert found is not None
    assert 600 <= found[0] <= 602
    found = find_verdict(spins(WAITS), spins(WAITS))
    assert found is not None
    assert 600 <= found[0] <= 602
    assert find_verdict(spins(WAITS)) is None


def test_what_the_children_of_a_waiting_rank_do_is_no_progress() -> None:
    """A service beside the training sends its metrics for ever."""
    assert (
        find_verdict(lambda now: (Signs((0,), 0.0), replace(WAITS, children_cpu=now, moved=int(now * 1e6)))) is not None
    )


def test_a_recorder_that_does_not_answer_is_no_progress() -> None:
    """An unknown number of collectives is neither the same nor another one."""
    assert find_verdict(lambda now: (Signs((0,), 0.0), replace(LOADS, collectives="5" if now < 30 else ""))) is not None


def test_an_observer_that_was_away_begins_anew() -> None:
    """A job that was suspended together with its launcher does not hang."""
    watch, _ = hang.tick(HangWatch(60.0), 0.0, {0: Signs((0,), 0.0)})
    watch, _ = hang.tick(watch, 1.0, {0: Signs((0,), 0.0)})
    watch = hang.look(watch, 1.0, {0: LOADS})
    watch, wants_look = hang.tick(watch, 100.0, {0: Signs((0,), 0.0)})
    assert not wants_look
    assert hang.count_seconds(hang.measure(watch, 100.0)) == 0


def test_a_worker_that_has_ended_does_not_count() -> None:
    """Its end is a sign; the others are judged without it."""
    watch, _ = hang.tick(HangWatch(60.0), 0.0, {0: Signs((0,), 0.0), 1: Signs((0,), 0.0)})
    watch, _ = hang.tick(watch, 0.8, {0: Signs((0,), 0.0), 1: Signs((0,), 0.0)})
    watch = hang.look(watch, 0.8, {0: LOADS, 1: WAITS})
    watch, wants_look = hang.tick(watch, 1.6, {0: Signs((0,), 0.0)})
    assert not wants_look
    assert hang.measure(watch, 1.6) == {0: Stillness(LOADS.place, waits=False, same=1.6, idle=1.6)}
    assert hang.measure(replace(watch, ranks={}), 2.0)[0].same == 0
    assert hang.count_seconds({}) == 0


def test_looks_are_few_where_ranks_compute_in_turns() -> None:
    """A change of the ranks that compute brings a look, but not more than so many in a timeout."""
    looks = 0
    watch = HangWatch(640.0)
    for now in range(640):
        cpu = float(now // 2)
        watch, wants_look = hang.tick(watch, float(now), {0: Signs((0,), cpu)})
        if wants_look:
            looks += 1
            watch = hang.look(watch, float(now), {0: replace(COMPUTES, stack=str(now))})
    assert 20 < looks <= 64


def test_a_rank_that_has_moved_since_the_look_before_is_still_from_this_look_on() -> None:
    """It may have moved just now. It is still from the tick before on only if that tick showed what it did."""
    watch, _ = hang.tick(HangWatch(8.0), 0.0, {0: Signs((0,), 0.0)})

    def look_at(now: float, look: Look, cpu: float) -> float:
        nonlocal watch
        watch, _ = hang.tick(watch, now, {0: Signs((0,), cpu)})
        watch = hang.look(watch, now, {0: look})
        return hang.measure(watch, now)[0].idle

    assert look_at(0.8, LOADS, 0.0) == 0.8
    assert look_at(2.8, replace(LOADS, stack="b"), 0.0) == 0
    assert look_at(4.8, replace(LOADS, stack="c"), 1.0) == 0
    assert look_at(5.6, replace(LOADS, stack="d", is_running=True), 1.0) == 0
    assert look_at(7.6, replace(LOADS, stack="e"), 2.0) == 0
    assert look_at(8.4, replace(LOADS, stack="f"), 2.0) == 0
    assert look_at(9.2, LOADS, 3.0) == 0
    watch, _ = hang.tick(watch, 10.0, {0: Signs((0,), 4.0)})
    assert look_at(10.8, replace(LOADS, stack="g"), 4.0) == pytest.approx(0.8)


def moves_after(pause: float, begin: float) -> Callable[[float], tuple[Signs, Look]]:
    """Return a rank that goes to another place after each pause, and gives no sign."""
    return lambda now: (Signs((0,), 0.0), replace(LOADS, stack=f"line {(now + begin) // pause}"))


@pytest.mark.parametrize("timeout", [5.0, 10.0, 60.0])
@pytest.mark.parametrize("begin", [0.0, 0.1, 0.5, 1.1, 2.3])
def test_a_rank_that_moves_before_the_timeout_is_no_hang(timeout: float, begin: float) -> None:
    """However shortly before: no verdict names more seconds than have passed since the last progress."""
    assert find_verdict(still(WAITS), moves_after(0.99 * timeout, begin * timeout), timeout=timeout) is None


def test_a_tick_that_is_late_makes_no_rank_still() -> None:
    """The agent was stopped for three seconds: what the ranks did meanwhile is unknown."""
    watch, _ = hang.tick(HangWatch(10.0), 0.0, {0: Signs((0,), 0.0)})
    watch, wants_look = hang.tick(watch, 3.0, {0: Signs((0,), 0.0)})
    assert wants_look
    assert hang.measure(hang.look(watch, 3.0, {0: LOADS}), 3.0)[0].idle == pytest.approx(0.8)


def test_a_hang_is_told_once() -> None:
    """As long as all stay where they are; when one of them moves, the next hang is told again."""
    watch, _ = hang.tick(HangWatch(8.0), 0.0, {0: Signs((0,), 0.0)})
    for now in range(1, 12):
        watch, wants_look = hang.tick(watch, float(now), {0: Signs((0,), 0.0)})
        watch = hang.look(watch, float(now), {0: LOADS}) if wants_look else watch
    watch = hang.tell(watch)
    assert hang.look(watch, 12.0, {0: LOADS}).told is not None
    assert hang.look(watch, 12.0, {0: replace(LOADS, collectives="5")}).told is not None
    assert hang.look(watch, 12.0, {0: replace(LOADS, stack="line 42")}).told is None
    assert hang.look(watch, 12.0, {0: LOADS, 1: LOADS}).told is None


def test_auto_finds_a_hang() -> None:
    """While no rank makes progress, the timeout stays the same."""
    found = find_verdict(still(WAITS), writes_until(10.0), timeout=0.0)
    assert found is not None
    assert hang.FLOOR <= found[0] - 10 <= hang.FLOOR + 0.85


def test_auto_learns_the_longest_stillness() -> None:
    """Ten times what has ended by itself, by output or by another stack, and never less than the floor."""
    watch, now = HangWatch(0.0), 0.0
    assert watch.timeout == hang.FLOOR
    for line in range(3):
        for _ in range(100):
            watch, wants_look = hang.tick(watch, now, {0: Signs((line,), 0.0)})
            watch = hang.look(watch, now, {0: LOADS}) if wants_look else watch
            now += 1
    assert 980 <= watch.timeout <= 1000
    watch = hang.look(watch, now + 99, {0: replace(LOADS, stack="other")})
    assert watch.timeout > 1900


def _document(
    host: str, rank: int, look: Look, *, same: float, round_number: int = 3, timeout: float = 60.0, age: float = 0.0
) -> Document:
    still = Stillness(look.place, waits=look.waits, same=same, idle=same)
    worker = describe_rank(rank, still, pid=100 + rank, local_rank=0)
    place = {"round_id": "3/1/a", "round_nodes": 2}
    return {"host": host, "pid": 1, "round": round_number, "timeout": timeout, "age": age, "workers": [worker], **place}


def test_the_ranks_of_all_nodes_are_one_job() -> None:
    """The node that reports the shortest stillness decides; what it reports comes back as it was."""
    found = join_nodes(
        [_document("a", 0, WAITS, same=90.0), _document("b", 1, LOADS, same=70.0, timeout=65.0)],
        expected=2,
        round_number=3,
    )
    assert (found.seconds, found.timeout, found.without) == (70.0, 65.0, ())
    assert found.ranks[1] == Stillness(LOADS.place, waits=False, same=70.0, idle=70.0)
    assert found.owners[1] == Owner("b", 101, 0)
    assert is_sound(_document("a", 0, WAITS, same=1.0), NODE_STATUS_HANG)
    assert not is_sound({**_document("a", 0, WAITS, same=1.0), "timeout": "soon"}, NODE_STATUS_HANG)


@pytest.mark.parametrize(
    ("other", "left"),
    [
        (_document("b", 1, LOADS, same=45.0, age=12.0), 3.0),
        (_document("b", 1, LOADS, same=45.0, age=16.0), -1.0),
        (_document("b", 1, LOADS, same=90.0, round_number=2), 60.0),
        (_document("b", 1, LOADS, same=90.0, timeout=NOT_YET), 60.0),
    ],
    ids=["later", "look is due", "other round", "not yet"],
)
def test_a_node_tells_how_soon_its_ranks_may_be_still_for_the_timeout(other: Document, left: float) -> None:
    """Its last look is older than its answer; the job is judged by the look, and again when that may change."""
    found = join_nodes([_document("a", 0, WAITS, same=90.0), other], expected=2, round_number=3)
    assert found.seconds < 60.0
    assert found.left == left
    assert join_nodes([other], expected=2, round_number=3).left == 0


@pytest.mark.parametrize(
    "documents",
    [
        [_document("a", 0, WAITS, same=90.0)],
        [_document("a", 0, WAITS, same=90.0), _document("b", 1, LOADS, same=90.0, round_number=2)],
        [_document("a", 0, WAITS, same=90.0), _document("b", 1, LOADS, same=90.0, timeout=NOT_YET)],
        [_document("a", 0, WAITS, same=90.0), _document("b", 1, LOADS, same=90.0, timeout=NO_DETECTION)],
    ],
    ids=["missing", "other round", "not yet", "no detection"],
)
def test_a_job_of_which_a_node_does_not_tell_is_not_judged(documents: list[Document]) -> None:
    """It may make progress; a node without the flag is named."""
    found = join_nodes(documents, expected=2, round_number=3)
    assert found.seconds == 0
    assert found.without == (("b",) if documents[-1]["timeout"] == NO_DETECTION else ())

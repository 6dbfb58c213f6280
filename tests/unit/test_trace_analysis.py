"""Dumps of the flight recorder say which rank did not join which collective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.cli.commands.trace import run_trace
from elastic_run.diagnosis import trace_findings as kinds
from elastic_run.diagnosis.dumps import COMPLETED, OPEN, RETIRED, STARTED, Collective, Dump, find_dumps
from elastic_run.diagnosis.trace_analysis import analyse
from elastic_run.diagnosis.trace_findings import detail_lines, first_line
from elastic_run.notices import UsageError

if TYPE_CHECKING:
    from typing import Any

    from elastic_run.diagnosis.trace_findings import Analysis

DATA = Path(__file__).parents[1] / "data" / "flight_recorder"
WORLD = {"0": (0, 1, 2, 3)}
NESTED = {**WORLD, "1": (0, 1), "2": (2, 3)}


def call(
    operation: str = "all_reduce",
    number: int = 1,
    state: str = COMPLETED,
    group: str = "0",
    **more: Any,
) -> Collective:
    """Return a collective."""
    sizes = more.pop("sizes", ((4,),))
    return Collective(
        record=more.pop("record", 0),
        group=group,
        description="default_pg" if group == "0" else more.pop("description", ""),
        sequence=number,
        operation=operation,
        state=state,
        input_sizes=sizes,
        output_sizes=more.pop("outputs", sizes),
        input_types=(more.pop("type", "Float"),),
        **more,
    )


def dumps(*calls: list[Collective] | None, members: dict[str, tuple[int, ...]] | None = None) -> list[Dump]:
    """Return the dumps of ranks 0, 1 and so on; None for a rank without one."""
    return [
        Dump(rank, tuple(own), dict(WORLD if members is None else members))
        for rank, own in enumerate(calls)
        if own is not None
    ]


def of(scenario: str) -> Analysis:
    """Return the analysis of recorded dumps."""
    return analyse(find_dumps([str(DATA / scenario)]).dumps)


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        (
            "missing_rank",
            "rank 3 did not join all_reduce number 4 of group 'default', in which ranks 0-2 wait (make.py:77)",
        ),
        # torch 2.11 with NCCL 2.28.9; of a kernel that has not begun it knows with TORCH_NCCL_ENABLE_TIMING=1 only.
        (
            "nccl_missing_rank",
            "rank 1 did not join all_reduce number 2 of group 'default', in which rank 0 waits (hang.py:62)",
        ),
        (
            "nccl_not_started",
            (
                "rank 1 called all_reduce number 2 of group 'default', but the GPU of rank 1 has not begun it: "
                "an earlier kernel hangs there; rank 0 waits"
            ),
        ),
        ("nccl_timeout", "rank 1 did not join all_reduce number 2 of group 'default', in which rank 0 waits"),
        (
            "nccl_other_operation",
            "rank 1 calls broadcast as collective number 2 of group 'default', rank 0 calls all_reduce",
        ),
        (
            "nccl_other_size",
            (
                "rank 1 calls all_reduce of [16777216] as collective number 2 of group 'default', "
                "rank 0 calls all_reduce of [4]"
            ),
        ),
        (
            "missing_in_subgroup",
            "rank 3 did not join all_reduce number 2 of group 'default', in which ranks 0-1 wait (make.py:87)",
        ),
        (
            "other_operation",
            "rank 1 calls broadcast as collective number 2 of group 'default', ranks 0, 2-3 call all_reduce",
        ),
        (
            "other_size",
            (
                "rank 2 calls all_reduce of [1000000] as collective number 2 of group 'default', "
                "ranks 0, 3 call all_reduce of [4]"
            ),
        ),
        (
            "other_order",
            (
                "rank 1 waits in all_reduce number 1 of group 'one' (make.py:113); "
                "the dumps do not list that group's ranks"
            ),
        ),
        ("all_joined", ""),
    ],
)
def test_recorded_dumps(scenario: str, text: str) -> None:
    """Dumps of real gloo ranks name the cause."""
    assert first_line(of(scenario)) == text


def test_a_rank_that_did_not_join() -> None:
    """The rank whose count is lower is the cause, with its last collective and how far it is behind."""
    joined = [call(number=1), call("broadcast", 2, RETIRED), call(number=3, state=OPEN, where="train.py:88 in step")]
    late = [call(number=1, where="train.py:41 in load")]
    found = analyse(dumps(joined, joined, joined, late))
    (finding,) = found.findings
    assert first_line(found) == "rank 3 had not yet joined broadcast number 2 of group 'default'; no rank waited in it"
    assert finding.kind == kinds.BEHIND
    found = analyse(dumps(joined[:1] + joined[2:], joined[:1] + joined[2:], joined[:1] + joined[2:], late))
    assert first_line(found) == (
        "rank 3 did not join all_reduce number 3 of group 'default', in which ranks 0-2 wait (train.py:88)"
    )
    assert detail_lines(found.findings[0]) == [
        "rank 3's last: all_reduce number 1 of group 'default', at train.py:41 in load, 2 collectives behind"
    ]


def test_a_rank_that_called_nothing() -> None:
    """A rank whose recorder is empty joined nothing."""
    found = analyse(dumps([call(state=OPEN)], [call(state=OPEN)], []))
    assert first_line(found).startswith("rank 2 did not join all_reduce number 1")
    assert detail_lines(found.findings[0]) == ["rank 2 called no collective at all"]


def test_a_ring_that_has_lost_its_beginning_proves_nothing() -> None:
    """A rank whose ring holds no collective of the group any more is not taken for one that did not join."""
    full = [call(number=7, group="1", record=90)]
    members = {**WORLD, "1": (0, 1)}
    found = analyse(dumps([call(state=OPEN, record=5)], full, full, full, members=members))
    assert all(finding.kind != kinds.NOT_JOINED or finding.group != "0" for finding in found.findings)


def test_of_nested_groups_the_innermost_is_the_cause() -> None:
    """Ranks that miss the outer collective because they wait in the inner group are no cause."""
    outer = call(number=5, state=OPEN)
    found = analyse(
        dumps(
            [call(number=4), outer],
            [call(number=4), outer],
            [call(number=4), call(number=9, state=OPEN, group="2", description="tp", where="layer.py:7 in forward")],
            [call(number=4), call(number=8, group="2", description="tp")],
            members=NESTED,
        )
    )
    assert first_line(found) == (
        "rank 3 did not join all_reduce number 9 of group 'tp', in which rank 2 waits (layer.py:7)"
    )
    assert [(finding.group, finding.ranks) for finding in found.findings] == [("2", (3,)), ("0", (3,))]


def test_a_group_that_only_waits_for_another_follows_from_it() -> None:
    """Where all that miss a collective wait elsewhere, it is listed among the consequences."""
    found = analyse(
        dumps(
            [call(number=4), call(number=5, state=OPEN)],
            [call(number=4), call(number=3, state=OPEN, group="1")],
            [call(number=4), call(number=5, state=OPEN)],
            [call(number=4), call(number=5, state=OPEN)],
            members={**WORLD, "1": (0, 1)},
        )
    )
    # Rank 0 is missing in group 1 while it waits in group 0, and rank 1 the other way round.
    assert first_line(found) == (
        "ranks 0-1 wait for each other in different groups: rank 1 waits in all_reduce number 3 of group '1', "
        "ranks 0, 2-3 wait in all_reduce number 5 of group 'default'"
    )


def test_the_rank_that_left_the_order_of_its_group_is_named() -> None:
    """Where three of four ranks of the inner group wait in it, and the fourth in the outer one, that one is named."""
    inner = call(number=4, state=OPEN, group="1")
    found = analyse(
        dumps(
            [call(number=1), call(number=3, group="1"), inner],
            [call(number=1), call(number=3, group="1"), call(number=2, state=OPEN)],
            [call(number=1), call(number=3, group="1"), inner],
            [call(number=1), call(number=3, group="1"), inner],
            members={**WORLD, "1": (0, 1, 2, 3)},
        )
    )
    assert [(finding.kind, finding.ranks) for finding in found.findings] == [(kinds.DIFFERENT_ORDER, (1,))]
    assert first_line(found) == (
        "rank 1 did not join all_reduce number 4 of group '1', in which ranks 0, 2-3 wait: "
        "rank 1 waits in all_reduce number 2 of group 'default'"
    )


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (call("all_gather", 2, OPEN), "rank 2 calls all_gather as collective number 2 of group 'default', "),
        (call(number=2, state=OPEN, sizes=((5,),)), "rank 2 calls all_reduce of [5] as collective number 2 of"),
        (call(number=2, state=OPEN, type="Half"), "rank 2 calls all_reduce of Half as collective number 2 of"),
    ],
)
def test_different_calls(odd: Collective, text: str) -> None:
    """The rank that differs from most is named, with what differs."""
    usual = [call(), call(number=2, state=OPEN)]
    found = analyse(dumps(usual, usual, [call(), odd], usual))
    assert first_line(found).startswith(text)
    assert found.findings[0].ranks == (2,)


def test_a_rank_that_waits_for_nobody() -> None:
    """A collective of a group of one rank, or one that has ended, is no wait for ranks that the dump does not list."""
    assert analyse(dumps([call(state=OPEN)], members={"0": (0,)})).findings == ()
    assert analyse(dumps([call()], members={})).findings == ()


def test_a_tie_names_both_sides() -> None:
    """Of two ranks that differ, neither is the cause."""
    found = analyse(dumps([call("broadcast", state=OPEN)], [call(state=OPEN)], members={"0": (0, 1)}))
    assert found.findings[0].ranks == (0, 1)
    assert first_line(found) == (
        "rank 1 calls all_reduce as collective number 1 of group 'default', rank 0 calls broadcast"
    )


@pytest.mark.parametrize("operation", ["all_to_all", "scatter", "gather", "barrier", "ALLGATHER_coalesced"])
def test_sizes_that_may_differ(operation: str) -> None:
    """Operations whose sizes differ by right are no finding."""
    found = analyse(dumps([call(operation)], [call(operation, sizes=((8,), (4,)))], members={"0": (0, 1)}))
    assert found.findings == ()


def test_coalesced_calls_are_compared_one_by_one() -> None:
    """Calls under one number are compared in their order."""
    usual = [call("broadcast"), call("broadcast", record=1), call("coalesced", record=2, state=OPEN)]
    odd = [call("broadcast"), call("reduce", record=1), call("coalesced", record=2, state=OPEN)]
    found = analyse(dumps(usual, usual, odd, usual))
    assert first_line(found).startswith("rank 2 calls reduce as collective number 1")
    assert analyse(dumps(usual, usual, usual, usual)).findings[0].kind == kinds.UNFINISHED


def test_groups_of_one_name_are_told_apart_by_their_ranks() -> None:
    """Where two subgroups have one name, the ranks that the dumps list tell them apart."""
    inner = [call(number=1, group="1", state=OPEN)]
    members: list[dict[str, tuple[int, ...]]] = [{"1": (0, 1)}, {"1": (0, 1)}, {"1": (2, 3)}, {"1": (2, 3)}]
    ranks = [Dump(rank, tuple(inner if rank != 3 else ()), members[rank]) for rank in range(4)]
    found = analyse(ranks)
    assert found.findings[0].ranks == (3,)
    assert found.findings[0].members == (2, 3)


def test_a_rank_without_dump_is_named_as_such() -> None:
    """Where all that have a dump wait, the rank without one is named, not accused."""
    found = analyse(dumps([call(state=OPEN)], [call(state=OPEN)], [call(state=OPEN)], None))
    assert first_line(found) == ("ranks 0-2 wait in all_reduce number 1 of group 'default'; there is no dump of rank 3")
    assert found.absent == (3,)
    assert analyse(dumps([call()], [call()], [call()], None)).findings == ()


def test_a_gpu_that_has_not_begun() -> None:
    """All called it, and one rank's kernel has not started: its GPU is held up by an earlier one."""
    found = analyse(
        dumps(*([[call(state=STARTED)]] * 3), [call(state=OPEN)]),
    )
    assert first_line(found).startswith("rank 3 called all_reduce number 1 of group 'default', but the GPU of rank 3")


def test_send_without_recv() -> None:
    """A send that waits names the rank that has no recv open, and a send whose partner receives is none."""
    send = call("send", 1, OPEN, source=0, target=1, where="pipe.py:9 in f", group="0")
    receive = call("recv", 1, OPEN, source=0, target=1, group="0")
    found = analyse(dumps([send], [], members={"0": (0, 1)}))
    assert first_line(found) == (
        "rank 1 did not call recv from rank 0 in group 'default': rank 0 waits in send to rank 1 (pipe.py:9)"
    )
    assert analyse(dumps([send], [receive], members={"0": (0, 1)})).findings == ()
    assert first_line(analyse(dumps([], [receive], members={"0": (0, 1)}))).startswith("rank 0 did not call send to")
    assert analyse(dumps([send], None, members={"0": (0, 1)})).findings[0].kind == kinds.NO_DUMP


def test_a_recv_from_any_rank_is_not_compared() -> None:
    """It takes any send to its rank, and one that waits alone accuses nobody."""
    either = call("recv", 1, OPEN, target=2, where="pipe.py:7 in f")
    sends = [call("send", 1, OPEN, source=1, target=2, record=number) for number in range(2)]
    three: dict[str, tuple[int, ...]] = {"0": (0, 1, 2)}
    for sent in range(3):
        assert analyse(dumps([], sends[:sent], [either], members=three)).findings == ()


def test_the_command_prints_one_screen(capfd: pytest.CaptureFixture[str]) -> None:
    """`elastic-run trace DIR` begins with the cause and ends with what was read."""
    assert run_trace([str(DATA / "missing_rank")]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines == [
        "cause    rank 3 did not join all_reduce number 4 of group 'default', in which ranks 0-2 wait",
        "         (make.py:77)",
        "         rank 3's last: all_reduce number 3 of group 'default', at make.py:75 in _missing_rank",
        "dumps    4 dumps read, of ranks 0-3",
    ]


def test_the_command_prints_json(capfd: pytest.CaptureFixture[str]) -> None:
    """`--json` prints one document with the same findings."""
    assert run_trace(["--json", str(DATA / "missing_rank")]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["findings"][0]["ranks"] == [3]
    assert document["findings"][0]["waiting"] == [0, 1, 2]
    assert document["ranks"] == [0, 1, 2, 3]


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    """A path that is not there, a directory without dumps and a damaged dump are refused in one line each."""
    for text, paths in (
        ("No such file", [str(tmp_path / "none")]),
        ("no dump of a flight recorder in", [str(tmp_path)]),
    ):
        with pytest.raises(UsageError, match=text):
            run_trace(paths)
    (tmp_path / "rank_0").write_bytes(b"\x80\x02}")
    with pytest.raises(UsageError, match="rank_0': left out: it is cut short or damaged"):
        run_trace([str(tmp_path)])

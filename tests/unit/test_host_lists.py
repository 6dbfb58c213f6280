"""Lists of host names: which names are folded, and into what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_run.core.job.short_lists import fold_clauses, fold_hosts, list_hosts
from elastic_run.schedulers.slurm_variables import parse_nodelist


def test_a_few_names_are_listed_one_by_one() -> None:
    """Up to eight names stay as they are, in the order of joining."""
    assert list_hosts(["node3", "node1", "node2"]) == ("node3", "node1", "node2")
    assert list_hosts(list("abcdefgh")) == tuple("abcdefgh")


def test_more_names_are_folded() -> None:
    """A line of many nodes shows all of them, so that a reader sees which number is missing."""
    hosts = [f"node{number}" for number in range(32) if number not in {7, 30}]
    assert list_hosts([*reversed(hosts), "login"]) == ("node[0-6,8-29,31]", "login")


@pytest.mark.parametrize(
    ("hosts", "folded"),
    [
        (["n08", "n09", "n10", "n11"], "n[08-11]"),
        (["n8", "n9", "n10", "n08"], "n[8-9,08,10]"),
        (["n99", "n098", "n100"], "n[99,098,100]"),
        (["gpu1.a.org", "gpu2.a.org", "gpu2.b.org"], "gpu[1-2].a.org, gpu2.b.org"),
        (["ip-10-0-1-7", "ip-10-0-1-8", "ip-10-0-2-9"], "ip-10-0-1-[7-8], ip-10-0-2-9"),
        (["a1x", "a2x", "a", "a", "b"], "a[1-2]x, a, b"),
        (["vm"] * 64, "vm"),
        ([f"job{'1' * 30}{number}" for number in range(3)], f"job{'1' * 22}[111111110-111111112]"),
    ],
)
def test_folded_names(hosts: list[str], folded: str) -> None:
    """Leading zeros stay, a domain stays behind the number, and each name comes once."""
    assert ", ".join(fold_hosts(hosts)) == folded


def test_a_line_stays_short() -> None:
    """Names that can't be folded, and numbers that don't follow each other, are cut, and a sign says so."""
    assert fold_hosts([f"{letter}x" for letter in "abcdefghi"])[-2:] == ("hx", "…")
    odd = fold_hosts(f"node{number}" for number in range(1, 1000, 2))
    assert odd == (f"node[{','.join(str(number) for number in range(1, 49, 2))}]", "…")
    assert fold_hosts([*(f"n{number}" for number in range(0, 48, 2)), "x"])[-1] == "…"


@given(st.sets(st.integers(0, 120), min_size=1, max_size=20), st.integers(1, 3))
def test_slurm_reads_a_folded_name_as_the_same_names(numbers: set[int], width: int) -> None:
    """A user can copy the list into srun -w."""
    hosts = {f"node{str(number).zfill(width)}" for number in numbers}
    assert set(parse_nodelist(",".join(fold_hosts(hosts)))) == hosts


def test_hosts_of_one_reason_become_one_clause() -> None:
    """A few nodes have a clause each; of more nodes those with the same reason share a clause."""
    few = [("node1", "its agent died"), ("node2", "its agent died")]
    assert fold_clauses(few, 8) == ("node1 (its agent died)", "node2 (its agent died)")
    many = [(f"node{number}", "silent" if number == 5 else "its agent died") for number in range(9)]
    assert fold_clauses(many, 8) == ("node[0-4,6-8] (its agent died)", "node5 (silent)")
    assert fold_clauses([(f"n{number}", str(number)) for number in range(9)], 3) == ("n0 (0)", "n1 (1)", "…")

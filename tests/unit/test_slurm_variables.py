"""Values of Slurm's variables, and lists of host names."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_run.core.job.short_lists import fold_clauses, fold_hosts, list_hosts
from elastic_run.schedulers.slurm_variables import count_tasks, parse_nodelist, step_port


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("a", "a"),
        ("a,b", "a b"),
        ("a[1-3]", "a1 a2 a3"),
        ("a[01-03,7],b[1-2]-x[3,5],c", "a01 a02 a03 a7 b1-x3 b1-x5 b2-x3 b2-x5 c"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[007]", "n007"),
        ("r[1-2]c[1-2]n[0-1]", "r1c1n0 r1c1n1 r2c1n0 r2c1n1 r1c2n0 r1c2n1 r2c2n0 r2c2n1"),
        ("gpu-[1,3].site.example,login-1", "gpu-1.site.example gpu-3.site.example login-1"),
        ("[1-2]", "1 2"),
        ("b[2-1000]", " ".join(f"b{number}" for number in range(2, 1001))),
        (" a,b[1] ", "a b1"),
    ],
)
def test_a_list_names_its_nodes(text: str, nodes: str) -> None:
    """Ranges, lists, leading zeros and several brackets name each node once, in Slurm's order."""
    assert parse_nodelist(text) == tuple(nodes.split())


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ",", "a,", ",a", "a,,b", "a[", "a]", "a[1", "a[1]]", "a[[1]]", "a[]", "a[1,]", "a[1-]", "a[-1]"),
        *("a[3-1]", "a[x]", "a[1-b]", "a b", "a[1-2-3]", "a[1]b]", "a[0-99999999]", "a[0-9999]b[0-9999]", "a[٣]"),
    ],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    """A broken list is named in one line, with an example of a right one; none fills the memory."""
    with pytest.raises(ValueError, match=r"^'.*' is no Slurm node list, like a\[01-03,7\],b: .+$") as caught:
        parse_nodelist(text)
    assert repr(text) in str(caught.value)


_TEXT = st.text("abz-._", min_size=1, max_size=4)
_SPAN = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4))
_BRACKET = st.lists(_SPAN, min_size=1, max_size=3)
_NAME = st.lists(st.one_of(_TEXT, _BRACKET), min_size=1, max_size=3)


def write(piece: str | list[tuple[int, int, int]]) -> str:
    """Return a piece of a name as Slurm writes it."""
    if isinstance(piece, str):
        return piece
    spans = [(f"{first:0{width}}", first + more, width) for first, more, width in piece]
    return (
        "["
        + ",".join(first if int(first) == last else f"{first}-{last:0{width}}" for first, last, width in spans)
        + "]"
    )


def spell(piece: str | list[tuple[int, int, int]]) -> list[str]:
    """Return all that a piece stands for."""
    if isinstance(piece, str):
        return [piece]
    return [
        str(number).rjust(max(width, len(str(first))), "0")
        for first, more, width in piece
        for number in range(first, first + more + 1)
    ]


@given(st.lists(_NAME, min_size=1, max_size=3))
def test_whatever_is_written_is_read(names: list[list[str | list[tuple[int, int, int]]]]) -> None:
    """Every list that can be written stands for all combinations of its pieces, name by name."""
    text = ",".join("".join(map(write, name)) for name in names)
    expected = [sorted("".join(parts) for parts in itertools.product(*map(spell, name))) for name in names]
    found = list(parse_nodelist(text))
    for nodes in expected:
        assert sorted(found[: len(nodes)]) == nodes
        del found[: len(nodes)]
    assert found == []


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2,3", [1, 2, 3]), ("8(x2),4(x1)", [8, 8, 4])]
)
def test_tasks_are_counted_by_node(text: str, counts: list[int]) -> None:
    """Each node has the number of tasks that its place in the list says."""
    assert [count_tasks(text, node) for node in range(len(counts))] == counts


@pytest.mark.parametrize(("text", "node"), [("2", 1), ("2(x3),1", 4), ("", 0), ("x", 0), ("2(x)", 0)])
def test_a_node_without_tasks_is_an_error(text: str, node: int) -> None:
    """A list that says nothing of this node is named, and the node."""
    with pytest.raises(ValueError, match=rf"says nothing of node {node}$"):
        count_tasks(text, node)


def test_neighbours_take_other_ports() -> None:
    """Steps that may run side by side on a node differ in their ports, which no outgoing connection gets."""
    ports = [step_port(job, step) for job, step in itertools.product(range(3_999_990, 4_000_190), range(97))]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 10_000
    assert max(ports) < 32_768


# --- lists of host names ----------------------------------------------------------------------------------------------
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

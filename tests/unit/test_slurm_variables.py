"""Values of Slurm's variables: node lists are read as scontrol reads them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

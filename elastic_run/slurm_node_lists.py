"""Slurm's lists of nodes, such as ``a[01-03,7],b[1-2]-x[3,5],c``, and of their numbers of tasks, such as ``2(x3),1``.

Both the launcher (`cluster.slurm`) and training scripts (`worker.place`) read them, so this module imports nothing.

scontrol is often missing inside a container, and costs a process per worker where it isn't. The grammar: names are
separated by commas; a name is text with any number of brackets in it; a bracket holds numbers and ranges of numbers. A
range keeps the leading zeros of its first number. Of several brackets the last one counts fastest, and the others from
the first on: so does Slurm 22.05, whose scontrol a test asks. Text behind the last bracket, which it never writes, is
taken as well.
"""

from __future__ import annotations

import itertools
import math
import re

__all__ = ["count_tasks", "parse_nodelist"]

#: A name's pieces: a bracket with what is in it, or plain text.
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?", re.ASCII)
#: More than any cluster has, so that a broken list can't fill the memory.
_MOST_NODES = 1 << 20


def parse_nodelist(text: str) -> tuple[str, ...]:
    """Return the nodes that a list of Slurm names, in its order.

    Args:
        text: The value of SLURM_STEP_NODELIST or SLURM_JOB_NODELIST.

    Returns:
        The names of the nodes, at least one.

    Raises:
        ValueError: The text is no such list.
    """
    nodes = [node for name in _split_names(text) for node in _expand(name, text)]
    if len(nodes) > _MOST_NODES:
        raise _refusal(text, f"more than {_MOST_NODES} nodes")
    return tuple(nodes)


def count_tasks(text: str, node: int) -> int:
    """Return how many tasks of a Slurm step run on one of its nodes.

    Args:
        text: The value of SLURM_STEP_TASKS_PER_NODE, such as ``2(x3),1``: three nodes with two tasks, one with one.
        node: The node's number in the step, from 0.

    Raises:
        ValueError: The text is no such list, or has no such node.
    """
    left = node
    for item in text.split(","):
        match = _TASKS.fullmatch(item.strip())
        if match is None:
            break
        repeats = int(match[2] or 1)
        if left < repeats:
            return int(match[1])
        left -= repeats
    message = f"SLURM_STEP_TASKS_PER_NODE={text!r} says nothing of node {node}"
    raise ValueError(message)


def _split_names(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    names, depth = [""], 0
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if depth not in {0, 1}:
            raise _refusal(text, "brackets don't match")
        if character == "," and not depth:
            names.append("")
        else:
            names[-1] += character
    if depth:
        raise _refusal(text, "brackets don't match")
    if "" in names:
        raise _refusal(text, "a name is empty")
    return names


def _expand(name: str, text: str) -> list[str]:
    pieces: list[list[str]] = []
    end = last_bracket = 0
    for match in _PIECE.finditer(name):
        if match.start() != end:
            break
        end = match.end()
        last_bracket = last_bracket if match[1] is None else len(pieces)
        pieces.append([match[2]] if match[1] is None else _expand_bracket(match[1], text))
    if end != len(name):
        raise _refusal(text, f"{name[end:]!r} is not part of a name")
    if math.prod(map(len, pieces)) > _MOST_NODES:
        raise _refusal(text, f"more than {_MOST_NODES} nodes")
    return _combine(pieces, last_bracket)


def _combine(pieces: list[list[str]], last: int) -> list[str]:
    """Put the pieces together in Slurm's order, which is odd where there are more than two brackets."""
    order = [*range(last + 1, len(pieces)), *reversed(range(last)), last]  # the slowest first
    names = []
    for parts in itertools.product(*(pieces[place] for place in order)):
        by_place = dict(zip(order, parts, strict=True))
        names.append("".join(by_place[place] for place in range(len(pieces))))
    return names


def _expand_bracket(inner: str, text: str) -> list[str]:
    numbers = []
    for item in inner.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _refusal(text, f"{item!r} is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _refusal(text, f"the range {item} goes down")
        if int(last) - int(first) >= _MOST_NODES:
            raise _refusal(text, f"more than {_MOST_NODES} nodes")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _refusal(text: str, reason: str) -> ValueError:
    return ValueError(f"{text!r} is no Slurm node list, like a[01-03,7],b: {reason}")

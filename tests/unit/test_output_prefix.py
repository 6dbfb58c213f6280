"""The prefix template: what `string.Template.safe_substitute` makes of it, without importing that."""

from __future__ import annotations

import string

import pytest

from elastic_run import contract
from elastic_run.multiprocessing.output.prefix import render_prefix

VALUES = {"role_name": "trainer", "local_rank": 3, "rank": 11, "hostname": "node7", "restart_count": 2}


def render(template: str) -> bytes:
    """Render with the values above."""
    return render_prefix(template, role_name="trainer", local_rank=3, rank=11, hostname="node7", restart_count=2)


def test_default_template() -> None:
    """Without a template a line's prefix has role and rank, so that it is torchrun's where a job has one node."""
    assert render(contract.DEFAULT_PREFIX_TEMPLATE) == b"[trainer11]:"


@pytest.mark.parametrize(
    "template",
    [
        "",
        "[${rank}]:",
        "$rank/$hostname-$restart_count ",
        "${unknown}$unknown ${rank",
        "$$rank $${rank} $$$rank",
        "100$ $ $5 $-",
        "${} ${ rank} ${rank }",
        "$rankings $rank_ $rank-",
        "${role_name}${local_rank}",
        "größe ${rank} €$rank",
        "$ränk ${ränk}",
        "$",
        "$$",
        "a${rank}$",
    ],
)
def test_rules_are_those_of_string_template(template: str) -> None:
    """Every template gives what `string.Template.safe_substitute` gives."""
    assert render(template).decode() == string.Template(template).safe_substitute(VALUES)


def test_bytes_of_the_command_line_stay() -> None:
    """A template that is not valid UTF-8 comes out as the bytes that the user typed."""
    assert render(b"\xff${rank}".decode("utf-8", "surrogateescape")) == b"\xff11"

"""The README's picture of two reports."""

from __future__ import annotations

import socket
import sys
from xml.etree import ElementTree as ET

import pytest

from tests.benchmarks.recording import ROOT
from tests.benchmarks.report_picture import draw, last_lines

_OURS = ["-- elastic-run: train.py failed -- exit code 1 --", "         ValueError: loss is nan at step 3"]
_THEIRS = ["Traceback (most recent call last):", "  error_file: <N/A>", "x" * 200]


def _texts(svg: str) -> list[tuple[str, str]]:
    """Return class and text of each line."""
    found = [element for element in ET.fromstring(svg).iter() if element.tag.endswith("text")]  # noqa: S314
    return [(element.get("class", ""), element.text or "") for element in found]


@pytest.mark.parametrize("is_narrow", [True, False])
def test_both_reports_are_whole(is_narrow: bool) -> None:
    """Every letter of both reports is in the picture; the cause, and what stands for it, are emphasised."""
    texts = _texts(draw(_OURS, _THEIRS, is_narrow=is_narrow))
    assert "".join(text for kind, text in texts if kind != "title") == "".join([*_OURS, *_THEIRS])
    assert [text for kind, text in texts if kind == "line cause"] == [_OURS[1]]
    assert [text for kind, text in texts if kind == "line nothing"] == [_THEIRS[1]]


def test_the_last_lines_are_the_launchers() -> None:
    """Lines up to the workers' last one are left out; names of this machine are replaced."""
    launcher = f"failed on {socket.gethostname()}: {sys.prefix}/bin/python /tmp/x/train.py"
    lines = last_lines(f"first\r\n[rank0]: worker\r\n{launcher}\r\nlast \r\n", "/tmp/x/train.py")
    assert lines == ["failed on node1: /venv/bin/python /home/ada/train.py", "last"]


@pytest.mark.parametrize("name", ["report.svg", "report-phone.svg"])
def test_the_picture_of_the_readme_is_one_of_two_reports(name: str) -> None:
    """Each picture in the repository names the cause once, in elastic-run's part, and has a dark version."""
    svg = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
    assert [text.strip() for kind, text in _texts(svg) if kind == "line cause"] == ["ValueError: loss is nan at step 3"]
    assert "prefers-color-scheme:dark" in svg
    assert str(ROOT) not in svg


def test_the_picture_of_a_hang_names_the_rank() -> None:
    """The second picture says at which rank to look, and where that rank is."""
    svg = (ROOT / "docs" / "pictures" / "hang.svg").read_text(encoding="utf-8")
    emphasised = [text for kind, text in _texts(svg) if kind == "line cause"]
    assert "look at rank 3" in emphasised[0]
    assert "rank 3 is in load_batch (train.py:" in emphasised[1]
    assert "prefers-color-scheme:dark" in svg

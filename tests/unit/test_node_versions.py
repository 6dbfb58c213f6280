"""Nodes with different versions of torch: how the version is found, and when it is told."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import torch

from elastic_run.cluster.torch_devices import find_torch_version
from elastic_run.core.job.documents import NodeInfo
from elastic_run.core.job.round_steps import describe_versions

if TYPE_CHECKING:
    from pathlib import Path


def nodes(*versions: str) -> list[NodeInfo]:
    """Return nodes h0, h1, ... with these versions."""
    return [NodeInfo(f"h{number}", 1, 1, torch=version) for number, version in enumerate(versions)]


def test_equal_and_unknown_versions_are_not_told() -> None:
    """A node that does not tell its version is no other one."""
    assert describe_versions(nodes()) == ""
    assert describe_versions(nodes("2.13.0", "", "2.13.0")) == ""


def test_the_odd_one_is_named_first() -> None:
    """The fewest hosts come first; many hosts are folded."""
    told = describe_versions(nodes("2.13.0", "2.13.0", "2.4.0", "2.13.0", "2.13.0"))
    assert told == "torch 2.4.0 on h2; torch 2.13.0 on h[0-1,3-4]"
    assert len(describe_versions(nodes(*(f"{number}" * 99 for number in range(9))))) < 300


def test_the_version_is_that_of_the_torch_that_python_imports() -> None:
    """It is read from the file of the first torch on the path."""
    assert find_torch_version(sys.path) == str(torch.__version__)


def test_a_path_without_torch_and_a_file_without_version(tmp_path: Path) -> None:
    """Neither is an error."""
    assert find_torch_version([str(tmp_path)]) == ""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("debug = False\n", encoding="utf-8")
    assert find_torch_version(["/nowhere", str(tmp_path)]) == ""
    assert re.fullmatch(r"[\d.]+\S*", find_torch_version(sys.path))

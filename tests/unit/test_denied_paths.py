"""Which part of a path denies access; who may do what is given, since root may do all."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from elastic_run.files import explain_denial

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a directory with data/private/model.pt in it."""
    (tmp_path / "data" / "private").mkdir(parents=True)
    (tmp_path / "data" / "private" / "model.pt").touch(0o600)
    (tmp_path / "data" / "private").chmod(0o700)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "denied", "expected"),
    [
        (
            "data/private/model.pt",
            {("data/private", os.X_OK)},
            r"a directory \(drwx------ \w+\) may not be entered: '{}/data/private'",
        ),
        (
            "data/private/model.pt",
            {("data", os.X_OK), ("data/private", os.X_OK)},
            r"a directory \(d\S+ \w+\) may not be entered: '{}/data'",
        ),
        (
            "data/private/model.pt",
            {("data/private/model.pt", os.W_OK)},
            r"the file \(-rw------- \w+\) may not be written: '{}/data/private/model.pt'",
        ),
        ("data/new.pt", {("data", os.W_OK)}, r"nothing may be created in a directory \(d\S+ \w+\): '{}/data'"),
        ("data/new.pt", set(), None),
        ("data/private/model.pt", set(), None),
        ("data/private/model.pt/x", set(), None),
        ("data/missing/model.pt", {("data", os.W_OK)}, None),
    ],
)
def test_the_part_that_denies_is_named(
    path: str, denied: set[tuple[str, int]], expected: str | None, tree: Path
) -> None:
    """The first directory on the way that may not be entered, else the file, else its directory."""

    def access(name: str, mode: int) -> bool:
        return (os.path.relpath(name, tree), mode) not in denied

    said = explain_denial(f"[Errno 13] Permission denied: '{tree / path}'", access)
    if expected is None:
        assert said == ""
    else:
        assert re.fullmatch(expected.replace("{}", re.escape(str(tree))), said)


@pytest.mark.parametrize("message", ["", "[Errno 13] Permission denied", "no path: 'x'"])
def test_a_message_without_a_path_names_nothing(message: str) -> None:
    """Nothing is guessed."""
    assert explain_denial(message) == ""

"""Whose code has raised an exception: ours, with what it calls, or a plug-in's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from elastic_run import notices

if TYPE_CHECKING:
    from collections.abc import Callable

_PLUGIN = "/venv/lib/python3.11/site-packages/our_plugin/handlers.py"
_OURS = f"{notices._ROOT}run.py"
_JSON = f"{notices._STANDARD_LIBRARY}json/decoder.py"
_URLLIB3 = "/venv/lib/python3.11/site-packages/urllib3/connection.py"


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([_OURS], ""),
        ([_OURS, _PLUGIN], f"{_PLUGIN}:1"),
        ([_OURS, _PLUGIN, _JSON], f"{_PLUGIN}:1"),
        ([_OURS, _PLUGIN, _URLLIB3], f"{_PLUGIN}:1"),
        ([_OURS, _JSON], ""),
        ([_OURS, _URLLIB3], ""),
        ([_OURS, "<string>"], ""),
        ([_PLUGIN, _OURS], ""),
    ],
)
def test_the_standard_library_and_our_dependencies_count_to_their_caller(paths: list[str], expected: str) -> None:
    """A defect of ours that shows in urllib3 is still to be reported to us."""
    calls: list[Callable[..., object]] = []
    for path in paths:
        names: dict[str, Any] = {}
        exec(compile("def call(rest): rest[0](rest[1:]) if rest else 1 / 0", path, "exec"), names)  # noqa: S102 - our own text
        calls.append(names["call"])
    with pytest.raises(ZeroDivisionError) as caught:
        calls[0](calls[1:])
    assert notices.find_foreign_place(caught.value) == expected

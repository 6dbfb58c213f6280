"""The marker `system`: a test gets it by what it names, and is refused without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import hosts, isolation, system
from tests.support.etcd import Etcd

if TYPE_CHECKING:
    from types import FunctionType


def _names_a_function_of_a_module() -> object:
    return isolation.small_disk


def _names_a_class_inside() -> object:
    return lambda: [Etcd]


def _names_none() -> object:
    return hosts.VirtualHost


@pytest.mark.parametrize(
    ("function", "is_marked"),
    [(_names_a_function_of_a_module, True), (_names_a_class_inside, True), (_names_none, False)],
)
def test_a_function_that_names_what_needs_root_or_a_server_is_found(function: FunctionType, is_marked: bool) -> None:
    """Through a module, and inside of other functions."""
    assert system._names_starter(function.__code__, function.__globals__) == is_marked


def test_what_needs_root_or_a_server_is_refused_without_the_marker() -> None:
    """The test fails at once, whoever runs it, and is told the cure."""
    with pytest.raises(pytest.fail.Exception, match=r"needs etcd, so it needs the marker: @pytest\.mark\.system"):
        system.require_marker("etcd")

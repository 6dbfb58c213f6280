"""A stop that a program requests: it reaches the job once, whenever it comes."""

from __future__ import annotations

import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from elastic_run.launcher import LaunchConfig, elastic_launch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any


def _launch() -> elastic_launch:
    return elastic_launch(LaunchConfig(1, 1, 1, rdzv_backend="local"), "true")


def _begin(launcher: elastic_launch, stops: list[int]) -> None:
    launcher._connect_stop(stops.append)


def _call_with(first: Callable[[], None], second: Callable[[], None], line: int) -> bool:
    """Call a function, and another one before a line of the first is run; return whether there is such a line."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line" and "elastic_run" in frame.f_code.co_filename:
            count += 1
            if count == line:
                second()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        first()
    finally:
        sys.settrace(before)
    return count >= line


@pytest.mark.parametrize("is_stop_first", [True, False], ids=["start in a stop", "stop in a start"])
def test_a_stop_at_the_moment_of_the_start_comes_once(is_stop_first: bool) -> None:
    """Two SIGINTs kill the workers at once, so one request is passed on once, at whichever line the other comes."""
    line, is_reached = 0, True
    while is_reached:
        line += 1
        launcher, stops = _launch(), list[int]()
        calls = partial(launcher.stop, signal.SIGINT), partial(_begin, launcher, stops)
        first, second = calls if is_stop_first else reversed(calls)
        is_reached = _call_with(first, second, line)
        assert stops == [signal.SIGINT] * is_reached, line
    assert line > 2


def test_stops_before_the_start_and_after_it_come_in_their_order() -> None:
    """None is lost, and two requests are two."""
    launcher, stops = _launch(), list[int]()
    launcher.stop(signal.SIGINT)
    launcher.stop(signal.SIGTERM)
    _begin(launcher, stops)
    launcher.stop(signal.SIGINT)
    assert stops == [signal.SIGINT, signal.SIGTERM, signal.SIGINT]

"""What a handler over a job store takes from its settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_run.core.job.config import Window
from elastic_run.rendezvous.backend_table import read_settings
from elastic_run.rendezvous.coordination.places import Place
from elastic_run.rendezvous.handler import ElasticRendezvousHandler, open_session
from tests.support.sessions import plain_setup


class FakeRounds:
    """Notes how it was closed."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def finish(self) -> None:
        """Note it."""
        self.calls.append("finish")

    def close(self, timeout: float) -> None:
        """Note how long that may take."""
        self.calls.append(timeout)


def test_a_shutdown_takes_as_long_as_close_timeout_says() -> None:
    """The end of a session may take `close_timeout` seconds; before, the node says that its part is done."""
    handler = object.__new__(ElasticRendezvousHandler)
    rounds = FakeRounds()
    handler._rounds = rounds  # type: ignore[assignment] # a fake
    handler._settings = read_settings("c10d", {"close_timeout": "5"})
    assert handler.shutdown()
    assert rounds.calls == ["finish", 5.0]


@pytest.mark.parametrize(
    "values",
    [
        {"preferred_rank": 1 << 60},
        {"location": "x" * 99999},
    ],
)
def test_a_value_that_the_job_could_not_read_is_refused(values: dict[str, Any]) -> None:
    """The job would pass over the node's messages, its own coordinator's as well, and the node would wait for ever."""
    setup = plain_setup()
    setup = replace(setup, node_info=replace(setup.node_info, **values))
    place = Place("c10d", "job", [("127.0.0.1", 1)], is_host=False)
    with pytest.raises(ValueError, match=r"^the other nodes could not read a value of this node: NodeInfo.* must be "):
        open_session(place, read_settings("c10d", {}), setup, local_addr="127.0.0.1")


def test_a_window_that_the_job_could_not_read_is_refused() -> None:
    """A configuration is sent as well."""
    setup = plain_setup(membership_window=Window(1 << 60, 5.0))
    place = Place("c10d", "job", [("127.0.0.1", 1)], is_host=False)
    with pytest.raises(
        ValueError, match=r"^the other nodes could not read a value of this node: Window\.count must be "
    ):
        open_session(place, read_settings("c10d", {}), setup, local_addr="127.0.0.1")

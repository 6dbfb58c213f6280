"""What a handler over a job store takes from its settings."""

from __future__ import annotations

from elastic_run.rendezvous.backend_table import read_settings
from elastic_run.rendezvous.elastic.handler import ElasticRendezvousHandler


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

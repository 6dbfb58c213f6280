"""Events: their format, and where they go by name."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
from typing import TYPE_CHECKING

import pytest

from elastic_run import events
from elastic_run.events import Event, EventSource, NodeState, RdzvEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_RENDEZVOUS_EVENT = RdzvEvent(
    name="file.py:join", run_id="job", message="joined", hostname="node", pid=7, node_state=NodeState.RUNNING, rank=1
)


@pytest.fixture(autouse=True)
def _fresh_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget handlers and loggers, so that each test finds what a new process finds."""
    monkeypatch.setattr(events, "_log_handlers", {})
    monkeypatch.setattr(events, "_events_loggers", {})
    monkeypatch.setattr(events, "_broken", set())
    yield
    for name in ("console", "null", "dynamic_rendezvous", "mine"):
        logging.getLogger(events._LOGGER_PREFIX + name).handlers.clear()


def _listen(destination: str) -> io.StringIO:
    """Put a handler of one's own in a destination's place, as programs that embed torch's launcher do."""
    heard = io.StringIO()
    events._log_handlers[destination] = logging.StreamHandler(heard)
    return heard


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_an_event_survives_its_json() -> None:
    """An event that is written and read again is the same event, and one that is no text is returned as it is."""
    event = Event("started", EventSource.AGENT, 12, {"rank": 0, "role": None})
    assert str(event) == event.serialize()
    assert json.loads(event.serialize()) == {
        "name": "started",
        "source": "AGENT",
        "timestamp": 12,
        "metadata": {"rank": 0, "role": None},
    }
    assert Event.deserialize(event.serialize()) == event
    assert Event.deserialize(event) is event


def test_a_rendezvous_event_survives_its_json() -> None:
    """The same holds for the events of a rendezvous."""
    event = _RENDEZVOUS_EVENT
    assert str(event) == event.serialize()
    assert RdzvEvent.deserialize(event.serialize()) == event
    assert RdzvEvent.deserialize(event) is event


@pytest.mark.parametrize("kind", [Event, RdzvEvent])
@pytest.mark.parametrize("data", [7, "[]"])
def test_what_is_no_event_is_refused(kind: type[Event | RdzvEvent], data: object) -> None:
    """Neither another object nor the JSON of something else is taken for an event."""
    with pytest.raises(TypeError, match="nor the JSON of one"):
        kind.deserialize(data)  # type: ignore[arg-type] # that is the test


def test_an_event_goes_to_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    """With the handler `console` an event is one line of JSON on standard error, and only once."""
    event = Event("started", EventSource.WORKER)
    assert events.is_recorded("console")
    events.record(event, "console")
    events.record(event, "console")
    assert capsys.readouterr() == ("", f"{event}\n{event}\n")


@pytest.mark.parametrize("destination", ["null", "dynamic_rendezvous"])
def test_silent_handlers_drop_events(destination: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`null` and `dynamic_rendezvous` drop events, without even asking for their text."""
    assert not events.is_recorded(destination)
    events.record(None, destination)  # type: ignore[arg-type] # not looked at
    events.record_rdzv_event(None)  # type: ignore[arg-type] # ditto
    assert isinstance(events.get_logging_handler(destination), logging.NullHandler)
    assert capsys.readouterr() == ("", "")


def test_a_handler_added_to_the_silent_logger_hears() -> None:
    """A program that adds a handler to torch's logger of `null` gets the events."""
    heard = io.StringIO()
    logging.getLogger("torchelastic-events-null").addHandler(logging.StreamHandler(heard))
    event = Event("started", EventSource.AGENT)
    assert events.is_recorded()
    events.record(event)
    assert heard.getvalue() == f"{event}\n"


def test_a_handler_under_a_name_of_ones_own_is_used() -> None:
    """A program may add a handler under a name of its own to the table of handlers."""
    heard = _listen("mine")
    event = Event("started", EventSource.AGENT)
    events.record(event, "mine")
    assert heard.getvalue() == f"{event}\n"


@pytest.mark.parametrize(
    "use",
    [events.get_logging_handler, events.is_recorded, lambda name: events.record(Event("x", EventSource.AGENT), name)],
)
def test_an_unknown_handler_is_answered_with_the_known(use: Callable[[str], object]) -> None:
    """An unknown handler is one line that lists the known ones."""
    with pytest.raises(ValueError, match=r"^unknown event handler 'x'; known: console, dynamic_rendezvous, null$"):
        use("x")


def test_an_event_goes_to_no_other_handler_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that the program has given to the root logger does not get the event."""
    heard, others = _listen("mine"), io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(others)])
    events.record(Event("started", EventSource.AGENT), "mine")
    assert (heard.getvalue().count("started"), others.getvalue()) == (1, "")


def test_loglevel_silences_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are of level INFO, so LOGLEVEL=WARNING drops them."""
    monkeypatch.setenv("LOGLEVEL", "WARNING")
    heard = _listen("mine")
    events.record(Event("started", EventSource.AGENT), "mine")
    assert heard.getvalue() == ""


def test_a_handler_that_raises_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A handler that raises loses its event and is told of once; it gets the next events all the same."""

    class Failing(logging.Handler):
        seen = 0

        def emit(self, _: logging.LogRecord) -> None:
            self.seen += 1
            raise ConnectionError

    handler = Failing()
    events._log_handlers["mine"] = handler
    for _ in range(3):
        events.record(Event("started", EventSource.AGENT), "mine")
    assert handler.seen == 3
    assert _warnings(caplog) == ["event handler 'mine' raised ConnectionError: ; the job goes on (shown once)"]


def test_a_rendezvous_event_is_built_from_its_surroundings() -> None:
    """What the caller of a rendezvous event doesn't say is taken from the process: file, function, host, pid."""
    heard = _listen("dynamic_rendezvous")
    events.construct_and_record_rdzv_event("job", "joined", NodeState.INIT)
    assert json.loads(heard.getvalue()) == {
        "name": "test_events.py:test_a_rendezvous_event_is_built_from_its_surroundings",
        "run_id": "job",
        "message": "joined",
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "node_state": "INIT",
        "master_endpoint": "",
        "rank": None,
        "local_id": None,
        "error_trace": "",
    }


def test_a_rendezvous_event_of_a_failure_has_the_traceback() -> None:
    """A failed node's event holds the exception that is being handled, and what the caller says is kept."""
    heard = _listen("dynamic_rendezvous")
    try:
        raise OSError("lost")  # noqa: EM101, TRY301 - an exception to be handled
    except OSError:
        events.construct_and_record_rdzv_event(
            "job", "lost", NodeState.FAILED, "join", "node", 7, "host:1", local_id=2, rank=3
        )
    found = RdzvEvent.deserialize(heard.getvalue())
    assert found.error_trace.startswith("Traceback (most recent call last)")
    assert found.error_trace.endswith("OSError: lost\n")
    found.error_trace = ""
    assert found == RdzvEvent("test_events.py:join", "job", "lost", "node", 7, NodeState.FAILED, "host:1", 3, 2)

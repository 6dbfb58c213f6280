"""The times of a job's events on one clock: by each launcher's monotonic clock, and by the differences between nodes.

Pure, and for display only. All nodes of a round read from the job's store, within milliseconds, that the round was
formed. So the times in their lines about that moment differ by as much as their clocks do, and by the time that the
store takes to tell them.
"""

from __future__ import annotations

from statistics import median

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elastic_run.report.job_history import Event

#: Seconds; a smaller difference may be the way from the store, and is not seen on the page.
_LEAST = 0.05


def follow_monotonic_clocks(events: Iterable[Event]) -> list[Event]:
    """Return events with the wall clock of their launcher's first event, carried on by its monotonic clock.

    A wall clock that is set while the job runs would stretch the rounds of the page by days.

    Args:
        events: Of all launchers; those of each launcher in their order.
    """
    first: dict[str, Event] = {}
    return [
        {**event, "time": began["time"] + event["monotonic"] - began["monotonic"]}
        for event in events
        for began in (first.setdefault(event["agent"], event),)
    ]


def find_offsets(events: Sequence[Event]) -> dict[str, float]:
    """Return by how many seconds the clocks of launchers are ahead of the first launcher's of their job.

    Args:
        events: Of all launchers.

    Returns:
        The seconds by launcher, negative for a clock that is behind; only differences that are worth a word. A launcher
        that shares no round with the one that was in most rounds is missing.
    """
    formed: dict[str, dict[str, float]] = {}
    hosts: dict[str, str] = {}
    jobs: dict[str, list[str]] = {}
    for event in events:
        if event["event"] == "round_formed" and event["round_id"]:
            agent = event["agent"]
            hosts[agent] = event["node"]
            if agent not in formed:
                jobs.setdefault(event["job"], []).append(agent)
            formed.setdefault(agent, {}).setdefault(event["round_id"], event["time"])
    found = {}
    for agents in jobs.values():
        first = max(agents, key=lambda agent: len(formed[agent]))
        for agent in agents:
            common = formed[agent].keys() & formed[first].keys()
            if common and hosts[agent] != hosts[first]:
                found[agent] = median(formed[agent][round_id] - formed[first][round_id] for round_id in common)
    return {agent: offset for agent, offset in found.items() if abs(offset) >= _LEAST}


def correct(event: Event, offsets: Mapping[str, float]) -> Event:
    """Return an event with its time on the clock of the first launcher."""
    offset = offsets.get(event["agent"])
    return event if offset is None else {**event, "time": event["time"] - offset}

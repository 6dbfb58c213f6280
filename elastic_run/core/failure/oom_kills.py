"""Kills by the kernel's OOM killer, as counters tell them."""

from __future__ import annotations

from elastic_run.records import dataclass


@dataclass(frozen=True, slots=True)
class OomKills:
    """Kills by the OOM killer; None where the kernel doesn't tell.

    Args:
        group: In this process's cgroup and below.
        machine: On the whole machine.
    """

    group: int | None = None
    machine: int | None = None

    def since(self, before: OomKills) -> OomKills:
        """Return the kills between an earlier reading and this one.

        Returns:
            The difference; None where either reading is.
        """
        return OomKills(_difference(self.group, before.group), _difference(self.machine, before.machine))


def _difference(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else max(0, now - before)

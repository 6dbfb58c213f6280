"""The time of day: certificates, logs and checkpoints need a possible one. Jobs decide by other clocks."""

from __future__ import annotations

import os
import time

from elastic_run.diagnosis.doctor.finding import problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.diagnosis.doctor.finding import Finding, Subject

_DAY = 86400.0
#: Seconds since 1970 at the end of 2099.
_FAR = 4_102_444_800.0


def check(_: Subject) -> list[Finding]:
    """Compare the time of day with the age of this file."""
    return judge(time.time(), os.path.getmtime(__file__))


def judge(now: float, written: float) -> list[Finding]:
    """Return the findings about the time of day.

    Args:
        now: Seconds since 1970.
        written: When elastic-run was installed.
    """
    if written - _DAY <= now < _FAR:
        return []
    shown = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    installed = time.strftime("%Y-%m-%d", time.gmtime(written))
    evidence = f"elastic-run was installed on {installed}"
    return [problem(f"the clock is wrong: it says {shown}", evidence, "timedatectl set-ntp true, or chronyc makestep")]

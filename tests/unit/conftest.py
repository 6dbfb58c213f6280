"""Settings of the property tests, and what several files of unit tests begin with."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.support.flags import place
from tests.support.timers import no_timer_client, sleeper

__all__ = ["no_timer_client", "place", "sleeper"]

# Machines are shared: how long an example takes to make or to run says nothing about the code.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

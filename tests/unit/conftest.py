"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Machines are shared: how long an example takes to make or to run says nothing about the code.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

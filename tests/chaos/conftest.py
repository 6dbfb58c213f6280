"""The worker programs of the integration tests."""

from __future__ import annotations

from tests.integration.conftest import worker

__all__ = ["worker"]

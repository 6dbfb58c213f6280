"""A coordinator stands still while the others restart again and again: one decides all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.paused_coordinator import STORES, reproduce

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "store", [pytest.param(store, marks=[pytest.mark.system] * (store != "file")) for store in STORES]
)
def test_a_coordinator_that_stood_still_decides_nothing(store: str, tmp_path: Path) -> None:
    """Restarts are counted once each; a node that coordinated comes to the others' round."""
    reproduce(store, tmp_path)

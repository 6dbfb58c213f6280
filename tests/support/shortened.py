"""A launcher that waits for less long than users' launchers do, for tests in which nobody else would do anything."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def shortened(constants: Mapping[str, float]) -> tuple[str, ...]:
    """Return the command of a launcher that has other constants.

    Args:
        constants: Seconds, by the constant's name with its module.
    """
    code = ["import sys"]
    for name, seconds in constants.items():
        module, _, constant = name.rpartition(".")
        code += [f"import {module}", f"sys.modules[{module!r}].{constant} = {seconds}"]
    return (sys.executable, "-c", "\n".join((*code, "from elastic_run.__main__ import main", "main()")))


#: A launcher whose first waiting line comes after a fifth of a second instead of two.
TELLS_SOON = shortened({"elastic_run.report.waiting.FIRST": 0.2})

"""The descriptors of a worker whose log file can't be made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.multiprocessing.output.wiring import CAPTURED, STDERR, STDOUT, Wiring

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("capture", "purposes"), [(True, [CAPTURED]), (False, [])])
def test_its_output_goes_to_the_console_as_if_no_file_was_asked_for(
    tmp_path: Path, purposes: list[str], *, capture: bool
) -> None:
    """Without prefixes, and stderr is kept for the report if the launcher may see it."""
    wiring = Wiring(capture=capture)
    streams = wiring.open(0, stdout=str(tmp_path / "no" / "out"), stderr=str(tmp_path / "no" / "err"))
    assert streams[0] == STDOUT
    assert (streams[1] == STDERR) is not capture
    assert [line.purpose for line in wiring.lines[0]] == purposes
    assert [path for path, _ in wiring.losses] == [str(tmp_path / "no" / "out"), str(tmp_path / "no" / "err")]
    wiring.started(0)
    wiring.abandon(0)

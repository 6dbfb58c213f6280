"""All stacks of one moment in one file: each rank's whole text, or the kernel's view of a rank without a text."""

from __future__ import annotations

import os
import time

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.core.diagnosis.stacks import Dump


def write_stacks(directory: str, dumps: Mapping[int, Dump]) -> str:
    """Write stacks into a new file.

    Args:
        directory: The job's log directory.
        dumps: The stacks by global rank.

    Returns:
        Path of the file: stacks.txt, or stacks.1.txt and so on, since no log is overwritten.

    Raises:
        OSError: The file can't be written.
    """
    text = render_stacks(dumps, time.strftime("%Y-%m-%d %H:%M:%S %z"))
    name, _, ending = contract.STACKS_FILE.rpartition(".")
    number = 0
    while True:
        path = os.path.join(directory, f"{name}.{number}.{ending}" if number else contract.STACKS_FILE)
        try:
            file = open(path, "x", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
        except FileExistsError:
            number += 1
            continue
        try:
            with file:
                file.write(text)
        except OSError:
            if not os.path.getsize(path):  # a full disk: an empty file would tell nothing
                os.unlink(path)
            raise
        return path


def render_stacks(dumps: Mapping[int, Dump], taken_at: str) -> str:
    """Return the file's text.

    Args:
        dumps: The stacks by global rank.
        taken_at: When they were taken, for display.
    """
    parts = [f"Stacks of {len(dumps)} workers, {taken_at}"]
    for rank, dump in sorted(dumps.items()):
        problem = f": {dump.problem}" if dump.problem else ""
        lines = (f"=== rank {rank}{problem}", dump.text.rstrip(), dump.details)
        parts.append("\n".join(line for line in lines if line))
    return "\n\n".join(parts) + "\n"

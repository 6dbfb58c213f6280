"""Where a job lies in a store that other jobs use, too."""

from __future__ import annotations

#: What the keys of all jobs begin with.
ROOT = "elastic-run"


def job_path(run_id: str) -> str:
    """Return where a job lies in a store that is shared with others.

    Args:
        run_id: The job; any text.

    Returns:
        `elastic-run/<run id>`, with everything in the run id that paths give a meaning to, or forbid, escaped.

    Raises:
        ValueError: The run id is empty: what lies there is all jobs'.
    """
    if not run_id:
        message = "a job store needs a run id"
        raise ValueError(message)
    plain = "".join(
        char if char.isascii() and (char.isalnum() or char in "_-.") else "".join(map("%{:02X}".format, char.encode()))
        for char in run_id
    )
    if not plain.strip("."):
        plain = plain.replace(".", "%2E")
    return f"{ROOT}/{plain}"

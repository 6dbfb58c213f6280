"""`python -m elastic_run` is the command `elastic-run`."""

from __future__ import annotations

import gc

from elastic_run import signals


def main() -> None:
    """Run the command.

    Raises:
        SystemExit: The job didn't succeed; the code is one of `contract.EXIT_CODES`.
    """
    if signals.is_python_interrupt(signals.SIGINT):
        # Ctrl-C while modules are imported ends the process as it would any other: nothing was started yet.
        signals.default_signal(signals.SIGINT)
    # A collection in the middle of start-up finds nothing and delays the workers; the launcher turns it on again.
    gc.disable()
    from elastic_run import run  # noqa: PLC0415 - after that

    run.main()


if __name__ == "__main__":
    main()

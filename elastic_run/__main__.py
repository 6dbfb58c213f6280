"""`python -m elastic_run` is the command `elastic-run`."""

from __future__ import annotations

import gc
import signal


def main() -> None:
    """Run the command.

    Raises:
        SystemExit: The job didn't succeed; the code is one of `contract.EXIT_CODES`.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C while modules are imported ends the process as it would any other: nothing was started yet.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A collection in the middle of start-up finds nothing and delays the workers; the launcher turns it on again.
    gc.disable()
    from elastic_run import run  # noqa: PLC0415 - after that

    run.main()


if __name__ == "__main__":
    main()

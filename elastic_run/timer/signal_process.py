"""The signal that ends a process whose timer has expired."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


def signal_process(pid: int, number: int) -> bool:
    """Send a process a signal.

    Args:
        pid: The process.
        number: The signal.

    Returns:
        Whether it got the signal or was gone; False where it may not be signalled.
    """
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        logger.info("process %s has ended already", pid)
    except OSError as error:
        logger.warning("process %s can't be sent signal %s: %s", pid, number, error.strerror)
        return False
    return True

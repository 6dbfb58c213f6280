"""Tells the user that the scheduler will end the job soon, and stops the workers in time if the user asks for it.

Slurm sends SIGTERM when the time is over, and SIGKILL `KillWait` seconds later (30 unless the site sets it). Workers
that need longer to save have to begin before. A variable gives the workers the same moment, from which on their
`stop_requested()` is true.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver.context import AgentOptions
    from elastic_run.loop import Loop


def watch_time_limit(
    loop: Loop, options: AgentOptions, *, say: Callable[[str], object], stop: Callable[[], None]
) -> None:
    """Set a timer for the moment in which the workers have to begin to save.

    Args:
        loop: The agent's loop.
        options: The agent's options, with a `stop_time`.
        say: Tells the user a line.
        stop: Stops the workers; called if the options ask for it.
    """

    def tell() -> None:
        left = max(0, round(options.node_config.end_time - time.time()))
        if options.node_config.stops_in_time:
            say(f"the job's time limit is in {left} s: stopping the workers, to run the job again")
            stop()
        else:
            say(f"the job's time limit is in {left} s: stop_requested() is true in the workers from now on")

    # The wall clock is read once: a clock that is set later moves nothing.
    loop.call_later(max(0.0, options.stop_time - time.time()), tell)

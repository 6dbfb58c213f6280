"""Whether a failed round is tried again: the restart budget, its window, early failures, and the pause before.

Pure: time and randomness come in as arguments. The rules, in the order in which they are asked:

0. A rule of ``--failure-rules`` that fits comes first: ``stop`` is never retried; ``restart`` skips rules 1 and 2.
   A launch without a main guard is never retried either.
1. An exit code that the user listed is never retried.
2. The same failure twice, each before the minimum uptime, is not retried: a third time can't help. Without
   ``--min-uptime`` that holds only for failures that can't go away by themselves (ImportError, SyntaxError).
3. The budget: ``max_restarts`` for the whole job, a number of restarts per window, or both.
4. The first restart is immediate. From the second early failure in a row on there is a pause that doubles.
"""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.core.config import JobConfig

# --- words for what became of a round on one node, and why a node leaves ---------------------------------------------
DONE = "done"
FAILED = "failed"
STOPPED = "stopped"
CANNOT_START = "cannot_start"
UNREACHABLE = "unreachable"
OUTCOMES = frozenset((DONE, FAILED, STOPPED, CANNOT_START, UNREACHABLE))

BY_SIGNAL = "signal"
DIED = "died"
UNKILLABLE = "unkillable"
UNHEALTHY = "unhealthy"
EXCLUDED = "excluded"
#: Reasons that are known before the node goes: the round ends for a departure, and not for a loss.
ANNOUNCED = frozenset((BY_SIGNAL, UNKILLABLE, UNHEALTHY, EXCLUDED))

# --- the policy ------------------------------------------------------------------------------------------------------
#: Seconds. A round that lived shorter failed early, as far as the pause is concerned.
EARLY = 10.0
#: Seconds. An error of the program itself (an import, a syntax error) shows up within this time.
DETERMINISTIC_EARLY = 60.0
FIRST_PAUSE = 0.1
#: Seconds for which a round is not stopped if all failed workers look as if they had lost a peer: the worker with the
#: cause may still be cleaning up. Long enough for a last flush of logs; shorter than a lease, so that a
#: node that is lost is known soon after.
CAUSE_WAIT = 5.0
#: The decisions of a user's rule; `EXCLUDE_NODE` is for jobs of several nodes, see `exclusion`.
RESTART_JOB, STOP_JOB, EXCLUDE_NODE = RULE_DECISIONS = ("restart", "stop", "exclude")


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed round: what its worker's end means for the job. It travels in the report of the node that had it."""

    exit_code: int  # The root cause's exit code, 128+n for a signal
    signature: str | None = None  # Equal for two failures that look the same; None for unknown
    is_deterministic: bool = False  # Whether it can't go away by itself
    uptime: float = 0.0  # Seconds that the round lived
    #: One of `RULE_DECISIONS`, by a rule of the user's that fits, or "". Without a rule it is STOP_JOB, for a launch
    #: without a main guard.
    decision: str = ""
    rule: str = ""  # The expression of that rule, or ""

    def name_rule(self) -> str:
        """Return what decided, a clause for the user."""
        if not self.rule:
            return "a program that launches workers without `if __name__ == '__main__':` fails every time"
        return f"the rule {self.rule!r} of --failure-rules decides {self.decision}"


@dataclass(frozen=True, slots=True)
class Restart:
    """Try again after a pause of `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the job."""

    verdict: str  # A name from `contract.EXIT_CODES`
    detail: str = ""  # One sentence for the user; empty when the budget is simply used up


def decide_restart(
    config: JobConfig,
    failures: Sequence[Failure],
    restart_times: Sequence[float],
    now: float,
    jitter: float,
    *,
    used: int | None = None,
) -> Restart | GiveUp:
    """Decide what follows a failed round: `Restart` with its pause, or `GiveUp` with the verdict.

    The last failure is the one to decide on. Of the times of restarts the last ones will do, as many as a window
    allows; `used` says how often the job restarted, None for as often as there are times. `jitter` is in [0, 1).
    """
    failure = failures[-1]
    if failure.decision == STOP_JOB:
        return GiveUp("worker_failed", failure.name_rule())
    is_wanted = failure.decision == RESTART_JOB
    if failure.exit_code in config.no_restart_exit_codes and not is_wanted:
        return GiveUp("worker_failed", f"exit code {failure.exit_code} is listed in --no-restart-exit-codes")
    repeated = "" if len(failures) == 1 or is_wanted else _describe_repeated(config, failures[-2], failure)
    if repeated:
        return GiveUp("repeated_failure", repeated)
    if not has_budget(config, len(restart_times) if used is None else used):
        return GiveUp("worker_failed")
    window = config.restart_window
    if window is not None and window.seconds is not None:
        recent = sum(1 for time in restart_times if now - time < window.seconds)
        if recent >= window.count:
            return GiveUp(
                "worker_failed",
                f"{recent} restarts in the last {window.seconds:g} s are all that --restart-window allows",
            )
    return Restart(_pause(config, failures, jitter))


def has_budget(config: JobConfig, used: int) -> bool:
    """Whether the budget of the whole job allows one restart more than were used; a window may still forbid it."""
    is_only_window = config.restart_window is not None and config.max_restarts == 0
    return is_only_window or used < config.max_restarts


def _describe_repeated(config: JobConfig, before: Failure, failure: Failure) -> str:
    """Say that the same failure came twice, each time early; "" if it did not."""
    limit = config.min_uptime
    if limit is None:
        limit = DETERMINISTIC_EARLY if failure.is_deterministic else 0.0
    is_same = before.signature is not None and before.signature == failure.signature
    if not is_same or max(before.uptime, failure.uptime) >= limit:
        return ""
    if config.min_uptime is None:
        return "the program failed twice with the same error: a restart can't help"
    return f"the same failure twice before --min-uptime {limit:g} s (after {failure.uptime:.1f} s)"


def _pause(config: JobConfig, failures: Sequence[Failure], jitter: float) -> float:
    early = EARLY if config.min_uptime is None else config.min_uptime
    in_a_row = 0
    for failure in reversed(failures):
        if failure.uptime >= early:
            break
        in_a_row += 1
    if in_a_row <= 1:
        return 0.0  # the first restart is immediate
    # 2**40 pauses are years: the cap keeps the float finite.
    return min(config.max_backoff, FIRST_PAUSE * 2.0 ** min(in_a_row - 2, 40)) * (0.5 + jitter / 2)

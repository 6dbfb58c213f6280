"""The exit code of the launcher, chosen from the verdict and the root cause; `contract.EXIT_CODES` has the list."""

from __future__ import annotations

from elastic_run import contract
from elastic_run.core.job.restart_policy import STOP_JOB, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.agent import messages
    from elastic_run.core.failure.diagnose import Rule
    from elastic_run.core.failure.root_cause import WorkerEnd

_EXIT_CODES = {name: code for code, name, _ in contract.EXIT_CODES if isinstance(code, int)}


def exit_code_of(root: WorkerEnd) -> int:
    """Return the exit code that a root cause gives its job: 128+n for signal n."""
    return root.exitcode if root.exitcode >= 0 else contract.EXIT_SIGNAL_BASE - root.exitcode


def exit_code(finish: messages.Finish, root: WorkerEnd | None) -> int:
    """Return the launcher's exit code; see `contract.EXIT_CODES`."""
    if finish.exit_code is not None:
        return finish.exit_code
    if finish.signal is not None:
        return contract.EXIT_SIGNAL_BASE + finish.signal
    if finish.verdict == "worker_failed":
        return contract.EXIT_FAILURE if root is None else exit_code_of(root)
    return _EXIT_CODES[finish.verdict]


def failure_of(root: WorkerEnd, uptime: float, rule: Rule | None) -> Failure:
    """Return a failure for the restart policy.

    Args:
        root: The worker that failed first.
        uptime: Seconds that the round lived.
        rule: The user's rule that fits it, which may decide whether the job is restarted; or None.
    """
    from elastic_run.core.failure.root_cause import (
        failure_signature,
        is_deterministic,
        is_unguarded_launch,
    )

    return Failure(
        exit_code=exit_code_of(root),
        signature=repr(failure_signature(root)),
        is_deterministic=is_deterministic(root),
        uptime=uptime,
        decision=(rule and rule.decision) or (STOP_JOB if is_unguarded_launch(root) else ""),
        rule=rule.match if rule is not None and rule.decision else "",
    )

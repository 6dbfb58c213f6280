"""The families of checks, and how they are run: side by side, each with a deadline, none able to stop the others."""

from __future__ import annotations

import threading
import time

from elastic_run.diagnosis.doctor import (
    clock,
    control_groups,
    directories,
    gpus,
    interfaces,
    names,
    ports,
    python,
    resource_limits,
    scheduler,
    shared_memory,
    variables,
)
from elastic_run.diagnosis.doctor.finding import PROBLEM, problem, warning
from elastic_run.utils.exceptions import describe_exception

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.diagnosis.doctor.finding import Finding, Subject

#: Families by the word that a user reads, in the order of the report.
FAMILIES: dict[str, Callable[[Subject], list[Finding]]] = {
    "names": names.check,
    "ports": ports.check,
    "interfaces": interfaces.check,
    "clock": clock.check,
    "shared memory": shared_memory.check,
    "limits": resource_limits.check,
    "control groups": control_groups.check,
    "directories": directories.check,
    "Python": python.check,
    "GPUs": gpus.check,
    "scheduler": scheduler.check,
    "variables": variables.check,
}
#: Seconds for all families together.
DEADLINE = 40.0


def run_checks(
    subject: Subject,
    *,
    families: Mapping[str, Callable[[Subject], list[Finding]]] = FAMILIES,
    deadline: float = DEADLINE,
) -> list[Finding]:
    """Run all families.

    Args:
        subject: The machine and the job to check.
        families: Functions by name.
        deadline: Seconds for all of them together.

    Returns:
        Findings, problems first, otherwise in the families' order.
    """
    found: dict[str, list[Finding]] = {}
    threads = {}
    end = time.monotonic() + deadline
    for name, check in families.items():
        thread = threading.Thread(target=_run, args=(name, check, subject, found), name=f"check of {name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            found[name] = [_describe_no_thread(error)]
        else:
            threads[name] = thread
    for name, thread in threads.items():
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            found[name] = [_describe_hang(name, deadline)]
    every = list(dict.fromkeys(finding for name in families for finding in found[name]))
    return sorted(every, key=lambda finding: finding.severity != PROBLEM)


def _run(
    name: str, check: Callable[[Subject], list[Finding]], subject: Subject, found: dict[str, list[Finding]]
) -> None:
    try:
        found[name] = check(subject)
    except Exception as error:  # noqa: BLE001 - a check that fails must not hide what the others find
        what = f"{name} can't be checked: {describe_exception(error)}"
        found[name] = [warning(what, "a defect of elastic-run", "please report it")]


def _describe_no_thread(error: RuntimeError) -> Finding:
    what = "no thread can be started, so that some checks were left out"
    remedy = "raise the limit of processes and threads: ulimit -u, pids.max of the control group, docker --pids-limit"
    return problem(what, str(error), remedy)


def _describe_hang(name: str, seconds: float) -> Finding:
    what = f"the check of {name} hangs for more than {seconds:.0f} s"
    remedy = (
        "a network file system or a driver does not answer: look for state D in ps -eo pid,stat,wchan,cmd, and at dmesg"
    )
    return problem(what, "the check was left out", remedy)

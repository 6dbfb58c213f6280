"""The families of checks, and how they are run: side by side, each with a deadline, none able to stop the others.

A check can hang, on a dead network file system for one; so each family runs in a thread, and a family that does not end
in time is a finding.
"""

from __future__ import annotations

import threading
import time

from elastic_run.diagnosis.doctor import environment_checks, host_checks, network_checks
from elastic_run.diagnosis.doctor.findings import PROBLEM, problem, warning
from elastic_run.utils import describe_exception

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.diagnosis.doctor.findings import Finding, Subject

    Check = Callable[[Subject], list[Finding]]

#: Families by the word that a user reads, in the order of the report.
FAMILIES: dict[str, Check] = {
    "names": network_checks.check_names,
    "ports": network_checks.check_ports,
    "interfaces": network_checks.check_interfaces,
    "clock": host_checks.check_clock,
    "shared memory": host_checks.check_shared_memory,
    "limits": host_checks.check_limits,
    "control groups": host_checks.check_control_groups,
    "directories": host_checks.check_directories,
    "Python": environment_checks.check_python,
    "GPUs": host_checks.check_gpus,
    "scheduler": environment_checks.check_scheduler,
    "variables": environment_checks.check_variables,
}
#: Seconds for all families together.
DEADLINE = 40.0


def run_checks(
    subject: Subject, *, families: Mapping[str, Check] = FAMILIES, deadline: float = DEADLINE
) -> list[Finding]:
    """Run all families; return problems first, otherwise in the families' order."""
    found: dict[str, list[Finding]] = {}
    threads = {}
    end = time.monotonic() + deadline
    for name, check in families.items():
        thread = threading.Thread(target=_run, args=(name, check, subject, found), name=f"check of {name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            what = "no thread can be started, so that some checks were left out"
            remedy = (
                "raise the limit of processes and threads: ulimit -u, pids.max of the control group, "
                "docker --pids-limit"
            )
            found[name] = [problem(what, str(error), remedy)]
        else:
            threads[name] = thread
    for name, thread in threads.items():
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            what = f"the check of {name} hangs for more than {deadline:.0f} s"
            remedy = (
                "a network file system or a driver does not answer: look for state D in ps -eo pid,stat,wchan,cmd, "
                "and at dmesg"
            )
            found[name] = [problem(what, "the check was left out", remedy)]
    every = list(dict.fromkeys(finding for name in families for finding in found[name]))
    return sorted(every, key=lambda finding: finding.severity != PROBLEM)


def _run(name: str, check: Check, subject: Subject, found: dict[str, list[Finding]]) -> None:
    try:
        found[name] = check(subject)
    except Exception as error:  # noqa: BLE001 - a check that fails must not hide what the others find
        what = f"{name} can't be checked: {describe_exception(error)}"
        found[name] = [warning(what, "a defect of elastic-run", "please report it")]

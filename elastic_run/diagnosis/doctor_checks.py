"""The doctor's checks of the environment, and the run of all families of checks. Nothing is changed on the machine.

A check can hang, on a dead network file system for one; so each family runs in a thread of its own, and a family that
does not end in time is a finding. torch is not imported: its metadata has the version.
"""

from __future__ import annotations

import difflib
import os
import sys
import threading
import time

from elastic_run.diagnosis import doctor_host, doctor_network
from elastic_run.diagnosis.doctor_report import PROBLEM, problem, warning
from elastic_run.utils import describe_exception

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.diagnosis.doctor_report import Finding, Subject

    Check = Callable[[Subject], list[Finding]]

#: Seconds for all families together.
_DEADLINE = 40.0
#: Names of modules that torch imports. A file of that name beside the script hides the module.
_HIDEABLE = ("torch", "numpy", "random", "queue", "socket", "logging", "tempfile", "typing", "types", "signal", "json")


def check_python(subject: Subject) -> list[Finding]:
    """Check which interpreter workers would run, and what it would import."""
    environ, found = subject.environ, []
    worker_python = environ.get("PYTHON_EXEC", "")
    if worker_python and not os.access(worker_python, os.X_OK):
        what = f"PYTHON_EXEC is {worker_python}, which can't be executed"
        found.append(problem(what, "workers run it", "unset PYTHON_EXEC, or give the path of an interpreter"))
    variable = next((name for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(name)), "")
    prefix, active = os.path.realpath(sys.prefix), os.path.realpath(environ.get(variable, "") or sys.prefix)
    if not worker_python and active != prefix:
        what = f"{variable} is {active}, but workers would run {sys.executable}"
        remedy = f"pip install elastic-run in {active}, or run python -m elastic_run with its python"
        found.append(problem(what, f"elastic-run is installed in {prefix}", remedy))
    if not worker_python and not find_version("torch"):
        what = f"torch is not installed for {sys.executable}"
        found.append(warning(what, "it has no metadata of torch", f"{sys.executable} -m pip install torch"))
    names = (name for module in _HIDEABLE for name in (f"{module}.py", f"{module}/__init__.py"))
    if hidden := next(filter(os.path.exists, names), ""):
        what = f"{hidden} in this directory hides the module of that name from scripts here"
        found.append(problem(what, os.getcwd(), f"rename it: mv {hidden} my_{hidden}"))
    return found


def find_version(package: str) -> str:
    """Return the version of an installed package; "" where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


# --- variables --------------------------------------------------------------------------------------------------------
#: Variables of one worker. The launcher sets them for its workers; before that they are another job's.
_OF_A_WORKER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_OF_THE_PLACE = ("MASTER_ADDR", "MASTER_PORT")
#: Values with which a job runs, but slowly or without some of its devices, and why.
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "each CUDA kernel is waited for"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "each collective is checked by a second one"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node don't use NVLink"),
    "NCCL_IB_DISABLE": ("1", "nodes don't use InfiniBand"),
    "NCCL_SHM_DISABLE": ("1", "workers of a node don't use shared memory"),
}


def check_variables(subject: Subject) -> list[Finding]:
    """Check for leftovers of other jobs, settings for debugging, and names with a typing error."""
    environ, found = subject.environ, _check_leftovers(subject.environ)
    found += [
        warning(f"{name}={environ[name]}: {effect}", "", f"unset {name}, unless you look for an error")
        for name, (value, effect) in _SLOW.items()
        if environ.get(name, "").upper() == value
    ]
    threads = environ.get("OMP_NUM_THREADS")
    if threads is not None and not threads.split(",")[0].isdecimal():
        what = f"OMP_NUM_THREADS={threads!r} is not a number: each worker starts a thread per CPU"
        found.append(problem(what, "", "unset OMP_NUM_THREADS, or set it to CPUs divided by workers"))
    known = subject.known_variables
    for name in sorted(environ) if known else ():
        if name.startswith("PET_") and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else f"unset {name}"
            found.append(problem(f"{name} is not a variable of elastic-run: its value is not used", "", remedy))
    return found


def _check_leftovers(environ: Mapping[str, str]) -> list[Finding]:
    """Judge variables of a worker of another job."""
    if "TORCHELASTIC_RUN_ID" in environ:
        what = "this process is a worker of a job: TORCHELASTIC_RUN_ID is set"
        remedy = "run it outside of the job; if this shell only kept the variable: unset TORCHELASTIC_RUN_ID"
        return [warning(what, _list(environ, ["TORCHELASTIC_RUN_ID"]), remedy)]
    found = []
    # The training operator of Kubeflow gives each pod all of them, for scripts without a launcher.
    if ranks := [name for name in _OF_A_WORKER if name in environ]:
        others = "scripts started without the launcher would wait for others"
        what = f"{ranks[0]} is set, as if this were a worker: {others}"
        found.append(warning(what, _list(environ, ranks), f"unset {' '.join(ranks)}"))
    if places := [name for name in _OF_THE_PLACE if name in environ]:
        what = f"{' and '.join(places)} {'is' if len(places) == 1 else 'are'} set, perhaps by another job"
        remedy = f"unset {' '.join(places)}; the launcher reads --master-addr, PET_MASTER_ADDR or --rdzv-endpoint"
        found.append(warning(what, _list(environ, places), remedy))
    return found


def _list(environ: Mapping[str, str], names: list[str]) -> str:
    return " ".join(f"{name}={environ[name]}" for name in names)


# --- all families -----------------------------------------------------------------------------------------------------
#: Families by the word that a user reads, in the order of the report.
FAMILIES: dict[str, Check] = {
    "names": doctor_network.check_names,
    "ports": doctor_network.check_ports,
    "interfaces": doctor_network.check_interfaces,
    "shared memory": doctor_host.check_shared_memory,
    "limits": doctor_host.check_limits,
    "control groups": doctor_host.check_control_groups,
    "directories": doctor_host.check_directories,
    "Python": check_python,
    "GPUs": doctor_host.check_gpus,
    "variables": check_variables,
}


def run_checks(
    subject: Subject, *, families: Mapping[str, Check] = FAMILIES, deadline: float = _DEADLINE
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
            remedy = "raise the limit of processes: ulimit -u, pids.max of the control group, docker --pids-limit"
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

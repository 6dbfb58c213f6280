"""The interpreter that workers run in, and its packages. torch is not imported: its metadata has the version."""

from __future__ import annotations

import os
import sys

from elastic_run.diagnosis.doctor.finding import problem, warning
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.diagnosis.doctor.finding import Finding, Subject

#: Names of modules that torch imports. A file of that name beside the script hides the module.
_HIDEABLE = ("torch", "numpy", "random", "queue", "socket", "logging", "tempfile", "typing", "types", "signal", "json")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter and the modules that it would import.

    Attributes:
        executable: Its path.
        prefix: Directory of its environment.
        variable: VIRTUAL_ENV or CONDA_PREFIX, which says that another environment is active; "" where none does.
        active: The value of that variable.
        torch: Version of torch; "" where it is not installed.
        hidden: Files of the working directory that hide modules.
        worker_python: The value of PYTHON_EXEC, with which workers run; "" for this interpreter.
    """

    executable: str
    prefix: str
    variable: str = ""
    active: str = ""
    torch: str = ""
    hidden: tuple[str, ...] = ()
    worker_python: str = ""


def check(subject: Subject) -> list[Finding]:
    """Read which interpreter this is."""
    variable = next((name for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if subject.environ.get(name)), "")
    names = [name for module in _HIDEABLE for name in (f"{module}.py", f"{module}/__init__.py")]
    return judge(
        Interpreter(
            executable=sys.executable,
            prefix=os.path.realpath(sys.prefix),
            variable=variable,
            active=os.path.realpath(subject.environ.get(variable, "") or sys.prefix),
            torch=find_version("torch"),
            hidden=tuple(name for name in names if os.path.exists(name)),
            worker_python=subject.environ.get("PYTHON_EXEC", ""),
        )
    )


def find_version(package: str) -> str:
    """Return the version of an installed package; "" where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def judge(interpreter: Interpreter) -> list[Finding]:
    """Return the findings about an interpreter."""
    found = []
    if interpreter.worker_python and not os.access(interpreter.worker_python, os.X_OK):
        what = f"PYTHON_EXEC is {interpreter.worker_python}, which can't be executed"
        found.append(problem(what, "workers run it", "unset PYTHON_EXEC, or give the path of an interpreter"))
    if not interpreter.worker_python and interpreter.active != interpreter.prefix:
        what = f"{interpreter.variable} is {interpreter.active}, but workers would run {interpreter.executable}"
        remedy = f"pip install elastic-run in {interpreter.active}, or run python -m elastic_run with its python"
        found.append(problem(what, f"elastic-run is installed in {interpreter.prefix}", remedy))
    if not interpreter.worker_python and not interpreter.torch:
        what = f"torch is not installed for {interpreter.executable}"
        found.append(warning(what, "it has no metadata of torch", f"{interpreter.executable} -m pip install torch"))
    if interpreter.hidden:
        what = f"{interpreter.hidden[0]} in this directory hides the module of that name from scripts here"
        found.append(problem(what, os.getcwd(), f"rename it: mv {interpreter.hidden[0]} my_{interpreter.hidden[0]}"))
    return found

"""Stacks with the frames of C and C++ code, by py-spy (`elastic-run stacks --native`), of workers on this machine.

Rules
- py-spy stops a process for a moment and reads its memory (ptrace). The kernel may refuse that; nothing else is tried.
- The processes that a worker has started are read if asked, such as its data loaders, and where the worker is not
  Python itself, such as a script of the shell. Those that are not Python are left out.
- Several workers are read at once. A worker that takes longer than `_WAIT_LIMIT` is given up: symbols of large
  libraries take seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil

from elastic_run import contract
from elastic_run.core.failure.stacks import Dump

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_AT_ONCE = 8
_WAIT_LIMIT = 15.0
_NOT_PYTHON = "py-spy finds no Python that it knows"
#: The line between two processes.
_SEPARATOR = "-" * 80 + "\n"


def find_py_spy() -> str:
    """Return the path of py-spy, beside this interpreter or in PATH; "" where it is not installed."""
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    return shutil.which("py-spy", path=path) or ""


def read_native_stacks(program: str, pids: Mapping[int, int], *, has_children: bool = False) -> dict[int, Dump]:
    """Read the stacks of workers by rank; with `has_children`, of the processes that they have started, too."""
    options = ["--subprocesses"] if has_children else []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(pids, pool.map(lambda pid: _read_worker(program, pid, options), pids.values()), strict=True))


def _read_worker(program: str, pid: int, options: list[str]) -> Dump:
    """Read a worker, or the Pythons below it if it is none."""
    dump = _read(program, pid, options)
    if dump.problem != _NOT_PYTHON:
        return dump
    try:
        children = [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return dump
    texts = [text for child in children if (text := _read(program, child, ["--subprocesses"]).text)]
    return Dump(text=_SEPARATOR.join(texts)) if texts else dump


def _read(program: str, pid: int, options: list[str]) -> Dump:
    command = [program, "dump", "--native", "--pid", str(pid), *options]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_WAIT_LIMIT, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return Dump(problem=f"py-spy has not read it within {_WAIT_LIMIT:g} s")
    except OSError as error:
        return Dump(problem=f"py-spy can't be started: {error.strerror}")
    if text := _SEPARATOR.join(part for part in done.stdout.split(_SEPARATOR) if part.strip()):
        return Dump(text=text)  # also where py-spy ended with an error at a child that is not Python
    return Dump(problem=_explain(done.stderr, pid))


def _explain(complaint: str, pid: int) -> str:
    """Return py-spy's complaint in one clause."""
    if not psutil.pid_exists(pid):
        return "has ended"
    text = complaint.lower()
    if "permission denied" in text or "operation not permitted" in text:
        return f"the kernel does not let py-spy read it ({_find_guard()})"
    if "failed to find python version" in text:
        return _NOT_PYTHON
    first = next((line.strip() for line in complaint.splitlines() if line.strip()), "it gave no reason")
    return f"py-spy could not read it: {first.removeprefix('Error: ')}"


def _find_guard() -> str:
    """Return what forbids it, as far as this process can tell, and the mend."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as file:
            scope = int(file.read())
    except (OSError, ValueError):
        scope = 0
    if scope == 1:
        return f"kernel.yama.ptrace_scope is 1: start the job with {contract.ENV_PTRACE}=1, or ask as root"
    if scope:
        return f"kernel.yama.ptrace_scope is {scope}: only root may, or from 3 on no process"
    return "another user's process, or a container without CAP_SYS_PTRACE"

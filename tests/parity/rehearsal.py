"""Runs the cases of the matrix under both launchers, and keeps what torchrun did: it does the same the next time.

What was seen under torchrun is kept in pytest's cache. It is for the same torch, Python, machine and programs only:
all that could change it goes into the key. A fresh clone, as CI has, and `make clean` begin anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.parity.differences import ABSENT
from tests.parity.observed import INHERITED, Run
from tests.support.processes import kill_processes, processes_with_environment
from tests.support.torchrun import with_hosts_file, write_hosts_file

if TYPE_CHECKING:
    import pytest

    from tests.parity.matrix import Case

_TESTS = Path(__file__).parents[1]
#: What decides what is seen of a run, but for the launcher.
_SOURCES = ("parity/programs/**/*", "parity/matrix.py", "parity/observed.py", "parity/rehearsal.py", "support/*.py")
_CACHED = "elastic-run/torchrun"
#: Its program imports our package, which changes.
_NEVER_KEPT = ("recorded by elastic-run",)
#: Lines of /proc/self/status that workers inherit.
_INHERITED_STATUS = ("Umask:", "SigBlk:", "SigIgn:", "CapEff:", "Cpus_allowed:")


def _describe_surroundings() -> str:
    """Return a digest of all that a run under torchrun depends on."""
    files = sorted({path for pattern in _SOURCES for path in _TESTS.glob(pattern) if path.suffix not in {".pyc", ""}})
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    facts = [
        *(version("torch"), sys.version, sys.executable, os.uname().release, os.uname().nodename),
        *(f"{name}={os.environ.get(name)}" for name in sorted(INHERITED)),
        *(line for line in status if line.startswith(_INHERITED_STATUS)),
        *(Path("/proc/self", name).read_text(encoding="ascii") for name in ("limits", "oom_score_adj")),
        *(f"{path}: {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files),
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


class Rehearsal:
    """Runs cases under both launchers: under torchrun ahead of time, and each only once.

    Args:
        directory: Where the runs get their directories.
        ahead: The cases that will be asked for, in order.
        cache: Where to keep what was seen under torchrun; None keeps nothing.
    """

    def __init__(self, directory: Path, ahead: list[Case], cache: pytest.Cache | None = None) -> None:
        self._directory = directory
        self._programs = directory / "programs of the job"
        self._prefix = with_hosts_file([], write_hosts_file(directory))
        self._pool = ThreadPoolExecutor(2)
        self.token = uuid.uuid4().hex
        self._ours: dict[str, dict[str, Any]] = {}
        shutil.copytree(Path(__file__).with_name("programs"), self._programs)
        self._cache = cache
        self._key = _describe_surroundings()
        kept = {} if cache is None else cache.get(_CACHED, {})
        self._kept: dict[str, dict[str, Any]] = kept.get("seen", {}) if kept.get("key") == self._key else {}
        self._theirs = {case.name: self._start(case) for case in ahead if case.name not in self._kept}

    def under_torchrun(self, case: Case) -> dict[str, Any]:
        """Return what was seen of a case under torchrun."""
        if case.name in self._kept:
            return self._kept[case.name]
        if case.name not in self._theirs:
            self._theirs[case.name] = self._start(case)
        return self._theirs[case.name].result()

    def under_elastic_run(self, case: Case, token: str) -> dict[str, Any]:
        """Return what was seen of a case under elastic-run; `token` is the test's."""
        if case.name not in self._ours:
            self._ours[case.name] = self._observe(case, "elastic-run", token)
        return self._ours[case.name]

    def differences(self, case: Case, token: str) -> list[tuple[str, Any, Any]]:
        """Return key, torchrun's and elastic-run's for all that isn't the same."""
        ours = self.under_elastic_run(case, token)
        theirs = self.under_torchrun(case)
        keys = ["workers"] if theirs["workers"] != ours["workers"] else sorted({*theirs, *ours})
        pairs = ((key, theirs.get(key, ABSENT), ours.get(key, ABSENT)) for key in keys)
        return [(key, left, right) for key, left, right in pairs if left != right]

    def close(self) -> list[int]:
        """Wait for what runs, keep it, and return the pids of what torchrun has left behind, killed by now."""
        self._pool.shutdown(cancel_futures=True)
        done = {name: run.result() for name, run in self._theirs.items() if not run.cancelled() and not run.exception()}
        if self._cache is not None and done:
            seen = {name: facts for name, facts in {**self._kept, **done}.items() if name not in _NEVER_KEPT}
            self._cache.set(_CACHED, {"key": self._key, "seen": seen})
        left = processes_with_environment(self.token)
        kill_processes(left)
        return left

    def _start(self, case: Case) -> Future[dict[str, Any]]:
        return self._pool.submit(self._observe, case, "torchrun", self.token)

    def _observe(self, case: Case, launcher: str, token: str) -> dict[str, Any]:
        out = self._directory / launcher / case.name.replace(" ", "_")
        out.mkdir(parents=True)
        seen = Run(case, launcher, out=out, programs=self._programs, prefix=self._prefix, token=token).observe()
        normal: dict[str, Any] = json.loads(json.dumps(seen))  # as the cache gives it back
        return normal

"""Runs the cases of the matrix under both launchers, and returns all that can be compared, as a flat mapping.

Keys name what was seen ("exit code", "worker 1.0: umask", where 1.0 is rank and attempt), values are plain JSON. What
differs from run to run by nature is put in words before: the run's directories, ids, free ports.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_run.contract import ENV_CONTROL_DIR
from tests.parity.differences import ABSENT
from tests.parity.programs.observation import signal_names
from tests.support.launch import ELASTIC_RUN, launch
from tests.support.processes import TEST_TOKEN, kill_processes, processes_with_environment
from tests.support.terminal import Terminal
from tests.support.torchrun import TORCHRUN, with_hosts_file, write_hosts_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.parity.matrix import Case

_ROOT = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent

#: The commands that are compared, by launcher and front door.
COMMANDS = {
    "torchrun": {
        "run": TORCHRUN,
        "launch": (sys.executable, "-W", "ignore", "-m", "torch.distributed.launch"),
        "script": (sys.executable, str(_BIN / "torchrun")),
    },
    "elastic-run": {
        "run": ELASTIC_RUN,
        "launch": (sys.executable, "-W", "ignore", "-m", "elastic_run.launch"),
        "script": (sys.executable, str(_BIN / "elastic-run")),
    },
}

#: Variables that are not compared, and why.
UNCOMPARED = {
    TEST_TOKEN: "the tests' own, another one for each test",
    "PYTEST_CURRENT_TEST": "pytest's, another one for each test",
}

#: Variables that a run inherits; all others are taken away, so that each run of the tests sees the same.
INHERITED = frozenset({"PATH", "HOME", "LANG", "LC_ALL", "TERM", "TZ", "LD_LIBRARY_PATH"})
#: Variables that change from test to test.
_SET_BY_TESTS = frozenset({ENV_CONTROL_DIR, "PYTEST_CURRENT_TEST"})
#: One of those that a user may have, and that workers get unchanged.
_ANY_VARIABLE = ("PARITY_ANY", "a value = with *")

_RUN_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_WORKERS_LINE = re.compile(r"^([\[<].+[\]>]:?)?(probe: (out|err|waiting)|RuntimeError: probe: fails)")
#: torchrun's banner of stars, and our line. The empty line in front is the banner's too.
_THREADS_NOTICE = re.compile(r"OMP_NUM_THREADS|(^|\] )\**$")
_DEADLINE = 60.0
_PORTS = itertools.count(20000 + os.getpid() % 8000)


class Run:
    """One run of a case.

    Args:
        case: What to run.
        launcher: torchrun or elastic-run.
        out: An empty directory of its own.
        programs: The directory of programs, where it runs.
        prefix: Words in front of the command.
        token: Marks all that it starts, so that what it leaves behind is found.
    """

    def __init__(
        self, case: Case, launcher: str, *, out: Path, programs: Path, prefix: Sequence[str], token: str
    ) -> None:
        self._case = case
        self._out = out
        self._programs = programs
        shell = ("sh", "-c", f'{case.surroundings} exec "$@"', "sh") if case.surroundings else ()
        self._program = (*prefix, *shell, *COMMANDS[launcher][case.front_door])
        self._port = free_port()
        # A run begins in a thread, while pytest sets variables of the tests: none of them may get through.
        strangers: dict[str, str | None] = dict.fromkeys((os.environ.keys() | _SET_BY_TESTS) - INHERITED)
        self._env: dict[str, str | None] = (
            strangers
            | {
                _ANY_VARIABLE[0]: _ANY_VARIABLE[1],
                "PYTHONPATH": str(_ROOT),
                "PYTHONUNBUFFERED": None,  # -u has to do it
                "PARITY_OUT": str(out),
                "TMPDIR": str(out / "tmp"),
                TEST_TOKEN: token,
            }
            | {name: value and self._fill(value) for name, value in case.env.items()}
        )
        self._pid = 0
        self._run_id = ""
        (out / "tmp").mkdir()
        (out / "python").symlink_to(sys.executable)

    def observe(self) -> dict[str, Any]:
        """Run it to its end and return what was seen."""
        start = self._run_on_terminal if self._case.on_terminal else self._run
        code, stdout, stderr = start()
        attempts = dict(self._read_workers())
        self._run_id = next((seen["env TORCHELASTIC_RUN_ID"] for seen in attempts.values()), "")
        seen = {"exit code": code, "workers": sorted(attempts), **_read_console(stdout, stderr)}
        seen |= {f"worker {who}: {name}": value for who, facts in attempts.items() for name, value in facts.items()}
        seen |= _read_addresses(attempts)
        seen |= dict(self._read_files())
        seen = {name: self._put_in_words(value) for name, value in seen.items()}
        for name in [name for name in seen if name.endswith(" env MASTER_PORT")]:
            seen[name] = "a free one" if seen[name].isdigit() else seen[name]
        return seen

    def _fill(self, text: str) -> str:
        names = {"port": str(self._port), "logs": f"{self._out}/logs", "out": str(self._out), "python": sys.executable}
        for name, value in names.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    def _run(self) -> tuple[int, str, str]:
        case = self._case
        job = launch(
            *map(self._fill, case.arguments),
            env=self._env,
            program=self._program,
            cwd=self._programs,
            stdin=subprocess.DEVNULL if case.stdin is None else subprocess.PIPE,
            merge=case.is_merged,
        )
        with job:
            self._pid = job.pid
            if job.process.stdin is not None and case.stdin is not None:
                job.process.stdin.write(case.stdin.encode())
                job.process.stdin.close()
            if case.stops:
                job.wait_lines("probe: waiting", count=case.workers, deadline=_DEADLINE)
                job.process.terminate()
            return job.wait_exit(deadline=_DEADLINE), job.stdout, job.stderr

    def _run_on_terminal(self) -> tuple[int, str, str]:
        program = ("sh", "-c", 'cd "$0" && exec "$@"', str(self._programs), *self._program)
        with Terminal() as terminal:
            process = terminal.start(*map(self._fill, self._case.arguments), env=self._env, program=program)
            self._pid = process.pid
            code = terminal.wait_exit(deadline=_DEADLINE)
            return code, bytes(terminal.output).decode(), ""

    def _read_workers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in sorted(self._out.glob("[0-9].[0-9].json")):
            seen = json.loads(path.read_text(encoding="utf-8"))
            seen["parent"] = "the launcher" if seen["parent"] == self._pid else "another"
            seen |= {f"limit {name}": value for name, value in seen.pop("limits").items()}
            yield path.stem, _spread_environment(seen)
        for path in sorted(self._out.glob("[0-9].[0-9].facts")):
            yield path.stem, _spread_environment(_read_shell_facts(path))

    def _read_files(self) -> Iterator[tuple[str, Any]]:
        """Everything that the run has left in files, but for what workers saw."""
        for path in sorted(self._out.glob("*.signals.json")):
            yield f"worker {path.name[:3]}: signals that came", json.loads(path.read_text(encoding="utf-8"))
        parent = self._out / "parent.json"
        yield "parent's error file", _read_error_file(parent) if parent.exists() else None
        yield "left in TMPDIR", sorted({re.sub("_.*", "_$RANDOM", path.name) for path in (self._out / "tmp").iterdir()})
        logs = self._out / "logs"
        paths = sorted(path for path in logs.rglob("*") if path.is_file())
        yield "log files", [str(path) for path in sorted(logs.rglob("*"))]
        for path in paths:
            read = _read_error_file if path.name == "error.json" else _read_log
            if path.name not in {"failure.json", "events.jsonl"}:  # their schemas have tests of their own
                yield self._put_in_words(str(path)), read(path)

    def _put_in_words(self, value: Any) -> Any:
        """Replace what differs from run to run by nature."""
        if isinstance(value, (list, tuple)):
            return [self._put_in_words(item) for item in value]
        if isinstance(value, dict):
            return {name: self._put_in_words(item) for name, item in value.items()}
        if not isinstance(value, str):
            return value
        text = value.replace(str(self._out), "$OUT").replace(str(self._programs), "$PROGRAMS")
        if self._run_id:
            name = rf"/(?:{re.escape(self._run_id)}_[^/]+|\d{{8}}-\d{{4}}_[^/]+_[0-9a-f]{{4}}(?=/|$))"
            text = re.sub(name, f"/{self._run_id}_$RANDOM", text)
        text = re.sub(r"\$OUT/tmp/.*?/attempt_", "$TMP/attempt_", text)
        return _RUN_ID.sub("$ID", text).replace(str(self._port), "$PORT")  # a random id may have the port's digits


def free_port() -> int:
    """Return a port that nobody has, below those that the kernel gives out by itself."""
    for port in _PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))  # noqa: S104 - torch's store is on every interface
            except OSError:
                continue
            return port
    raise AssertionError


def _spread_environment(seen: dict[str, Any]) -> dict[str, Any]:
    environment = seen.pop("env")
    return seen | {f"env {name}": value for name, value in environment.items() if name not in UNCOMPARED}


def _read_shell_facts(path: Path) -> dict[str, Any]:
    """Read what the program that is no Python has written."""
    where, mask, status = path.read_text(encoding="utf-8").splitlines()
    variables = path.with_suffix(".env").read_text(encoding="utf-8").split("\0")[:-1]
    return {
        "argv": path.with_suffix(".argv").read_text(encoding="utf-8").split("\0")[:-1],
        "env": dict(variable.split("=", 1) for variable in variables),
        "cwd": where,
        "umask": mask,
        "ignored signals": signal_names(status.partition(":\t")[2]),
    }


def _read_console(stdout: str, stderr: str) -> dict[str, Any]:
    """Split the console in what workers wrote, in any order among them, and what the launcher did."""
    seen: dict[str, Any] = {"notice of threads": []}
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        lines = text.splitlines()
        seen[f"workers' lines on {name}"] = sorted(line for line in lines if _WORKERS_LINE.search(line))
        own = [line for line in lines if not _WORKERS_LINE.search(line)]
        seen["notice of threads"] += [line for line in own if _THREADS_NOTICE.search(line)]
        seen[f"launcher's lines on {name}"] = [line for line in own if not _THREADS_NOTICE.search(line)]
    return seen


def _read_addresses(attempts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Whether the workers of an attempt have one address, and how many all attempts have."""
    by_attempt: dict[str, set[str]] = {}
    for who, seen in attempts.items():
        address = seen["env MASTER_ADDR"] + ":" + seen["env MASTER_PORT"]
        by_attempt.setdefault(who.partition(".")[2], set()).add(address)
    return {
        "all ranks have one address": all(len(addresses) == 1 for addresses in by_attempt.values()),
        "addresses of all attempts": len(set().union(*by_attempt.values())),
    }


def _read_log(path: Path) -> list[str]:
    """Several ranks write filtered files, in any order."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return sorted(lines) if path.name.startswith("filtered_") else lines


def _read_error_file(path: Path) -> Any:
    content = json.loads(path.read_text(encoding="utf-8"))
    timestamp = content["message"]["extraInfo"]["timestamp"]
    content["message"]["extraInfo"]["timestamp"] = "$SECONDS" if re.fullmatch(r"\d{10}", timestamp) else timestamp
    return content


# --- both launchers --------------------------------------------------------------------------------------------------


class Rehearsal:
    """Runs cases under both launchers: under torchrun ahead of time, and each only once.

    Args:
        directory: Where the runs get their directories.
        ahead: The cases that will be asked for, in order.
    """

    def __init__(self, directory: Path, ahead: list[Case]) -> None:
        self._directory = directory
        self._programs = directory / "programs of the job"
        self._prefix = with_hosts_file([], write_hosts_file(directory))
        self._pool = ThreadPoolExecutor(2)
        self.token = uuid.uuid4().hex
        self._ours: dict[str, dict[str, Any]] = {}
        shutil.copytree(Path(__file__).with_name("programs"), self._programs)
        self._theirs = {case.name: self._start(case) for case in ahead}

    def under_torchrun(self, case: Case) -> dict[str, Any]:
        """Return what was seen of a case under torchrun."""
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
        """Wait for what runs, and return the pids of what torchrun has left behind, killed by now."""
        self._pool.shutdown(cancel_futures=True)
        left = processes_with_environment(self.token)
        kill_processes(left)
        return left

    def _start(self, case: Case) -> Future[dict[str, Any]]:
        return self._pool.submit(self._observe, case, "torchrun", self.token)

    def _observe(self, case: Case, launcher: str, token: str) -> dict[str, Any]:
        out = self._directory / launcher / case.name.replace(" ", "_")
        out.mkdir(parents=True)
        return Run(case, launcher, out=out, programs=self._programs, prefix=self._prefix, token=token).observe()

"""Start and restart warm workers many times, with everything that programs do with processes and threads.

    python -m tests.chaos.preloaded                             20 starts and 20 restarts
    python -m tests.chaos.preloaded --starts 500 --restarts 500 --busy 2

A job fails the command if a start or a restart takes longer than the deadline, if the launcher ends with another code
than the worker that failed, if a line or an `atexit` of a worker is lost, or if a process of the job is still there
afterwards. The command then shows the job's output and, where it has not ended, the stacks of all its processes.
`--busy` keeps so many processors busy beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.processes import describe, kill_processes, processes_with_environment
from tests.support.wait import DeadlinePassedError, wait_until

_TRAINING = Path(__file__).with_name("preloaded_training.py")
_WORKERS = 2
#: Seconds for a start or a restart. A machine that is shared may need ten times what an idle one does.
_DEADLINE = 240.0
#: Seconds for processes that multiprocessing ends with the worker that started them.
_LAST_PROCESSES = 10.0
#: Every so many jobs fail in their last round too. It has no factor in common with the ways to fail.
_FAILING = 7
#: How many seeds share a cache of the compiler, since a job without one takes half a minute longer.
_CACHED = 20
#: Restarts of one job.
_RESTARTS = 20
#: Exit codes of the ways to fail, in the order of `preloaded_training`.
_EXIT_CODES = (1, 3, 128 + signal.SIGKILL, 1)
#: Every process of a job has this variable.
_NAME = "PRELOADED_JOB"


def say(line: str) -> None:
    """Print a line at once."""
    print(f"preloaded: {line}", flush=True)  # noqa: T201 - a command prints


class WrongJobError(Exception):
    """A job did not end, or did not end well; the text has all that is known."""


def run_job(directory: Path, *, seed: int, restarts: int, failures: int) -> None:
    """Run one job under --preload to its end."""
    output = directory.with_suffix(".txt")
    cache = directory.with_name(f"compiled.{seed // _CACHED}")
    with output.open("wb") as out:
        job = subprocess.Popen(
            [sys.executable, "-m", "elastic_run", "--standalone", f"--nproc-per-node={_WORKERS}", "--preload=torch",
             f"--max-restarts={restarts}", "--shutdown-timeout=20", _TRAINING, directory, str(failures)],
            stdout=out, stderr=subprocess.STDOUT,
            env={**os.environ, "PART_SEED": str(seed), "TORCHINDUCTOR_CACHE_DIR": str(cache), _NAME: directory.name},
        )  # fmt: skip
    try:
        code = _wait_exit(job, directory)
        wait_until(lambda: not _processes(directory), deadline=_LAST_PROCESSES)
    except (subprocess.TimeoutExpired, DeadlinePassedError) as error:
        seen = "\n".join(_describe_with_stack(pid) for pid in _processes(directory))
        job.kill()
        job.wait()
        kill_processes(_processes(directory))
        message = f"{directory.name} is not over:\n{seen}\n{output.read_text(errors='replace')}"
        raise WrongJobError(message) from error
    expected = _EXIT_CODES[(seed + restarts) % len(_EXIT_CODES)] if failures > restarts else 0
    text = output.read_text(errors="replace")
    wrong = [] if code == expected else [f"ended with {code}, not with {expected}"]
    wrong += [f"{line} was printed {count} times" for line, count in _counted_lines(directory, text) if count != 1]
    wrong += [f"no {name}" for name in _last_files(restarts) if not expected and not (directory / name).exists()]
    if wrong:
        message = f"{directory.name}: {', '.join(wrong)}:\n{text}"
        raise WrongJobError(message)


def _wait_exit(job: subprocess.Popen[bytes], directory: Path) -> int:
    """Wait for a job's end while its workers write within each deadline; return its exit code."""
    written = -1
    while (count := len(list(directory.iterdir()))) > written:
        written = count
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.wait(_DEADLINE)
    raise subprocess.TimeoutExpired(job.args, _DEADLINE)


def _processes(directory: Path) -> list[int]:
    return processes_with_environment(directory.name, name=_NAME)


def _describe_with_stack(pid: int) -> str:
    """Describe a process, with what the kernel and py-spy know of its threads."""
    tool = Path(sys.executable).with_name("py-spy")
    said = subprocess.run([tool, "dump", "--native", "--pid", str(pid)], capture_output=True, text=True, check=False)
    waits = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            waits.append(f"{task.name}: {(task / 'wchan').read_text()} {(task / 'syscall').read_text().strip()}")
    return "\n".join([describe(pid), *waits, said.stdout + said.stderr])


def _counted_lines(directory: Path, text: str) -> list[tuple[str, int]]:
    """Return each line that a worker has printed, and how often it stands in the output."""
    lines = text.splitlines()
    return [(path.name, lines.count(path.name)) for path in directory.iterdir() if not path.match("done.*")]


def _last_files(restart: int) -> list[str]:
    return [f"{name}.{restart}.{rank}" for name in ("started", "worked", "done") for rank in range(_WORKERS)]


def _burn() -> None:
    while True:
        pass


def _run_jobs(top: Path, *, starts: int, restarts: int, seed: int) -> None:
    begin = time.monotonic()
    jobs = [0] * starts + [_RESTARTS] * (restarts // _RESTARTS) + [restarts % _RESTARTS] * bool(restarts % _RESTARTS)
    restarted = 0
    for number, each in enumerate(jobs):
        directory = top / f"{os.getpid()}-{seed + number}"
        directory.mkdir()
        is_failing = number % _FAILING == _FAILING - 1
        run_job(directory, seed=seed + number, restarts=each, failures=each + is_failing)
        restarted += each
        if number % 10 == 9:
            say(f"{min(number + 1, starts)} starts and {restarted} restarts in {time.monotonic() - begin:.0f} s")
    say(f"{starts} starts and {restarted} restarts in {time.monotonic() - begin:.0f} s: ok")


def main() -> int:
    """Run the starts and the restarts; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.preloaded")
    parser.add_argument("--starts", type=int, default=20, help="jobs without a restart")
    parser.add_argument("--restarts", type=int, default=20, help=f"in further jobs of {_RESTARTS} each")
    parser.add_argument("--busy", type=int, default=0, help="processors to keep busy")
    parser.add_argument("--seed", type=int, default=0, help="of the first start")
    arguments = parser.parse_args()
    busy = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(arguments.busy)]
    for process in busy:
        process.start()
    with tempfile.TemporaryDirectory(prefix="preloaded-") as top:
        try:
            _run_jobs(Path(top), starts=arguments.starts, restarts=arguments.restarts, seed=arguments.seed)
        except WrongJobError as error:
            say(f"FAILED: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

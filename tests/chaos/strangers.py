"""Run random jobs beside processes that they did not start: none of these gets a signal, and no line names one.

    python -m tests.chaos.strangers             20 jobs
    python -m tests.chaos.strangers --jobs 500

Each job has other workers, flags, surroundings and another end, all of which follow from its seed. When a worker may
have ended, strangers begin beside it. A stranger notes each signal that it gets; a job fails the command if a stranger
has noted a signal, has ended, or is in the job's output.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.support.launch import ELASTIC_RUN
from tests.support.processes import children_of, describe, is_gone, kill_processes, processes_with_environment
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Every process of a job that keeps its environment has this variable.
_NAME = "STRANGERS_JOB"
#: Says its pid in a file, and each signal that it gets.
_STRANGER = """
import os, signal, sys
def note(number, _=None): os.write(notes, b"%d\\n" % number)
notes = os.open(sys.argv[1] + ".new", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}: signal.signal(number, note)
note(os.getpid())
os.rename(sys.argv[1] + ".new", sys.argv[1])
while True: signal.pause()
"""
#: What a worker does, in a shell.
_BEHAVIOURS = (
    "exit 0",
    "sleep 0.4",
    "sleep 0.4; exit 3",
    "sleep 0.4; kill -9 $$$$",
    "{rest} & sleep 0.1; exit 0",
    "setsid {rest} & sleep 0.1; exit 0",
    "(setsid {rest} &) ; exit 0",
    "(env -i setsid {rest} &) ; sleep 0.2",
    "trap '' TERM; sleep 0.5; sleep 0.5",
)
_FLAGS = (
    "--max-restarts=1",
    "--kill-background-processes",
    "--tee=3",
    "--no-capture",
    "--shutdown-timeout=1",
    "--forward-signals=SIGUSR1",
)
#: How the launcher begins: by itself, behind a helper that goes on, or as the first process of a container.
_SURROUNDINGS = ("plain", "plain", "helper", "container")
#: What a stranger has in common with the job.
_KINDS = ("terminal", "output", "environment", "session", "daemon")
_CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")
_ENTER = ("nsenter", "--user", "--preserve-credentials", "--pid", "--mount")


class StrangerError(Exception):
    """A stranger was signalled or named; the text has all that is known."""


class Job:
    """A job, and the strangers beside it.

    Args:
        directory: An empty directory.
        seed: Everything follows from it.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._choose = random.Random(seed)  # noqa: S311 - no secret
        self._env = {**os.environ, _NAME: f"{os.getpid()}-{seed}"}
        self._rest = ["sleep", f"{1000 + seed}.{os.getpid()}"]
        self._terminals: list[int] = []
        self._notes: list[Path] = []
        self._surroundings = self._choose.choice(_SURROUNDINGS)
        self._output, self._writing = os.openpty() if self._choose.random() < 0.5 else os.pipe()
        os.set_blocking(self._output, False)
        self._text = b""

    def run(self) -> None:
        """Run it to its end."""
        job = subprocess.Popen(
            self._command(), env=self._env, stdout=self._writing, stderr=self._writing, start_new_session=True
        )
        try:
            time.sleep(self._choose.uniform(0.1, 0.5))
            for kind in self._choose.choices(_KINDS, k=3):
                self._begin(kind, job.pid)
            time.sleep(self._choose.uniform(0.0, 0.5))
            if number := self._choose.choice((0, 0, signal.SIGTERM, signal.SIGINT, signal.SIGKILL)):
                for pid in self._launchers(job.pid):
                    os.kill(pid, number)
            wait_until(lambda: self._has_ended(job), what="the job's end")
            wait_until(lambda: not self._find_guardians(), what="the guardians' end")
            self._check()
        finally:
            self._end(job)

    def _command(self) -> list[str]:
        count = self._choose.randint(1, 3)
        behaviours = enumerate(self._choose.choices(_BEHAVIOURS, k=count))
        cases = " ".join(f"{rank}) {behaviour};;" for rank, behaviour in behaviours)
        script = f"case $$RANK in {cases} esac".format(rest=shlex.join(self._rest))
        flags = [flag for flag in _FLAGS if self._choose.random() < 0.3]
        command = [*ELASTIC_RUN, "--standalone", "--max-backoff=0", f"--nproc-per-node={count}", *flags]
        command += ["--no-python", "sh", "-c", script]
        if self._surroundings == "container":
            return [*_CONTAINER, *command]
        if self._surroundings == "helper":
            daemon = shlex.join(self._stranger())
            helper = f"(sleep 0.3; ({daemon} </dev/null >/dev/null 2>&1 &)) & exec " + '"$@"'
            return ["sh", "-c", helper, "sh", *command]
        return command

    def _stranger(self) -> list[str]:
        """Return the command of another stranger."""
        self._notes.append(self._directory / f"stranger-{len(self._notes)}")
        plain = [f"{name}={value}" for name, value in self._env.items() if name != _NAME]
        return ["env", "-i", *plain, "setsid", sys.executable, "-c", _STRANGER, str(self._notes[-1])]

    def _begin(self, kind: str, job: int) -> None:
        """Begin a stranger that has something in common with the job."""
        command, env, output = self._stranger(), dict(os.environ), subprocess.DEVNULL
        session: tuple[str, ...] = ()
        if kind == "terminal":
            master, output = os.openpty()
            self._terminals += [master, output]
        elif kind == "output":
            output = self._writing
        elif kind == "environment":
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{job}/environ").read_bytes().decode().rstrip("\0").split("\0")
                env = dict(variable.split("=", 1) for variable in variables if not variable.startswith(_NAME))
                command = command[command.index("setsid") :]
        elif kind == "session":  # its leader has ended
            session = ("setsid",)
            command.remove("setsid")
        enter: tuple[str, ...] = ()
        if self._surroundings == "container" and (first := children_of(job)):
            enter = (_ENTER[0], f"--target={first[0]}", *_ENTER[1:])
        # In the background of a shell: the stranger is an orphan, as a daemon is.
        words = [*enter, *session, "sh", "-c", '"$@" &', "sh", *command]
        subprocess.run(words, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)

    def _launchers(self, job: int) -> list[int]:
        return children_of(job)[:1] if self._surroundings == "container" else [job]

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            self._text += os.read(self._output, 1 << 16)

    def _has_ended(self, job: subprocess.Popen[bytes]) -> bool:
        self._read()  # a launcher whose output nobody reads would not end
        return job.poll() is not None

    def _find_guardians(self) -> list[int]:
        found = processes_with_environment(self._env[_NAME], name=_NAME)
        return [pid for pid in found if "guardian of" in describe(pid)]

    def _check(self) -> None:
        self._read()
        text = self._text.decode(errors="replace")
        for path in self._notes:
            if not path.exists():
                continue  # it had not begun when its container ended
            pid, *numbers = path.read_text().split()
            is_named = re.search(rf"\bpid {pid}\b", text) or path.name in text
            is_over = self._surroundings != "container" and is_gone(int(pid))
            if numbers or is_named or is_over:
                found = f"signals {numbers}, ended {is_over}, named {bool(is_named)}"
                message = f"{path.name} beside a job ({self._surroundings}): {found}\n{text}"
                raise StrangerError(message)

    def _end(self, job: subprocess.Popen[bytes]) -> None:
        """End all that is left."""
        job.kill()
        job.wait()
        kill_processes(processes_with_environment(self._env[_NAME], name=_NAME))
        kill_processes([each.pid for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == self._rest])
        if self._surroundings != "container":
            kill_processes([int(path.read_text().split()[0]) for path in self._notes if path.exists()])
        for descriptor in (*self._terminals, self._output, self._writing):
            os.close(descriptor)


def run_jobs(seeds: Iterable[int]) -> None:
    """Run the jobs of some seeds, one after another."""
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="strangers.") as directory:
            try:
                Job(Path(directory), seed).run()
            except StrangerError as error:
                message = f"seed {seed}: {error}"
                raise StrangerError(message) from None


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    arguments = parser.parse_args()
    run_jobs(range(arguments.seed, arguments.seed + arguments.jobs))
    print(f"strangers: no stranger was signalled or named in {arguments.jobs} jobs")  # noqa: T201 - a command prints


if __name__ == "__main__":
    main()

"""A launcher reduced to its output: a loop, a console, and workers that are one line of Python each.

Run as ``python -m tests.support.output_job SPEC``, a JSON object:
- ``workers``: for each ``code``, and ``streams``: the paths ``stdout`` and ``stderr``, whether they are tee'd
  (``tee_stdout``, ``tee_stderr``), and the ``prefix``;
- ``capture``: as of `Wiring`; ``filters``: ``stdout`` and ``stderr``, files, and for each its ``_filters``;
- ``notes``: a directory. It gets ``pid`` and ``pid<rank>`` at the start, ``usr1`` whenever the loop sees SIGUSR1, and
  ``tail<rank>`` and the process's ``status`` at the end;
- ``say``: a line that the launcher says when all workers have ended, before what is left is flushed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from elastic_run.loop import Loop
from elastic_run.multiprocessing.fork_exec import ensure_standard_descriptors, start_process
from elastic_run.multiprocessing.logs import LogsDest
from elastic_run.multiprocessing.output.console import Console
from elastic_run.multiprocessing.output.worker_output import WorkerOutput
from elastic_run.multiprocessing.wiring import Wiring


class Job:
    """The workers of a specification."""

    def __init__(self, spec: dict[str, Any], loop: Loop) -> None:
        self.spec = spec
        self.notes = Path(spec["notes"])
        self.loop = loop
        self.console = Console(loop)
        self.wiring = Wiring(capture=spec.get("capture", True))
        self.output = WorkerOutput(loop, self.console, self.wiring)
        self.prefixes: dict[int, str] = {}
        self.alive: set[int] = set()

    def run(self) -> None:
        """Run the workers to their end, and write all they said."""
        self.loop.watch_signals([signal.SIGUSR1], lambda _: self.note("usr1", b""))
        self.loop.watch_signals([signal.SIGWINCH], lambda _: self.output.resize())
        if "filters" in self.spec:
            filters = self.spec["filters"]
            logs = LogsDest(filtered_stdout=filters["stdout"], filtered_stderr=filters["stderr"])
            self.output.open_filtered(logs, filters["stdout_filters"], filters["stderr_filters"])
        for rank, worker in enumerate(self.spec["workers"]):
            self.start(rank, worker)
        self.output.attach(lambda rank: self.prefixes[rank])
        self.note("pid", b"%d" % os.getpid())
        self.loop.run_until(lambda: not self.alive)
        for rank in range(len(self.spec["workers"])):
            self.note(f"tail{rank}", self.output.tail(rank))
        self.output.close()
        if "say" in self.spec:
            self.console.say(self.spec["say"])
        self.loop.run_until(lambda: self.console.is_idle)
        self.console.close()
        self.note("status", Path("/proc/self/status").read_bytes())

    def start(self, rank: int, worker: dict[str, Any]) -> None:
        """Start one worker."""
        streams = worker["streams"]
        self.prefixes[rank] = streams.get("prefix", "")
        logs = LogsDest({rank: streams["stdout"]}, {rank: streams["stderr"]})
        for name, tees in (("tee_stdout", logs.tee_stdouts), ("tee_stderr", logs.tee_stderrs)):
            if streams.get(name):
                tees[rank] = streams[name.removeprefix("tee_")] or "console"
        stdout, stderr = self.wiring.open(rank, logs)
        argv = [sys.executable, "-S", "-E", "-u", "-c", "import os, sys\n" + worker["code"]]
        pid = start_process(argv, os.environ, stdout=stdout, stderr=stderr)
        self.wiring.started(rank)
        self.alive.add(rank)
        self.note(f"pid{rank}", b"%d" % pid)
        self.loop.watch_exit(pid, lambda _: self.end(rank))

    def end(self, rank: int) -> None:
        """Take a worker's last words."""
        self.output.finish(rank)
        self.alive.discard(rank)

    def note(self, name: str, data: bytes) -> None:
        """Leave a file for the test, whole or not at all."""
        half = self.notes / f".{name}"
        half.write_bytes(data)
        half.rename(self.notes / name)


if __name__ == "__main__":
    ensure_standard_descriptors()
    with Loop() as main_loop:
        Job(json.loads(sys.argv[1]), main_loop).run()

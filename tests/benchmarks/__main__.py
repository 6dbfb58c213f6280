"""Run benchmarks, print the table, record it: ``python -m tests.benchmarks [start] [tee] …``.

Figures are recorded in docs/benchmarks.json and docs/benchmarks.md unless a run was shortened. The exit code is 1 when
a bar was missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
import uuid
from dataclasses import fields
from pathlib import Path
from tempfile import mkdtemp

from tests.benchmarks import (
    detection,
    functions,
    meetings,
    meetings_of_nodes,
    memory,
    nodes,
    orphans,
    scale,
    start,
    tee,
)
from tests.benchmarks.effort import Effort
from tests.benchmarks.figures import ORDER, Figure, console_lines, record, write_readme
from tests.benchmarks.installation import install
from tests.benchmarks.job import BenchmarkError
from tests.support.processes import TEST_TOKEN, describe, kill_processes, processes_with_environment
from tests.support.torchrun import with_hosts_file, write_hosts_file

#: Set in the process that sees the hosts file, to the directory for everything temporary.
_DIRECTORY = "ELASTIC_RUN_BENCHMARKS"
#: Load average up to which figures mean something.
_QUIET = 0.5
_BENCHMARKS = {
    "start": start.measure,
    "functions": functions.measure,
    "memory": memory.measure,
    "detection": detection.measure,
    "orphans": orphans.measure,
    "meetings": meetings.measure,
    "nodes": nodes.measure,
    "meetings_of_nodes": meetings_of_nodes.measure,
    "scale": scale.measure,
    "tee": tee.measure,
}


def main() -> int:
    """Do what the command line says, and return the exit code."""
    options = _parse()
    if options.readme:
        return _update_readme()
    if _DIRECTORY not in os.environ:
        _enter_namespace()
    directory = Path(os.environ.pop(_DIRECTORY))
    try:
        return _run(options, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="elastic-run beside torchrun")
    parser.add_argument("names", nargs="*", metavar="benchmark", help=f"{', '.join(ORDER)}; all unless given")
    parser.add_argument("--readme", action="store_true", help="put the recorded figures into README.md, and end")
    for field in fields(Effort):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help="default: %(default)s")
    options = parser.parse_args()
    unknown = set(options.names) - set(ORDER)
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}: there are {', '.join(ORDER)}")
    return options


def _update_readme() -> int:
    if write_readme():
        return 0
    print("README.md has no block between <!-- benchmarks --> and <!-- /benchmarks -->", file=sys.stderr)
    return 1


def _enter_namespace() -> None:
    """Become the same program where names resolve at once, so that torchrun's store doesn't stall."""
    directory = Path(mkdtemp(prefix="elastic-run-benchmarks-"))
    os.environ[_DIRECTORY] = str(directory)
    command = [sys.executable, "-m", "tests.benchmarks", *sys.argv[1:]]
    command = with_hosts_file(command, write_hosts_file(directory))
    os.execvp(command[0], command)  # noqa: S606 - ourselves


def _run(options: argparse.Namespace, directory: Path) -> int:
    effort = Effort(**{field.name: getattr(options, field.name) for field in fields(Effort)})
    names = [name for name in ORDER if not options.names or name in options.names]
    load = os.getloadavg()[0]
    if load > _QUIET:
        print(f"the machine is busy (load average {load:.1f}): expect figures that are too high", file=sys.stderr)
    installation = install(directory)
    figures: list[Figure] = []
    failed: list[str] = []
    for name in names:
        begun = time.monotonic()
        try:
            figures += _BENCHMARKS[name](installation, effort)
        except BenchmarkError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    print("\n".join(console_lines(figures)))
    print("\n".join(f"  {figure.name}: {figure.note}" for figure in figures if figure.note))
    if effort == Effort():
        record(figures, load=load)
    return 0 if not failed and all(figure.is_met for figure in figures) else 1


def _run_marked() -> int:
    """Mark all that is started, and leave none of it behind, however this ends."""
    token = os.environ[TEST_TOKEN] = uuid.uuid4().hex
    try:
        return main()
    finally:
        left = processes_with_environment(token)
        for pid in left:
            print(f"left behind: {describe(pid)}", file=sys.stderr)
        kill_processes(left)


if __name__ == "__main__":
    sys.exit(_run_marked())

"""Run benchmarks, print the table, record it: ``python -m benchmarks [start] [tee] …``.

Figures take the place of those of the same benchmarks in docs/benchmarks.json, and the page, its plots and the README's
block are written anew; not those of a shortened run, nor of a benchmark before which others kept the machine busy. The
exit code is 1 when a bar was missed, or torchrun did better in any row.
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

from benchmarks import (
    connections,
    detection,
    diagnosis,
    functions,
    hosts,
    memory,
    nodes,
    orphans,
    scale,
    start,
    state,
    tee,
    warm,
)
from benchmarks.figures import HEADINGS, Figure
from benchmarks.installation import Effort, Installation, install
from benchmarks.job import BenchmarkError
from benchmarks.page import write_pages
from benchmarks.recording import ORDER, describe_run, merge, read_record, write_record
from tests.support.processes import TEST_TOKEN, describe, kill_processes, processes_with_environment
from tests.support.torchrun import with_hosts_file, write_hosts_file

#: Set in the process that sees the hosts file, to the directory for everything temporary.
_DIRECTORY = "ELASTIC_RUN_BENCHMARKS"
#: Share of the processors that others may keep busy before a benchmark whose figures mean something.
_QUIET = 0.1
#: Seconds for which that share is measured; a tick is a hundredth of a second, on each processor.
_LOOK = 0.5
BENCHMARKS = {
    "start": start.measure,
    "warm": warm.measure,
    "functions": functions.measure,
    "memory": memory.measure,
    "detection": detection.measure,
    "orphans": orphans.measure,
    "worker_connections": connections.measure_workers,
    "nodes": nodes.measure,
    "hosts": hosts.measure,
    "node_connections": connections.measure_nodes,
    "scale": scale.measure,
    "state": state.measure,
    "tee": tee.measure,
    "diagnosis": diagnosis.measure,
}


def main() -> int:
    """Do what the command line says, and return the exit code."""
    options = _parse()
    if options.figures:
        write_pages(read_record())
        return 0
    if _DIRECTORY not in os.environ:
        _enter_namespace()
    directory = Path(os.environ.pop(_DIRECTORY))
    try:
        return _run(options, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="elastic-run beside torchrun")
    parser.add_argument("names", nargs="*", metavar="benchmark", help=f"{', '.join(ORDER)}; all unless given")
    parser.add_argument(
        "--figures",
        action="store_true",
        help="write page, plots and README of what is recorded, and end",
    )
    parser.add_argument("--record", action="store_true", help="record what a busy machine measures as well")
    for field in fields(Effort):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help="default: %(default)s")
    options = parser.parse_args()
    unknown = set(options.names) - set(ORDER)
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}: there are {', '.join(ORDER)}")
    return options


def _enter_namespace() -> None:
    """Become the same program where names resolve at once, so that torchrun's store doesn't stall."""
    directory = Path(mkdtemp(prefix="elastic-run-benchmarks-"))
    os.environ[_DIRECTORY] = str(directory)
    command = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
    command = with_hosts_file(command, write_hosts_file(directory))
    os.execvp(command[0], command)  # noqa: S606 - ourselves


def _run(options: argparse.Namespace, directory: Path) -> int:
    effort = Effort(**{field.name: getattr(options, field.name) for field in fields(Effort)})
    installation = install(directory)
    names = [name for name in ORDER if not options.names or name in options.names]
    measured: dict[str, list[Figure]] = {}
    for name in names:
        try:
            measured[name] = _measure(name, installation, effort, is_always_recorded=options.record)
        except BenchmarkError as error:
            print(f"{name}: {error}", file=sys.stderr)
    code = _report([figure for figures in measured.values() for figure in figures])
    return code if len(measured) == len(names) else 1


def _measure(name: str, installation: Installation, effort: Effort, *, is_always_recorded: bool) -> list[Figure]:
    """Run a benchmark, and record it at once: what follows may take an hour, and fail."""
    busy = _busy_share()
    if busy > _QUIET:
        print(f"{name}: others keep {busy:.0%} of the processors busy: expect figures that are too high")
    begun = time.monotonic()
    figures = BENCHMARKS[name](installation, effort)
    seconds = time.monotonic() - begun
    print(f"{name}: {seconds:.0f} s", file=sys.stderr)
    if effort != Effort():
        print(f"{name}: not recorded: a shortened run")
    elif busy > _QUIET and not is_always_recorded:
        print(f"{name}: not recorded: the machine is busy, see --record")
    else:
        run = describe_run(busy=busy, seconds=seconds, ft_launcher=installation.ft_launcher_version)
        write_record(merge(read_record(), {name: run}, figures))
        write_pages(read_record())
    return figures


def _busy_share() -> float:
    """Return which share of the processors is busy while this process sleeps.

    A load average still holds what the benchmark before did, minutes later. The kernel's count of ticks holds the half
    second alone; what the host of a virtual machine takes away counts as busy as well.
    """

    def ticks() -> list[int]:
        # The ticks of virtual machines, behind the eighth field, are in others already.
        return [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]

    before = ticks()
    time.sleep(_LOOK)
    passed = [now - then for now, then in zip(ticks(), before, strict=True)]
    idle_or_waiting_for_a_disk = sum(passed[3:5])
    return 1 - idle_or_waiting_for_a_disk / max(sum(passed), 1)


def _report(figures: list[Figure]) -> int:
    """Print figures and what is amiss with them; returns the exit code."""
    rows = [list(HEADINGS), *(figure.cells() for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("\n".join(f"  {figure.name}: {figure.note}" for figure in figures if figure.note))
    worse = [figure.name for figure in figures if figure.is_worse]
    if worse:
        print(f"torchrun did better: {'; '.join(worse)}")
    return 0 if not worse and all(figure.is_met for figure in figures) else 1


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

"""Kill one agent after another with SIGKILL, without waiting for the job to recover, and start each again soon.

    python -m tests.chaos.deaths                                        30 kills, one every 2 s, a seed of the moment
    python -m tests.chaos.deaths --faults 300 --every 2 --longest 1     10 minutes
    python -m tests.chaos.deaths --seed 17 --seeds 20 --guardians       20 jobs; half of the kills take guardians too

Three virtual hosts, and an endpoint on each. A node is dead for up to `--longest` seconds. What must be true: no agent
ends that was not killed; no two jobs train at the same time, and no two workers have one rank in one store; when the
kills are over all nodes train together again within `RECOVERY`; each sample of the model is in the books of exactly one
rank. Needs root (virtual hosts).
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.job import PORT, ManyNodeJob, Plan
from tests.support.hosts import virtual_hosts
from tests.support.processes import kill_processes, wait_guardians
from tests.support.system import starter
from tests.support.wait import DeadlinePassedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.chaos.job import Node

_TRAINING = Path(__file__).with_name("light_training.py")
_NODES = 3
#: Seconds for all nodes to train together: at the start, and after the last kill.
RECOVERY = 60.0
_ENDING = 60.0


@dataclass(frozen=True, slots=True)
class Deaths:
    """What will happen.

    Attributes:
        seed: Decides who is killed, and for how long.
        count: The number of kills.
        every: Seconds from one kill to the next.
        longest: Seconds until a killed agent is started again, at most.
        kills_guardians: Whether the guardians are killed first, at half of the kills: no notice is sent then.
        lease: Seconds of silence after which a node is lost.
        last_call: Seconds for which a first round waits for more nodes.
        least: The smallest number of nodes that train.
    """

    seed: int
    count: int
    every: float = 2.0
    longest: float = 1.0
    kills_guardians: bool = False
    lease: float = 3.0
    last_call: float = 30.0
    least: int = 1

    def command(self) -> str:
        """Return the command that does the same again."""
        guardians = " --guardians" if self.kills_guardians else ""
        return (
            f"python -m tests.chaos.deaths --seed {self.seed} --faults {self.count} --every {self.every:g} "
            f"--longest {self.longest:g} --last-call {self.last_call:g} --least {self.least}{guardians}"
        )


class _LightPlan(Plan):
    """The command of a job without torch."""

    def command(self, nodes: int, directory: Path) -> list[str | Path]:
        command = super().command(nodes, directory)
        return [*command[:-2], _TRAINING, directory]


@starter
@contextlib.contextmanager
def open_job(directory: Path, *, lease: float = 3.0, last_call: float = 30.0, least: int = 1) -> Iterator[ManyNodeJob]:
    """Give a job without torch on three hosts; at the end all must train, end well, and have lost nothing."""
    with virtual_hosts(_NODES) as hosts:
        conf = f"keep_alive_interval={lease / 3:g},join_timeout=120,last_call_timeout={last_call:g}"
        plan = _LightPlan(
            "c10d",
            ",".join(f"{host.name}:{PORT}" for host in hosts),
            flags=(
                *("--max-restarts=100000", "--membership-window=100000/1h", "--max-backoff=1", "--shutdown-timeout=3"),
                "--scale-up-delay=0",
                *(f"--rdzv-conf={conf}", f"--nnodes={least}:{_NODES}"),
            ),
        )
        job = ManyNodeJob(hosts, plan, directory)
        try:
            job.wait_progress(deadline=RECOVERY)
            yield job
            job.finish(deadline=_ENDING)
            assert_no_conflicts(directory)
        except (AssertionError, DeadlinePassedError) as error:
            message = f"{error}\n{_read_conflicts(directory)}\n{job.transcript()}"
            raise AssertionError(message) from error
        finally:
            (directory / "transcript").write_text(job.transcript(lines=100_000), encoding="utf-8")
            job.close()


@starter
def run(deaths: Deaths, directory: Path, *, say: Callable[[str], None]) -> None:
    """Run one job through its deaths."""
    with open_job(directory, lease=deaths.lease, last_call=deaths.last_call, least=deaths.least) as job:
        _kill_all(deaths, job, say)
        begin = time.monotonic()
        progress = job.wait_progress(deadline=RECOVERY)
        say(f"together again after {time.monotonic() - begin:.1f} s, at step {progress.step}")


def _kill_all(deaths: Deaths, job: ManyNodeJob, say: Callable[[str], None]) -> None:
    generator = random.Random(deaths.seed)  # noqa: S311 - it must be the same again
    due = time.monotonic()
    for number in range(1, deaths.count + 1):
        node = generator.choice(job.nodes)
        pause, takes_guardians = generator.uniform(0.0, deaths.longest), generator.random() < 1 / 2
        if deaths.kills_guardians and takes_guardians:
            _kill_guardians(node)
        node.agent.kill()
        node.agent.process.wait(30)
        time.sleep(pause)  # the schedule is the subject
        job.restart_agents(node)
        assert_no_conflicts(job.directory)
        if number % 10 == 0:
            progress = job.progress()
            say(f"{number} kills, step {0 if progress is None else progress.step}")
        due += deaths.every
        time.sleep(max(0.0, due - time.monotonic()))


def _kill_guardians(node: Node) -> None:
    try:
        kill_processes(wait_guardians(node.agent.pid, deadline=0.5))
    except DeadlinePassedError:
        return  # it was started a moment ago


def assert_no_conflicts(directory: Path) -> None:
    """Assert that no worker has met another life, or another worker of its rank."""
    conflicts = _read_conflicts(directory)
    assert not conflicts, conflicts


def _read_conflicts(directory: Path) -> str:
    path = directory / "conflicts"
    return path.read_text(encoding="ascii") if path.exists() else ""


def _say(line: str) -> None:
    print(f"deaths: {line}", flush=True)  # noqa: T201 - a command prints


def _run_seeds(plans: Sequence[Deaths], keep: Path | None) -> int:
    failed = []
    for plan in plans:
        _say(plan.command())
        with tempfile.TemporaryDirectory(prefix="deaths-") as directory:
            place = Path(directory) if keep is None else keep / str(plan.seed)
            place.mkdir(parents=True, exist_ok=True)
            try:
                run(plan, place, say=_say)
            except AssertionError as error:
                _say(f"{error}\ndeaths: FAILED; again: {plan.command()}")
                failed.append(plan.seed)
    _say(f"{len(plans)} jobs, failed seeds {failed}" if failed else f"{len(plans)} jobs: ok")
    return 1 if failed else 0


def main() -> int:
    """Run the jobs that the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.deaths")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="of the first job")  # noqa: S311
    parser.add_argument("--seeds", type=int, default=1, help="the number of jobs, one after another")
    parser.add_argument("--faults", type=int, default=30, help="kills of each job")
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one kill to the next")
    parser.add_argument("--longest", type=float, default=1.0, help="seconds until a killed agent is started again")
    parser.add_argument("--last-call", type=float, default=30.0)
    parser.add_argument("--least", type=int, default=1, help="fewest nodes")
    parser.add_argument("--guardians", action="store_true", help="kill the guardians too, half of the time")
    parser.add_argument("--keep", type=Path, default=None, help="leave books, logs and transcripts here")
    given = parser.parse_args()
    plans = [
        Deaths(
            seed,
            given.faults,
            given.every,
            given.longest,
            kills_guardians=given.guardians,
            last_call=given.last_call,
            least=given.least,
        )
        for seed in range(given.seed, given.seed + given.seeds)
    ]
    return _run_seeds(plans, given.keep)


if __name__ == "__main__":
    sys.exit(main())

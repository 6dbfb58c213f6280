"""Finds the job that a command's RUN means, among the jobs of this user on this machine.

RUN is a run id or the beginning of one, the pid of a launcher, or the path of its control socket; it may be left out
where one job runs. Launchers of jobs of several nodes with the same run id are one
job, since nodes of it may share a machine: with `static` or without an id only if they also meet at the same place.
"""

from __future__ import annotations

from elastic_run.contract import NO_RUN_ID
from elastic_run.control.client import Call, ControlError, ask_agents
from elastic_run.errors import UsageError
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.control.client import Answer

__all__ = ["NO_JOB", "RUN_HELP", "RunningAgent", "RunningJob", "choose_job", "find_job", "find_jobs", "name_job"]

#: The help text of RUN, for all commands.
RUN_HELP = "run id (--rdzv-id) or its beginning, or the launcher's pid; may be left out if one job runs on this machine"
#: What is said if there is no job.
NO_JOB = "no job of yours runs on this machine"
#: Seconds in which all agents of this machine have to tell which job they run.
_WAIT_LIMIT = 2.0
#: A longer run id is a number that was made up.
_LONGEST_LABEL = 32
#: Jobs that an error names.
_NAMED = 6


@dataclass(frozen=True, slots=True)
class RunningAgent:
    """One agent of this user on this machine.

    Args:
        path: Its control socket.
        place: Where the nodes meet; empty if the run id alone tells the job from others.
        is_whole_process: Whether its process ends with the job.
        error: Why nothing more than path and pid is known of it, or an empty string.
    """

    path: str
    pid: int
    run_id: str = ""
    program: str = ""
    log_dir: str = ""
    state: str = ""
    started_at: float = 0.0
    max_nodes: int = 1
    place: str = ""
    is_whole_process: bool = True
    error: str = ""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """The agents of one job on this machine, at least one, by pid."""

    agents: tuple[RunningAgent, ...]

    @property
    def label(self) -> str:
        """The text to type for RUN: the run id if a user has chosen it, otherwise the launcher's pid."""
        first = self.agents[0]
        has_name = first.run_id not in {"", NO_RUN_ID} and len(first.run_id) <= _LONGEST_LABEL
        return first.run_id if has_name else str(first.pid)

    def is_named(self, run: str) -> bool:
        """Whether this is its run id, or the pid or the control socket of one of its launchers."""
        return any(run in {agent.run_id, str(agent.pid), agent.path} for agent in self.agents)


def find_job(environment: Mapping[str, str], run: str | None, *, advice: str = "") -> RunningJob:
    """Find the job that a command means; `advice` is a clause that follows the message if no job runs.

    Raises:
        UsageError: There is no such job, there are several, or it doesn't answer.
    """
    return choose_job(find_jobs(environment), run, advice=advice)


def find_jobs(environment: Mapping[str, str]) -> list[RunningJob]:
    """Find all jobs of this user on this machine, the oldest first.

    Raises:
        UsageError: The directory of the control sockets belongs to another user.
    """
    try:
        answers = ask_agents(environment, Call("identify", {}), wait_limit=_WAIT_LIMIT)
    except ControlError as error:
        raise UsageError(str(error)) from error
    agents = sorted(map(_read_agent, answers), key=lambda agent: (agent.started_at, agent.pid))
    jobs: dict[tuple[str, str, int], list[RunningAgent]] = {}
    for agent in agents:
        is_shared = agent.max_nodes > 1 and not agent.error
        jobs.setdefault((agent.run_id, agent.place, 0 if is_shared else agent.pid), []).append(agent)
    return [RunningJob(tuple(each)) for each in jobs.values()]


def choose_job(jobs: Sequence[RunningJob], run: str | None, *, advice: str = "") -> RunningJob:
    """Choose the job that RUN means: a run id or its beginning, a pid, or None.

    Raises:
        UsageError: There is no such job, there are several, or it doesn't answer.
    """
    if run is None:
        found = list(jobs)
    else:
        found = [job for job in jobs if job.is_named(run)]
        found = found or [job for job in jobs if job.agents[0].run_id.startswith(run)]
    if len(found) == 1:
        if errors := [agent.error for agent in found[0].agents if agent.error]:
            raise UsageError(errors[0])
        return found[0]
    if not jobs:
        message = NO_JOB + (f", so none is {run!r}" if run else "")
        message += f"; {advice}" if advice else ""
    elif not found:
        message = f"{run!r} is not a job of yours on this machine, which has {_list(jobs, jobs)}"
    elif run is None:
        message = f"several jobs run on this machine, name one: {_list(found, jobs)}"
    else:
        message = f"{run!r} means several jobs, name one: {_list(found, jobs)}"
    raise UsageError(message)


def _list(found: Sequence[RunningJob], jobs: Sequence[RunningJob]) -> str:
    named = [f"{name_job(job, jobs)} ({job.agents[0].program or 'does not answer'})" for job in found[:_NAMED]]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(named) + more


def name_job(job: RunningJob, jobs: Sequence[RunningJob]) -> str:
    """Return the text for RUN that means this job: its label, or the launcher's pid where several have this label."""
    is_own = sum(each.label == job.label for each in jobs) == 1
    return job.label if is_own else str(job.agents[0].pid)


def _read_agent(answer: Answer) -> RunningAgent:
    document = answer.document
    if document is None:
        return RunningAgent(answer.path, answer.pid, error=answer.error)
    try:
        return RunningAgent(
            answer.path,
            answer.pid or int(document["pid"]),
            run_id=str(document["run_id"]),
            program=str(document["program"]),
            log_dir=str(document["log_dir"]),
            state=str(document["state"]),
            started_at=float(document["started_at"]),
            max_nodes=int(document["max_nodes"]),
            place=str(document["place"]),
            is_whole_process=bool(document["is_whole_process"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        return RunningAgent(
            answer.path, answer.pid, error=f"the agent with pid {answer.pid} sent an answer that can't be read: {error}"
        )

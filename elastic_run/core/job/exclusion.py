"""Which nodes the job goes on without, since failures keep beginning on them. Pure.

Rules
- An incident is a failure of a round whose likeliest cause is one node's. If only consequences of it are known, it is
  nobody's. N incidents of a machine within PERIOD (``--exclude-after=N/PERIOD``) exclude it. An exit code of
  ``--exclude-exit-codes``, or a rule of ``--failure-rules``, does so at once, and that failure takes no restart.
- Chance is no evidence. Where failures are frequent, N of them hit a good node now and then. So they count only if
  chance brings so many, so close together, to one node in at most one of as many cases as the job has nodes. The
  machines that failed within PERIOD give the rate. Two failures: no longer apart than PERIOD divided by their number.
  In a young job the machines but a few give the rate since the first failure, where that is higher. The failures of
  these few are excused by nothing, so those that follow are judged the more strictly the younger the job is.
- All nodes fail alike: it is the code. Incidents that look alike count against a machine only if at least half of them
  are its own, and if not all nodes of the job had one.
- By history at most one machine in twenty, and one in a small job, is excluded within PERIOD.
- Never below the minimum of --nnodes; nor is the node excluded whose agent serves the only store.
- A machine is known by the name that the scheduler gives it; without one a node is known by its id, which lasts as long
  as its agent.
- Suspicions expire: PERIOD after an exclusion the machine may join again. Without a PERIOD it may not.
"""

from __future__ import annotations

from math import prod
from types import MappingProxyType

from elastic_run.core.failure.root_cause import SECONDARY_FAILURE
from elastic_run.core.job.documents import Exclusion, Incident
from elastic_run.core.job.restart_policy import EXCLUDE_NODE, EXCLUDED
from elastic_run.core.job.state import Refusal
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.config import JobConfig
    from elastic_run.core.job.state import Job, Node, Root

#: Incidents and exclusions that are remembered.
_REMEMBERED = 256
#: One machine of so many may be excluded by history within the period.
_SHARE = 20
#: Machines that fail within the period in a job that fails rarely; beyond them the rule against chance gets stricter,
#: by this factor, since it is asked more often.
_FEW_MACHINES, _STRICTNESS = 3, 0.8
#: Machines that fail early in a job and are perhaps those that are sick: they say nothing of the others.
_SICK_MACHINES = 4
#: Factor of the rate of the other machines at the first failure; it falls to 1 until the period is over. Without it,
#: jobs with 30 failures exclude more than one good node in 1,000 (`python -m tests.simulation.exclusion`).
_EARLY_STRICTNESS = 4.0
#: Characters of what is known of an incident.
_SUMMARY_LENGTH = 120


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a failure means for the node that had it."""

    reason: str = ""  # Why the node is suspected, a clause; "" where it is not
    kept_because: str = ""  # Why it stays all the same, a clause; "" where it is excluded
    is_named: bool = False  # Whether its worker's exit code names it

    @property
    def excludes(self) -> bool:
        """Whether the node is excluded."""
        return bool(self.reason) and not self.kept_because


def _name_machine(node: Node) -> str:
    """Return what a machine is known by."""
    return node.node_info.machine or node.node


def note_incident(job: Job, config: JobConfig, root: Root, now: float) -> Job:
    """Note that a round has failed on a node, and forget what has expired; no change where nobody may be excluded."""
    node = job.nodes.get(root.node)
    is_named = root.failure.decision == EXCLUDE_NODE
    is_watched = config.exclude_after or config.exclude_exit_codes or is_named
    if not is_watched or node is None or root.severity >= SECONDARY_FAILURE:
        return job
    summary = "" if root.report is None else str(root.report.get("summary", ""))[:_SUMMARY_LENGTH]
    likeness = root.failure.signature or f"exit code {root.failure.exit_code}"
    incident = Incident(_name_machine(node), now, likeness, summary)
    return replace(
        job,
        incidents=(*(one for one in job.incidents if _is_recent(one.at, config, now)), incident)[-_REMEMBERED:],
        exclusions=tuple(one for one in job.exclusions if _is_recent(one.at, config, now)),
    )


def judge(job: Job, config: JobConfig, root: Root) -> Judgement:
    """Decide whether the node on which a round has failed is excluded, after `note_incident`."""
    node = job.nodes.get(root.node)
    if node is None or root.severity >= SECONDARY_FAILURE:
        return Judgement()
    if root.failure.decision == EXCLUDE_NODE:
        return Judgement(root.failure.name_rule(), _find_need(job, config, node), is_named=True)
    code = root.failure.exit_code
    if code in config.exclude_exit_codes:
        reason = f"exit code {code} is listed in --exclude-exit-codes"
        return Judgement(reason, _find_need(job, config, node), is_named=True)
    window = config.exclude_after
    machine = _name_machine(node)
    counted = _list_suspicions(job)
    times = [one.at for one in counted if one.machine == machine]
    if window is None or len(times) < window.count:
        return Judgement()
    period = "" if window.seconds is None else f" within {window.seconds:g} s"
    reason = f"the cause of {len(times)} failure{'s' * (len(times) != 1)}{period}"
    others = len({one.machine for one in counted} - {machine})
    rates = _find_rates(job, window.seconds, others + 1)
    is_chance = others > 0 and _may_be_chance(times, window.count, others + 1, rates, len(job.nodes))
    chance = f"{others} other node{'s' * (others != 1)} failed as well, so the failures may be a coincidence"
    by_history = sum(1 for one in job.exclusions if not one.is_named)
    is_most = by_history >= max(1, len(job.seats) // _SHARE)
    limit = f"{by_history} of {len(job.seats)} nodes are excluded already" if is_most else ""
    return Judgement(reason, _find_need(job, config, node) or limit or (chance if is_chance else ""))


def exclude(job: Job, root: Root, judgement: Judgement, now: float) -> Job:
    """Exclude a node: it is told, and is in no round any more. It stays in the state until it says that it goes."""
    node = job.nodes[root.node]
    machine = _name_machine(node)
    summaries = [one.summary for one in job.incidents if one.machine == machine and one.summary]
    evidence = "; ".join(dict.fromkeys(summaries[-2:]))
    reason = f"{judgement.reason}: {evidence}" if evidence else judgement.reason
    exclusion = Exclusion(machine, node.node_info.host, now, reason, judgement.is_named)
    told = f"{node.node_info.host} is excluded, {reason}"
    return replace(
        job,
        nodes=MappingProxyType({**job.nodes, node.node: replace(node, is_excluded=True)}),
        # What it did says nothing of the others any more.
        incidents=tuple(one for one in job.incidents if one.machine != machine),
        exclusions=(*job.exclusions, exclusion)[-_REMEMBERED:],
        refusals=(*job.refusals, Refusal(node.node, reason, EXCLUDED)),
        news=told,
    )


def find_exclusion(job: Job, config: JobConfig, node: Node, now: float) -> Exclusion | None:
    """Return why the machine of a node that joins may not, or None."""
    machine = _name_machine(node)
    return next((one for one in job.exclusions if one.machine == machine and _is_recent(one.at, config, now)), None)


def _find_rates(job: Job, period: float | None, machines: int) -> tuple[float, float]:
    """Return how many machines fail in a second, for the least failures that exclude a node, and for more of them.

    It is not by the whole period where failures are frequent from the start.
    """
    known = max(job.incidents[-1].at - job.incidents[0].at, 1.0)
    if period is None:
        return machines / known, machines / known
    early = (machines - _SICK_MACHINES) / known
    strictness = _EARLY_STRICTNESS - (_EARLY_STRICTNESS - 1.0) * known / period
    return max(machines / period, strictness * early), max(machines / period, early)


def _may_be_chance(times: list[float], least: int, machines: int, rates: tuple[float, float], nodes: int) -> bool:
    """Whether chance may have brought a node's last failures, at these times, to one of so many nodes.

    `least` failures exclude a node, and so many `machines` have failed.
    """
    strictness = 1.0 if machines <= _FEW_MACHINES else _STRICTNESS
    for count in range(max(least, 2), len(times) + 1):
        # By Poisson: those before the latest one, among as many failures as the job had in their time.
        expected = rates[count > least] * (times[-1] - times[-count]) / nodes
        cases = nodes * prod(expected / number for number in range(1, count))
        # A tenth for each failure beyond the least: a node is judged again at each of them.
        if cases <= strictness * 0.1 ** (count - least):
            return False
    return least > 1


def _is_recent(at: float, config: JobConfig, now: float) -> bool:
    window = config.exclude_after
    return window is None or window.seconds is None or now - at < window.seconds


def _list_suspicions(job: Job) -> list[Incident]:
    """Return the incidents that look like a machine's fault, and not like the program's."""
    everybody = {_name_machine(node) for node in job.nodes.values()}
    alike: dict[str, list[str]] = {}
    for one in job.incidents:
        alike.setdefault(one.likeness, []).append(one.machine)
    of_code = {likeness for likeness, machines in alike.items() if len(everybody) > 1 and everybody <= set(machines)}
    return [
        one
        for one in job.incidents
        if one.likeness not in of_code and 2 * alike[one.likeness].count(one.machine) >= len(alike[one.likeness])
    ]


def _find_need(job: Job, config: JobConfig, node: Node) -> str:
    """Return why the job can't do without a node, a clause, or ""."""
    others = sum(1 for one in job.nodes.values() if one is not node and not one.is_excluded)
    if others < config.min_nodes:
        return f"fewer than {config.min_nodes} nodes would be left"
    if node.node_info.serves_store and not config.has_successors:
        return "it serves the job's only store"
    return ""

"""Asks all nodes of a job: the agents on this machine, and through one of them those on other machines."""

from __future__ import annotations

from elastic_run.control.client import ask_all
from elastic_run.control.wire import Call
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.control.jobs import RunningJob

__all__ = ["JOB_STACKS", "JOB_STATUS", "JobQuestion", "ask_nodes"]


@dataclass(frozen=True, slots=True)
class JobQuestion:
    """A question to all nodes.

    Args:
        of_node: The request that one agent answers for its own node.
        of_job: The request that one agent answers for all nodes.
        wait_limit: Seconds for the answer for all nodes.
    """

    of_node: str
    of_job: str
    wait_limit: float


# Longer than an agent waits for the other nodes.
JOB_STATUS = JobQuestion("status", "nodes", 6.0)
JOB_STACKS = JobQuestion("stacks", "job_stacks", 12.0)


def ask_nodes(job: RunningJob, question: JobQuestion) -> tuple[list[dict[str, Any]], list[str]]:
    """Ask the agents of a job on this machine, and through one of them those on other machines.

    Returns:
        The documents of the nodes by node rank, and why a node is missing.
    """
    first, *others = job.agents
    nodes: list[dict[str, Any]] = []
    errors: list[str] = []
    asked = list(job.agents)
    if first.max_nodes > 1:
        answer = next(iter(ask_all([first.path], Call(question.of_job, {}), wait_limit=question.wait_limit)), None)
        if answer is not None and answer.document is not None:
            nodes = list(answer.document["nodes"])
            here = {node["pid"] for node in nodes if node["host"] == nodes[0]["host"]}
            asked = [agent for agent in others if agent.pid not in here]  # waiting nodes are asked less often
            missing, members = answer.document["missing"], answer.document["members"]
            errors = [f"{missing} of {members} nodes have not answered"] if missing else []
    for answer in ask_all([agent.path for agent in asked], Call(question.of_node, {})):
        if answer.document is not None:
            nodes.append(answer.document)
        else:
            errors.append(answer.error)
    nodes.sort(key=lambda node: (node.get("node_rank") is None, node.get("node_rank") or 0))
    return nodes, errors

"""The configuration of one node of a job of several: settings in which nodes may differ.

A setting is defined here, with its default, and nowhere else; the flag of the same name (`cli.flags`) explains it to
users. A setting on which the nodes have to agree belongs into `core.job.config`.
"""

from __future__ import annotations

from elastic_run.records import dataclass


@dataclass(frozen=True, slots=True)
class JoinCommand:
    """This node's command line as it took effect, in the parts that the command for other nodes is made of.

    Args:
        command: The words of the command itself, such as `elastic-run`.
        flags: The values that somebody gave, by flag, variable or file, each as one word such as `--nnodes=2`.
        program: The program of the workers, and its arguments.
    """

    command: tuple[str, ...]
    flags: tuple[str, ...]
    program: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaunchStep:
    """The step of a scheduler whose launchers are all needed for one job, at a place that its user named.

    Args:
        name: The same on all nodes of the step, and no other step's.
        first_host: The name of its first node.
    """

    name: str
    first_host: str


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The configuration of one node; times in seconds.

    Args:
        preferred_rank: The group rank that the node asks for, or None.
        fence_after: When a node that can't reach its job stops its workers: `lease` or `never`.
        scale_up_signal: Signal by name that tells the workers that they will be stopped for new nodes, or "".
        exit_barrier_timeout: Time that the node stays at the end, at most, for the others; None for
            TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT, or 300.
        token: The secret that the nodes of the job share: they sign all they say with it. None for none, except for a
            job without an endpoint: it gets a new one, which the line that tells others how to join shows. Empty for
            none at all.
        join_command: The command as given, to show how others join, or None.
        notice: A line for the user that the node with rank 0 shows when the first round is formed, or "".
        location: Its place in the network, "" if not known. Nodes without a preferred rank get ranks in the order of
            these texts, so that nodes of one switch are neighbours.
        launch_address: Where srun was started, perhaps the first node's address; shown where names have none, or "".
        launch_step: The step whose launchers must not contradict each other, or None.
        end_time: When the scheduler ends this node's job, in seconds since 1970; 0 if not known.
        stops_in_time: Whether the launcher stops the workers before that time, so that the job can be run again.
        health_check: The command that must succeed before the node takes part in a round, or "".
        health_check_timeout: Time that this command may take.
    """

    preferred_rank: int | None = None
    fence_after: str = "never"
    scale_up_signal: str = ""
    exit_barrier_timeout: float | None = None
    token: bytes | None = None
    join_command: JoinCommand | None = None
    notice: str = ""
    location: str = ""
    launch_address: str = ""
    launch_step: LaunchStep | None = None
    end_time: float = 0.0
    stops_in_time: bool = False
    health_check: str = ""
    health_check_timeout: float = 60.0

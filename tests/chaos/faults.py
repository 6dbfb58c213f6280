"""The faults of the chaos tests: what happens to workers, agents, hosts, cables, clocks and stores.

Each fault is one function. It does its harm, lasts as long as it is told, and undoes what doesn't undo itself; how the
job takes it is the caller's question. Which fault comes when is drawn from a seeded generator, so a seed is a test.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.job import PORT
from tests.support.processes import catches, kill_processes, wait_guardians
from tests.support.wait import wait_until

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from tests.chaos.etcd import EtcdCluster
    from tests.chaos.job import ManyNodeJob, Node

#: Seconds that a fault lasts at most, unless it is told otherwise.
LONGEST = 8.0
#: Seconds that a clock jumps.
_CLOCK_JUMP = 900
#: Begins two processes that have left session, environment and parent; the first one keeps the worker's output.
_ESCAPE = "env -i setsid sleep 86399 & env -i setsid sleep 86399 >/dev/null 2>&1 &"
_ESCAPED = b"sleep\x0086399\0"
_ESCAPES = 2
#: Seconds in which a round ends on all nodes, the grace period of the workers included.
_ROUND_END = 30.0
#: Seconds in which an agent ends that can't tell the job: the grace period of the workers, a second, and some more.
_DARK_END = 15.0
_REFUSED = 208
#: 128 and the number of SIGTERM, and how subprocess shows a program that this signal has ended.
_TERMINATED = (143, -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, ready to happen.

    Attributes:
        name: What it is: a key of `FAULTS`.
        node: The number of the node that it hits.
        other: The number of another node, for faults between two.
        seconds: How long it lasts, if it does.
    """

    name: str
    node: int
    other: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} node={self.node} other={self.other} seconds={self.seconds}"


@dataclass(frozen=True, slots=True)
class Scene:
    """What a fault may touch.

    Attributes:
        job: The job.
        node: The node that is hit.
        other: Another one.
        seconds: How long the fault lasts.
        etcd: The store, where it is an etcd.
    """

    job: ManyNodeJob
    node: Node
    other: Node
    seconds: float
    etcd: EtcdCluster | None


def _last(scene: Scene) -> None:
    # Nothing is waited for: the length of a fault is part of it.
    time.sleep(scene.seconds)


def _is_even(scene: Scene) -> bool:
    """Toss a coin that falls in the same way whenever the same fault happens."""
    return int(scene.seconds * 1000) % 2 == 0


def kill_worker(scene: Scene) -> None:
    """SIGKILL one of the node's workers."""
    workers = wait_until(scene.node.workers, deadline=60, what=f"workers on {scene.node.host}")
    os.kill(workers[0], signal.SIGKILL)


def kill_agent(scene: Scene) -> None:
    """SIGKILL the node's elastic-run, and see that nothing outlives it."""
    scene.node.agent.kill()
    scene.node.agent.process.wait(30)
    scene.job.wait_no_orphans(scene.node)
    _last(scene)


def _wait_guardians(scene: Scene) -> list[int]:
    return wait_guardians(scene.node.agent.pid, deadline=60)


def kill_agent_and_guardian(scene: Scene) -> None:
    """SIGKILL the node's elastic-run with its guardian, and see that nothing outlives them."""
    kill_processes(_wait_guardians(scene)[:1])
    kill_agent(scene)


def stop_guardian_and_kill_agent(scene: Scene) -> None:
    """SIGSTOP the guardian of the node's elastic-run before SIGKILL to that, and see that nothing is left."""
    os.kill(_wait_guardians(scene)[0], signal.SIGSTOP)
    kill_agent(scene)


def signal_agent(scene: Scene) -> None:
    """Send the node's elastic-run a signal that no flag names and no worker handles."""
    number = signal.SIGUSR1 if _is_even(scene) else signal.SIGUSR2
    _wait_handler(scene, number)
    scene.node.agent.send(number)
    _last(scene)


def _wait_handler(scene: Scene, number: signal.Signals) -> None:
    """Wait until the node's agent handles a signal: until then it is an interpreter still, which the signal kills.

    A signal that is blocked says nothing: glibc blocks all of them in a process that was forked, until it runs.
    """
    pid = scene.node.agent.pid
    wait_until(lambda: catches(pid, number), deadline=30, what="handler of the agent")


def start_second_job(scene: Scene) -> None:
    """Start an agent of a second job under the id of the first on the node, and see that it is refused."""
    code, said = scene.job.run_another_script(scene.node)
    assert code == _REFUSED, f"{code}\n{said}"
    assert "each job needs an --rdzv-id of its own" in " ".join(said.split()), said
    assert not (scene.job.directory / "another.ran").exists(), said


def escape(scene: Scene) -> None:
    """Let descendants of a worker leave session, environment and parent, and see that they live as long as the round.

    The round ends because a worker of another node is killed.
    """
    scene.job.ask_worker(scene.node, _ESCAPE)
    wait_until(lambda: len(_find_escaped(scene)) == _ESCAPES, deadline=60, what=f"escapes on {scene.node.host}")
    _last(scene)
    assert len(_find_escaped(scene)) == _ESCAPES, "they have ended before the round"
    kill_worker(replace(scene, node=scene.other))
    wait_until(lambda: not _find_escaped(scene), deadline=_ROUND_END, what=f"no escapes on {scene.node.host}")


def _find_escaped(scene: Scene) -> list[int]:
    return [pid for pid in scene.node.host.processes() if _read_command(pid) == _ESCAPED]


def _read_command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def terminate_agent(scene: Scene) -> None:
    """SIGTERM the node's elastic-run, and see that it goes and leaves nothing."""
    scene.node.agent.send(signal.SIGTERM)
    scene.node.agent.wait_exit()
    scene.job.wait_no_orphans(scene.node)
    _last(scene)


def terminate_agent_in_the_dark(scene: Scene) -> None:
    """SIGTERM the node's elastic-run while nothing of the node arrives, and see that it goes and leaves nothing.

    The agent can tell nobody that it leaves: it ends a moment after its workers, with the code of its signal. An agent
    that has started nothing yet ends by the signal itself, which a shell shows as the same code.
    """
    scene.node.host.go_dark()
    try:
        scene.node.agent.send(signal.SIGTERM)
        code = scene.node.agent.wait_exit(deadline=_DARK_END)
        assert code in _TERMINATED, f"exit code {code} after SIGTERM in the dark\n{scene.node.agent.stdout[-2000:]}"
        scene.job.wait_no_orphans(scene.node)
        _last(scene)
    finally:
        scene.node.host.come_to_light()


def stop_agent(scene: Scene) -> None:
    """SIGSTOP the node's elastic-run for a while."""
    scene.node.agent.send(signal.SIGSTOP)
    _last(scene)
    scene.node.agent.send(signal.SIGCONT)


def power_off(scene: Scene) -> None:
    """Take the node's power, and boot it again."""
    scene.node.host.poweroff()
    scene.node.agent.process.wait(30)
    _last(scene)
    scene.node.host.boot()


def pull_cable(scene: Scene) -> None:
    """Pull the node's network cable for a while."""
    scene.node.host.link_down()
    _last(scene)
    scene.node.host.link_up()


def go_dark(scene: Scene) -> None:
    """Drop all packets of the node for a while, silently."""
    scene.node.host.go_dark()
    _last(scene)
    scene.node.host.come_to_light()


def cut_one_way(scene: Scene) -> None:
    """Drop what the node sends to another for a while."""
    hosts = scene.job.hosts
    hosts.cut(scene.node.host, scene.other.host)
    _last(scene)
    hosts.mend(scene.node.host, scene.other.host)


def cut_from_hub(scene: Scene) -> None:
    """Drop what the node sends to the store for a while."""
    hosts = scene.job.hosts
    hosts.cut(scene.node.host, hosts.hub)
    _last(scene)
    hosts.mend(scene.node.host, hosts.hub)


def set_clock(scene: Scene) -> None:
    """Set the node's wall clock a quarter of an hour ahead or back, for good."""
    scene.node.host.clock.set(_CLOCK_JUMP if _is_even(scene) else -_CLOCK_JUMP)


def kill_store_leader(scene: Scene) -> None:
    """SIGKILL the leader of the etcd, and bring it back after a while."""
    assert scene.etcd is not None
    leader = scene.etcd.wait_leader()
    scene.etcd.kill(leader)
    _last(scene)
    scene.etcd.start(leader)


def fill_store(scene: Scene) -> None:
    """Let a stranger on the node's network send what fills and reads a TCPStore to the port of every agent."""
    hosts = [node.host.name for node in scene.job.nodes]
    scene.node.host.run(sys.executable, "-m", "tests.support.hostile", str(PORT), *hosts, deadline=120)


FAULTS: dict[str, Callable[[Scene], None]] = {
    "kill-worker": kill_worker,
    "kill-agent": kill_agent,
    "kill-agent-and-guardian": kill_agent_and_guardian,
    "stop-guardian-and-kill-agent": stop_guardian_and_kill_agent,
    "signal-agent": signal_agent,
    "terminate-agent": terminate_agent,
    "terminate-agent-in-the-dark": terminate_agent_in_the_dark,
    "stop-agent": stop_agent,
    "second-job": start_second_job,
    "escape": escape,
    "power-off": power_off,
    "pull-cable": pull_cable,
    "go-dark": go_dark,
    "cut-one-way": cut_one_way,
    "set-clock": set_clock,
    "cut-from-hub": cut_from_hub,
    "kill-store-leader": kill_store_leader,
    "fill-store": fill_store,
}
#: Faults that need a store on the hub.
_OF_ETCD = {"cut-from-hub", "kill-store-leader"}
#: Faults that need a store in an agent.
_OF_AGENTS = {"fill-store"}
#: Faults that end the node's agent, and a store that lives with it.
ENDS_AGENT = {
    "kill-agent",
    "kill-agent-and-guardian",
    "stop-guardian-and-kill-agent",
    "terminate-agent",
    "terminate-agent-in-the-dark",
    "power-off",
}

#: Faults that no worker notices.
UNNOTICED = {"signal-agent", "second-job"}


def draw_faults(
    generator: random.Random,
    count: int,
    *,
    nodes: int,
    has_etcd: bool,
    store_node: int | None = None,
    only: Sequence[str] = (),
    longest: float = LONGEST,
) -> Sequence[Fault]:
    """Draw the faults of one run."""
    foreign = _OF_AGENTS if has_etcd else _OF_ETCD
    kinds = [name for name in only or FAULTS if name not in foreign]
    names: list[str] = []
    while len(names) < count:
        names += generator.sample(kinds, len(kinds))
    drawn = []
    for name in names[:count]:
        allowed = [node for node in range(nodes) if node != store_node or name not in ENDS_AGENT]
        node = generator.choice(allowed)
        other = generator.choice([number for number in range(nodes) if number != node])
        drawn.append(Fault(name, node, other, round(generator.uniform(0.1, longest), 3)))
    return drawn


def inflict(fault: Fault, job: ManyNodeJob, etcd: EtcdCluster | None) -> None:
    """Let a fault happen, from its begin to its end."""
    scene = Scene(job, job.nodes[fault.node], job.nodes[fault.other], fault.seconds, etcd)
    FAULTS[fault.name](scene)

"""The parts of `--preload` that decide: whether it can apply, and whether a next round is likely."""

from __future__ import annotations

import os
import sys

import pytest

from elastic_run.agent.driver.round_waits import find_obstacle
from elastic_run.core.agent import machine
from elastic_run.core.agent.messages import Finish, RoundFailed
from elastic_run.core.config import AgentConfig, JobConfig
from elastic_run.launcher import LaunchConfig
from elastic_run.multiprocessing.warm import messages

_PYTHON = sys.executable


@pytest.mark.parametrize(
    "command",
    [
        "-u train.py --lr 1",
        "-u -m package.train -m",
        "train.py ${local_rank}",
        "-",
        "-c pass -S",
        "-uOO -E -m train",
    ],
)
def test_an_ordinary_command_has_no_obstacle(command: str) -> None:
    """Python with its options, before a script, a module or a command, can be a template."""
    assert find_obstacle([_PYTHON, *command.split()]) == ""


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["/bin/sh", "train.sh"], "the workers run /bin/sh, which is not the Python of elastic-run"),
        (["python", "train.py"], "the workers run python, which is not the Python of elastic-run"),
        ([_PYTHON, "-S", "train.py"], f"the options of {_PYTHON} don't allow it"),
        ([_PYTHON, "-i", "train.py"], f"the options of {_PYTHON} don't allow it"),
        ([_PYTHON, "--version"], f"the options of {_PYTHON} don't allow it"),
        ([_PYTHON, "-u"], f"the options of {_PYTHON} don't allow it"),
        ([_PYTHON, "-m"], f"the options of {_PYTHON} don't allow it"),
        ([_PYTHON, "train${local_rank}.py"], "train${local_rank}.py differs from worker to worker"),
    ],
)
def test_an_obstacle_is_named(command: list[str], told: str) -> None:
    """A command that would not become a template is told why."""
    assert find_obstacle(command).startswith(told)


@pytest.mark.parametrize(
    ("stop_reason", "changes", "expected"),
    [
        (machine.AFTER_FAILURE, {}, True),
        (machine.AFTER_FAILURE, {"restart_count": 1}, False),
        (machine.AFTER_FAILURE, {"restart_count": 1, "follows_job": True}, True),
        (machine.AFTER_HALT, {"restart_count": 1}, True),
        (machine.AFTER_SUCCESS, {}, False),
        (machine.AFTER_SIGNAL, {"follows_job": True}, False),
        (machine.AFTER_FAILURE, {"ending": Finish("unkillable_worker")}, False),
        (
            machine.AFTER_FAILURE,
            {"start_failure": RoundFailed(0, verdict="cannot_start", detail="")},
            False,
        ),
    ],
)
def test_what_may_start_again(stop_reason: str, changes: dict[str, object], *, expected: bool) -> None:
    """A next generation is worth preparing after a failure with budget left, and when the job decides."""
    agent = machine.Agent(config=JobConfig(max_restarts=1), local_world_size=2)
    stopping = agent.replace(state=machine.STOPPING, stop_reason=stop_reason, **changes)
    assert machine.may_start_again(stopping) is expected


def test_messages_come_whole_with_their_descriptors() -> None:
    """A document and the most descriptors that the kernel passes arrive together; a closed end is told apart."""
    ours, theirs = messages.open_pair()
    reading, writing = os.pipe()
    messages.send(ours, {"kind": "fork", "text": "x" * 4000}, [writing] * messages.MOST_DESCRIPTORS)
    found = messages.receive(theirs)
    assert found is not None
    document, descriptors = found
    assert (document["kind"], len(descriptors)) == ("fork", messages.MOST_DESCRIPTORS)
    assert not any(os.get_inheritable(fd) for fd in descriptors)
    for fd in (*descriptors, reading, writing):
        os.close(fd)
    messages.send(theirs, {"kind": "last"})
    messages.send(ours, {"kind": "unread"})
    theirs.close()
    assert messages.receive(ours) == ({"kind": "last"}, [])
    assert messages.receive(ours) is None
    ours.close()


def test_a_program_is_told_a_wrong_list() -> None:
    """`LaunchConfig` refuses what no module can be called."""
    with pytest.raises(ValueError, match=r"^preload: 'torch, numpy' is not a list of modules \(torch,numpy\)$"):
        LaunchConfig(1, 1, 1, agent_config=AgentConfig(preload="torch, numpy"))

"""The pods of an indexed Job are one job: what follows from their names, and what is refused."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from elastic_run.cli import make_config as config
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.parser import LauncherArgumentParser
from elastic_run.notices import UsageError
from elastic_run.run import parse_args
from elastic_run.schedulers import kubernetes
from elastic_run.schedulers.kubernetes import full_hostname
from tests.support.slurm_variables import complete_from_cluster

if TYPE_CHECKING:
    from argparse import Namespace

DOMAIN = "mesh.default.svc.cluster.local"
PLACE = ",".join(f"train-{index}.{DOMAIN}:29400" for index in range(3))
MEETING = f"--rdzv-backend=c10d --rdzv-endpoint={PLACE} --rdzv-id=train"


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no GPU, whatever it has."""
    monkeypatch.setattr(config, "_DRIVERS", ())


def complete(
    monkeypatch: pytest.MonkeyPatch, words: str, *, index: str = "1", hostname: str = f"train-1.{DOMAIN}"
) -> tuple[Namespace, list[str]]:
    """Complete a command line as the launcher of a pod does."""
    monkeypatch.setattr(kubernetes, "full_hostname", lambda: hostname)
    parser = LauncherArgumentParser(FLAGS)
    args = parser.parse_args(words.split())
    notices = complete_from_cluster(args, {**os.environ, "JOB_COMPLETION_INDEX": index}, parser.origins)
    return args, notices


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--nnodes=4 train.py", f"--nnodes=4 {MEETING} --node-rank=1"),
        ("--nnodes=1:4 train.py", f"--nnodes=1:4 {MEETING} --node-rank=1"),
        ("--nnodes=4 --rdzv-id=mine train.py", f"--nnodes=4 {MEETING} --rdzv-id=mine --node-rank=1"),
        ("--nnodes=4 --node-rank=0 train.py", f"--nnodes=4 {MEETING} --node-rank=0"),
        ("--nnodes=4 --rdzv-backend=c10d train.py", f"--nnodes=4 {MEETING} --node-rank=1"),
        ("--nnodes=4 --master-addr=train-0 train.py", "--nnodes=4 --master-addr=train-0 --node-rank=1"),
        # The trainer of Kubeflow says all of it.
        (
            "--nnodes=4 --node-rank=1 --master-addr=t-node-0-0.t --master-port=29500 train.py",
            "--nnodes=4 --node-rank=1 --master-addr=t-node-0-0.t --master-port=29500",
        ),
        ("--nnodes=1 train.py", "--nnodes=1"),
        ("--standalone train.py", "--standalone"),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:0 train.py", "--rdzv-backend=c10d --rdzv-endpoint=localhost:0"),
    ],
)
def test_what_no_flag_names_follows_from_the_pod(monkeypatch: pytest.MonkeyPatch, words: str, expected: str) -> None:
    """Endpoints are the first three pods, the id is the Job's name; what is given stands."""
    assert complete(monkeypatch, words) == (parse_args([*expected.split(), "train.py"]), [])


def test_the_first_pod_tells_what_follows_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """PET_NNODES counts as given; two pods have two endpoints."""
    monkeypatch.setenv("PET_NNODES", "2")
    _, notices = complete(monkeypatch, "train.py", index="0", hostname=f"train-0.{DOMAIN}")
    place = f"train-0.{DOMAIN}:29400,train-1.{DOMAIN}:29400"
    assert notices == [f"from the Kubernetes Job: --rdzv-backend=c10d --rdzv-endpoint={place} --rdzv-id=train"]


def test_a_pod_has_a_worker_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user gave a number, or said as with torchrun where the nodes meet."""
    monkeypatch.setattr("elastic_run.cli.scheduler_values.count_node_gpus", lambda _: ("8", []))
    assert complete(monkeypatch, "--nnodes=4 train.py")[0].nproc_per_node == "8"
    assert complete(monkeypatch, "--nnodes=4 --nproc-per-node=1 train.py")[0].nproc_per_node == "1"
    assert complete(monkeypatch, "--nnodes=4 --master-addr=train-0 train.py")[0].nproc_per_node == "1"


@pytest.mark.parametrize(
    ("words", "hostname", "message"),
    [
        (
            "train.py",
            f"train-1.{DOMAIN}",
            (
                "--nnodes: this is pod 1 of an indexed Job (JOB_COMPLETION_INDEX), and Kubernetes does not say how "
                "many pods that Job has: set PET_NNODES to the Job's completions, or give --standalone for a separate "
                "job in each pod"
            ),
        ),
        (
            "--nnodes=4 train.py",
            "train-1",
            (
                "JOB_COMPLETION_INDEX=1: the host name train-1 has no domain, so that other pods can't find it: create "
                "a headless Service, and name it in the pod template as subdomain; or give --rdzv-backend=c10d and "
                "--rdzv-endpoint=HOST:PORT"
            ),
        ),
        (
            "--nnodes=4 train.py",
            "gpu-node-17.example.com",  # hostNetwork: true
            (
                "JOB_COMPLETION_INDEX=1: the host name gpu-node-17.example.com does not end with -1; or give "
                "--rdzv-backend=c10d and --rdzv-endpoint=HOST:PORT"
            ),
        ),
    ],
)
def test_pods_that_could_not_meet_are_refused(
    monkeypatch: pytest.MonkeyPatch, words: str, hostname: str, message: str
) -> None:
    """One line at once, instead of separate models or a long wait."""
    with pytest.raises(UsageError) as caught:
        complete(monkeypatch, words, hostname=hostname)
    assert str(caught.value) == message


def test_a_pod_beyond_the_number_of_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """PET_NNODES and the Job's completions contradict each other."""
    with pytest.raises(UsageError, match=r"^--nnodes: is 4, but this is pod 4 of its Job \(JOB_COMPLETION_INDEX, "):
        complete(monkeypatch, "--nnodes=4 train.py", index="4", hostname=f"train-4.{DOMAIN}")


@pytest.mark.parametrize(
    ("words", "hostname", "mend"),
    [
        ("--master-addr=127.0.0.1", f"train-1.{DOMAIN}", rf"give --master-addr=train-0\.{DOMAIN}$"),
        ("--master-addr=localhost", "train-1", "give --master-addr=HOST, the name of the first one$"),
        (
            "--rdzv-backend=c10d --rdzv-id=a --rdzv-endpoint=[::1]:7",
            f"train-1.{DOMAIN}",
            rf"leave --rdzv-endpoint out, or give --rdzv-endpoint=train-0\.{DOMAIN}:7$",
        ),
        (
            "--rdzv-backend=c10d --rdzv-id=a --rdzv-endpoint=localhost",
            "train-1",
            "to itself, so that they never meet: leave --rdzv-endpoint out$",
        ),
    ],
)
def test_a_place_where_each_pod_meets_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch, words: str, hostname: str, mend: str
) -> None:
    """The mend names the first pod, with the port that was given, if other pods can find it by name."""
    with pytest.raises(UsageError, match=mend):
        complete(monkeypatch, f"--nnodes=1:4 {words} train.py", hostname=hostname)


@pytest.mark.parametrize("index", ["", "one", "-1"])
def test_what_is_no_index_says_nothing(monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    """The variable is set by hand, or empty."""
    assert complete(monkeypatch, "train.py", index=index) == (parse_args(["train.py"]), [])


def test_what_is_no_index_is_refused_for_several_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pod would serve a store of its own, and wait for the others."""
    with pytest.raises(UsageError, match=r"^JOB_COMPLETION_INDEX: '\$\(INDEX\)' is not a whole number from 0 up: "):
        complete(monkeypatch, "--nnodes=3 train.py", index="$(INDEX)")
    place = "--rdzv-backend=c10d --rdzv-endpoint=train-0.svc:1 --rdzv-id=a"
    assert complete(monkeypatch, f"--nnodes=3 {place} train.py", index="$(INDEX)")[1] == []


def test_the_full_host_name_is_that_of_the_hosts_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose name nobody knows has its own name only."""

    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    assert full_hostname().partition(".")[0] == socket.gethostname().partition(".")[0]
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert full_hostname().startswith("localhost")
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert full_hostname() == "localhost"

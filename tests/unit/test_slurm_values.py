"""What no flag names follows from the step of Slurm; its launchers must be one job, or say otherwise."""

from __future__ import annotations

import pytest

from elastic_run.cli import make_config as config
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.parser import LauncherArgumentParser
from elastic_run.notices import UsageError
from elastic_run.run import parse_args
from tests.support.slurm_variables import (
    CROWDED,
    HOST,
    MEETING,
    ONE_NODE,
    PORT,
    STEP,
    TASKS_PER_NODE,
    complete_from_cluster,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no GPU, and does not show the processes of Slurm's daemon."""
    monkeypatch.setattr(config, "_DRIVERS", ())
    monkeypatch.setattr("elastic_run.schedulers.slurm.read_running_step", lambda: None)


@pytest.mark.parametrize(
    ("words", "more", "expected"),
    [
        ("train.py", {}, f"--nnodes=3 {MEETING} --node-rank=1"),
        ("--nnodes=1:3 train.py", {}, f"--nnodes=1:3 {MEETING} --node-rank=1"),
        ("--nnodes=2 --rdzv-id=mine train.py", {}, f"--nnodes=2 {MEETING} --rdzv-id=mine --node-rank=1"),
        ("--nproc-per-node=4 train.py", {}, f"--nnodes=3 {MEETING} --node-rank=1 --nproc-per-node=4"),
        ("--rdzv-backend=c10d train.py", {}, f"--nnodes=3 {MEETING} --node-rank=1"),
        (
            "--rdzv-backend=etcd-v3 --rdzv-endpoint=e:2379 --rdzv-id=x train.py",
            {},
            "--nnodes=3 --rdzv-backend=etcd-v3 --rdzv-endpoint=e:2379 --rdzv-id=x --node-rank=1",
        ),
        (
            "--nnodes=3 --master-addr=a7 --master-port=29500 train.py",
            {},
            "--nnodes=3 --master-addr=a7 --master-port=29500 --node-rank=1",
        ),
        ("--nnodes=3 --node-rank=2 --master-addr=a7 train.py", {}, "--nnodes=3 --node-rank=2 --master-addr=a7"),
        ("--node-rank=2 train.py", {}, f"--nnodes=3 {MEETING} --node-rank=2"),
        (f"--nnodes=12 {MEETING} train.py", CROWDED, f"--nnodes=12 {MEETING}"),  # an agent per task
        (f"--nnodes=4 {MEETING} train.py", ONE_NODE, f"--nnodes=4 {MEETING}"),
        ("train.py", {**ONE_NODE, "SLURM_STEP_NUM_TASKS": "1", **dict.fromkeys(TASKS_PER_NODE, "1")}, ""),
        ("--standalone train.py", {}, "--standalone"),
        ("--standalone train.py", CROWDED, "--standalone"),
        ("--standalone --nproc-per-node=4 train.py", ONE_NODE, "--standalone --nproc-per-node=4"),
        ("--rdzv-backend=of-a-plug-in train.py", {}, "--rdzv-backend=of-a-plug-in"),
        ("train.py", {"TORCHELASTIC_RUN_ID": "outer"}, ""),
    ],
)
def test_what_no_flag_names_follows_from_the_step(words: str, more: dict[str, str], expected: str) -> None:
    """Each value that is unset is derived; flags, --standalone, a plug-in and a worker's launcher have their way."""
    args, wanted = parse_args(words.split()), parse_args([*expected.split(), "train.py"])
    complete_from_cluster(args, {**STEP, **more})
    assert args == wanted


def test_the_first_launcher_of_a_step_tells_what_it_derived() -> None:
    """One line for the job, and none for each of its nodes."""
    args = parse_args(["--nproc-per-node=2", "train.py"])
    assert complete_from_cluster(args, STEP) == []
    first = {**STEP, "SLURM_STEP_NODELIST": f"{HOST},b,c"}
    (line,) = complete_from_cluster(parse_args(["--nproc-per-node=2", "train.py"]), first)
    place = ",".join(f"{name}:{PORT}" for name in (HOST, "b", "c"))
    assert line == (f"from the Slurm step: --nnodes=3 --rdzv-backend=c10d --rdzv-endpoint={place} --rdzv-id=41.2.0")


def _complete(words: str, more: dict[str, str] | None = None) -> tuple[Namespace, list[str]]:
    """Complete a command line as the launcher does, which knows what was given."""
    parser = LauncherArgumentParser(FLAGS)
    args = parser.parse_args(words.split())
    return args, complete_from_cluster(args, {**STEP, **(more or {})}, parser.origins)


def _count_workers(words: str, more: dict[str, str] | None = None) -> str:
    return str(_complete(words, more)[0].nproc_per_node)


def test_a_given_value_stands_even_where_it_is_the_default() -> None:
    """`--node-rank=0` on the second node, `--rdzv-id=none`, and `--nnodes=1:1`, which is refused like any other 1."""
    args, _ = _complete("--node-rank=0 --rdzv-id=none train.py")
    assert (args.node_rank, args.rdzv_id, args.nnodes) == (0, "none", "3")
    with pytest.raises(UsageError, match="--nnodes: is 1:1, but the Slurm step has 3 nodes"):
        _complete("--nnodes=1:1 train.py")
    with pytest.raises(UsageError, match=r"--master-addr: 127\.0\.0\.1 leads each node of the Slurm step to itself"):
        _complete("--nnodes=3 --master-addr=127.0.0.1 train.py")


def test_the_step_has_a_worker_for_each_gpu_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag and PET_NPROC_PER_NODE are a choice, also where the value is the default; a program's namespace is too."""
    monkeypatch.setattr(config, "_DRIVERS", ("/",))
    monkeypatch.setattr("elastic_run.cluster.devices.device_count", lambda *_: 8)
    assert _count_workers("train.py") == "8"
    assert _count_workers("--rdzv-backend=c10d train.py") == "8"
    assert _count_workers("--nproc-per-node=1 train.py") == "1"
    # Written for torchrun: it says where the nodes meet, and has the one worker that torchrun starts.
    assert _count_workers("--nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=a7:29500 train.py") == "1"
    assert _count_workers("--nnodes=3 --master-addr=a7 --master-port=29500 train.py") == "1"
    # An agent for each task: four on this node share its GPUs.
    assert _count_workers(f"--nnodes=12 {MEETING} train.py", CROWDED) == "1"
    args = parse_args(["train.py"])
    complete_from_cluster(args, STEP)
    assert args.nproc_per_node == "1"
    monkeypatch.setenv("PET_NPROC_PER_NODE", "1")
    assert _count_workers("train.py") == "1"


@pytest.mark.parametrize("mask", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_give_one_worker(monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    """A step that asked for no GPU, on a node that has some."""
    monkeypatch.setattr(config, "_DRIVERS", ("/",))
    assert _count_workers("train.py", {"CUDA_VISIBLE_DEVICES": mask}) == "1"


def test_a_torch_without_gpus_gives_one_worker_and_a_line_on_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes have GPUs, but this installation of torch can't use them: that shall not stay unsaid."""
    monkeypatch.setattr(config, "_DRIVERS", ("/",))
    monkeypatch.setattr("elastic_run.cluster.devices.torch_build", lambda *_: frozenset())
    args, notices = _complete("train.py")
    assert args.nproc_per_node == "1"
    assert notices == [
        "this node has a GPU driver, but its worker gets no GPU: the installed torch is built without cuda and hip"
    ]


def test_a_node_that_has_lost_its_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver, a torch that wants GPUs, none there: one worker beside the eight of each other node helps nobody."""
    monkeypatch.setattr(config, "_DRIVERS", ("/",))
    monkeypatch.setattr("elastic_run.cluster.devices.torch_build", lambda *_: frozenset({"cuda"}))
    monkeypatch.setattr("elastic_run.cluster.devices.visible_gpus", lambda *_, **__: [])
    with pytest.raises(
        UsageError, match=r"^--nproc-per-node: this node has a GPU driver, but no gpu is visible here: "
    ):
        _count_workers("train.py")

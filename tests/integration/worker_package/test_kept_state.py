"""--keep-state: the state of a training outlives its workers, and what is not whole is never loaded."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from elastic_run.agent.kept_memory import KeptMemories
from elastic_run.contract import ENV_KEPT_STATE
from elastic_run.core.config import AgentConfig
from elastic_run.launch_config import LaunchConfig, _keep_state
from elastic_run.worker import KeptState, KeptStateError, MemoryReader, MemoryWriter, StateTooLargeError, kept_memory
from elastic_run.worker.kept_checkpoint import write_checkpoint
from tests.support.launch import ELASTIC_RUN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BytesIO

    from torch.distributed.checkpoint.planner import WriteItem

    from elastic_run.worker.kept_memory import KeptMemory
    from tests.support.launch import Launch, Worker


#: The modules that TRAIN imports. A template imports them once, instead of each worker in each of its lives.
WARM = "--preload=torch._dynamo,torch.distributed.fsdp,elastic_run.worker.kept_state"
TRAIN = """
import os, random, signal, sys, torch
import torch.distributed as dist
from elastic_run.worker import KeptState
dist.init_process_group("gloo")
rank, restart = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
torch.manual_seed(rank); random.seed(rank)
layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
kept = KeptState(model=model, optimizer=optimizer, scheduler=scheduler)
step = kept.restore() or 0
kills = dict(kill.split(":") for kill in sys.argv[2].split(",") if kill)
with open(f"{sys.argv[1]}.{rank}", "a") as book:
    while step < int(sys.argv[3]):
        x = torch.randn(8, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() + random.random()
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
        step += 1
        print(step, repr(loss.item()), file=book, flush=True)
        if kills.get(restart) == f"{rank}/-{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        kept.save(step)
        if kills.get(restart) == f"{rank}/{step}":
            os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def read_losses(book: Path) -> list[set[str]]:
    """Return the steps of each rank with their losses: a step that is trained again has to have the same one."""
    return [set(book.with_name(f"{book.name}.{rank}").read_text().splitlines()) for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("how", [pytest.param("failure", marks=pytest.mark.soak), "SIGTERM"])
def test_the_newest_state_is_written_on_the_way_out(how: str, launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A job that fails or is stopped leaves an ordinary checkpoint, which plain torch reads, with a line."""
    end = "raise RuntimeError" if how == "failure" else "print('saved', flush=True); signal.pause()"
    program = worker(
        "import signal, torch\nfrom elastic_run.worker import KeptState\n"
        "model = torch.nn.Linear(2, 2)\ntorch.nn.init.constant_(model.weight, 7.0)\n"
        f"KeptState(model=model).save(41)\n{end}\n"
    )
    job = launch("--keep-state=8MB", f"--keep-state-dir={tmp_path / 'kept'}", "--shutdown-timeout=200", program)
    if how == "SIGTERM":
        job.wait_line("saved")
        status = subprocess.run((*ELASTIC_RUN, "status"), capture_output=True, text=True, check=True).stdout
        assert re.search(r"kept state: step 41, [0-9.]+ m?s old, \d+ MiB of 8 MiB", status), status
        job.process.terminate()
    assert job.wait_exit(deadline=100) == (1 if how == "failure" else 143)
    assert f"the kept state is in {tmp_path}/kept/step-41" in job.stderr
    assert "UserWarning" not in job.stderr
    state = {"model": {"weight": torch.zeros(2, 2)}}
    load(state, checkpoint_id=tmp_path / "kept" / "latest", no_dist=True)
    assert torch.equal(state["model"]["weight"], torch.full((2, 2), 7.0))


@pytest.mark.long
def test_a_checkpoint_that_cannot_be_written_ends_nothing_else(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A line says why; the exit code is that of the job."""
    (tmp_path / "file").touch()
    program = worker(
        "import torch\nfrom elastic_run.worker import KeptState\n"
        "KeptState(model=torch.nn.Linear(2, 2)).save(1)\nraise SystemExit(3)\n"
    )
    job = launch("--keep-state=8MB", f"--keep-state-dir={tmp_path / 'file'}", "--shutdown-timeout=200", program)
    assert job.wait_exit(deadline=100) == 3
    assert f"the kept state was not written to {tmp_path / 'file'}: [Errno 20] Not a directory" in job.stderr


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--keep-state=lots",), "--keep-state: 'lots' is neither auto nor a size with a unit, such as 64GB or 500MiB"),
        (("--keep-state=900TB",), "--keep-state: keep state needs 900000.0 GB of memory, and this node has "),
        (("--keep-state=8MB", "--keep-state-copies=2"), "--keep-state-copies: '2' is above 1"),
        (("--keep-state=10KB",), "--keep-state: keep state needs 1 MB for 1 workers, and gets 0.0 MB"),
    ],
)
def test_bad_values_are_refused_in_a_line(flags: tuple[str, ...], line: str, launch: Launch, worker: Worker) -> None:
    """Nothing starts, and the line names flag, value and what is allowed."""
    job = launch(*flags, worker("print('started')"))
    assert job.wait_exit() == 2
    assert line in job.stderr
    assert len(job.stderr.splitlines()) == 1


@pytest.mark.long
def test_a_script_runs_without_the_flag(launch: Launch, worker: Worker) -> None:
    """One line says that nothing is kept."""
    program = worker(
        "import torch\nfrom elastic_run.worker import KeptState\nkept = KeptState(model=torch.nn.Linear(2, 2))\n"
        "print(kept.restore()); kept.save(1); kept.save(2)\n"
    )
    job = launch(program)
    assert job.wait_exit() == 0
    assert job.stdout == "None\n"
    assert job.stderr.count("no state is kept: the launcher was not started with --keep-state") == 1


#: Keeps a state of so many bytes a hundred times; prints memory and descriptors of itself and of the launcher.
GENERATIONS = """
import json, os, sys, torch
from pathlib import Path
from elastic_run.worker import KeptState
agent = json.loads(os.environ["ELASTIC_RUN_KEPT_STATE"])["paths"][0].split("/")[2]
def count(pid):
    status = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]), len(os.listdir(f"/proc/{pid}/fd"))
model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(int(sys.argv[1]) // 16)) for _ in range(4))
kept = KeptState(model=model)
for step in range(1, 101):
    kept.save(step)
    if step == 10 or step == 100:
        print("used", *count("self"), *count(agent), flush=True)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "size", [pytest.param(8_000_000, marks=pytest.mark.long), pytest.param(1_000_000_000, marks=pytest.mark.soak)]
)
def test_generations_take_no_more_memory(launch: Launch, worker: Worker, size: int) -> None:
    """Neither worker nor launcher grows from the tenth generation to the hundredth, and no descriptor is left."""
    job = launch(f"--keep-state={size * 9 // 4 // 1_000_000}MB", worker(GENERATIONS), f"{size}")
    assert job.wait_exit(deadline=30 + size / 5e6) == 0, job.stderr
    early, late = ([int(word) for word in line.split()[1:]] for line in job.stdout.splitlines())
    assert (late[1], late[3]) == (early[1], early[3])
    for before, after in zip(early[::2], late[::2], strict=True):
        assert after < before + 2000, (early, late)  # KiB, of which a thread's stack and its arena take some


# --- in one process --------------------------------------------------------------------------------------------------
@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptMemories]:
    """Give this process the memory of a worker, as the launcher does."""
    made = KeptMemories(1 << 20, 1)
    for name, value in made.describe(0).items():
        monkeypatch.setenv(name, value)
    kept_memory._map.cache_clear()
    yield made
    made.close()


def _own_memory() -> KeptMemory:
    node = kept_memory.open_memories(os.environ)
    assert node is not None
    return node.memories[0]


def _make_model(value: float) -> torch.nn.Module:
    model = torch.nn.Linear(100, 100)
    torch.nn.init.constant_(model.weight, value)
    return model


def test_damage_is_found_and_the_generation_before_is_used(
    memories: KeptMemories, capfd: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit anywhere in the state, its index or its record is found, a hundred times of a hundred."""
    path = json.loads(os.environ[ENV_KEPT_STATE])["paths"][0]
    for number in range(100):
        for step in (2 * number + 1, 2 * number + 2):
            KeptState(model=_make_model(step)).save(step)
        _own_memory().wait_checked()
        reader = MemoryReader()
        (part,) = reader._parts.values()
        record = part.record
        pick = random.Random(number)  # noqa: S311 - it repeats
        places = [
            pick.randrange(record.start, record.start + 100 * 100 * 4),
            record.start + pick.randrange(record.index_start, record.index_start + record.index_length),
        ]
        with Path(path).open("r+b") as memory:
            place = pick.choice(places)
            memory.seek(place)
            (byte,) = memory.read(1)
            memory.seek(place)
            memory.write(bytes((byte ^ 1 << pick.randrange(8),)))
        model = _make_model(0)
        assert KeptState(model=model).restore() == 2 * number + 1, (number, place, record)
        assert torch.equal(model.get_parameter("weight"), torch.full((100, 100), 2.0 * number + 1))
    assert "is damaged; step 199 is used instead" in capfd.readouterr().err
    assert memories.read_status()["used"] <= memories.size


def test_a_state_that_is_too_large_leaves_the_one_before(memories: KeptMemories) -> None:
    """The error names rank, size and flag; what was kept before is still there."""
    KeptState(model=_make_model(1)).save(1)
    with pytest.raises(
        StateTooLargeError, match=r"rank 0: the state has 4\.0 MB, and --keep-state leaves 0\.5 MB to it"
    ):
        KeptState(model=torch.nn.Linear(1000, 1000)).save(2)
    assert KeptState(model=_make_model(0)).restore() == 1
    assert memories.read_status()["label"] == "1"


def test_a_state_older_than_the_scripts_own_is_not_loaded(
    memories: KeptMemories, capfd: pytest.CaptureFixture[str]
) -> None:
    """The script says which step it has loaded from a disk; a line says what is used."""
    assert memories.size
    KeptState(model=_make_model(1)).save(5)
    assert KeptState(model=_make_model(0)).restore(loaded_step=6) is None
    assert KeptState(model=_make_model(0)).restore(loaded_step=5) == 5
    assert "step 5 is older than step 6, which was loaded; it is not used" in capfd.readouterr().err


def test_plain_checkpoints_of_torch_go_into_memory(memories: KeptMemories) -> None:
    """`dcp.save` and `dcp.load` with writer and reader keep tensors, slices, views, scalars and objects."""
    assert memories.size
    assert MemoryReader().label is None
    state: dict[str, Any] = {
        "a": torch.arange(12.0).view(3, 4).t(),
        "b": torch.tensor(3, dtype=torch.bfloat16),
        "c": {"d": [1, "x"]},
    }
    state["empty"], state["conjugates"] = torch.zeros(0, 3), torch.tensor([1 + 2j]).conj()
    save(state, checkpoint_id="first", storage_writer=MemoryWriter(), no_dist=True)
    loaded: dict[str, Any] = {
        "a": torch.zeros(4, 3),
        "b": torch.tensor(0, dtype=torch.bfloat16),
        "c": {"d": [0]},
        "empty": torch.ones(0, 3),
        "conjugates": torch.zeros(1, dtype=torch.complex64),
    }
    reader = MemoryReader()
    load(loaded, storage_reader=reader, no_dist=True)
    assert reader.label == "first"
    assert torch.equal(loaded["a"], state["a"])
    assert (loaded["b"].item(), loaded["c"], loaded["conjugates"].item()) == (3.0, {"d": [1, "x"]}, 1 - 2j)


def test_saves_that_overlap_are_never_mixed(memories: KeptMemories) -> None:
    """Of two saves in two threads, as async_save makes them, one is kept whole; the other fails with the remedy."""
    assert memories.size
    both = threading.Barrier(2)

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | BytesIO:
            if write_item.index.fqn == "0":
                with contextlib.suppress(threading.BrokenBarrierError):
                    both.wait(0.3)
            return super().resolve_data(write_item)

    def keep(value: int) -> str:
        state = {f"{part}": torch.full((1000,), float(value)) for part in range(4)}
        try:
            save(state, checkpoint_id=f"{value}", storage_writer=MemoryWriter(), planner=Planner(), no_dist=True)
        except CheckpointException as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(keep, 1), pool.submit(keep, 2)
    errors = [error for error in (first.result(), second.result()) if error]
    assert all("a save (async_save) has to end before the next one begins" in error for error in errors)
    reader = MemoryReader()
    loaded = {f"{part}": torch.zeros(1000) for part in range(4)}
    load(loaded, storage_reader=reader, no_dist=True)
    assert {float(value) for each in loaded.values() for value in each} == {float(reader.label or 0)}


def test_a_reader_does_not_read_what_later_saves_have_replaced(memories: KeptMemories) -> None:
    """Its label and what it loads belong together."""
    assert memories.size
    save({"a": torch.tensor(1)}, checkpoint_id="1", storage_writer=MemoryWriter(), no_dist=True)
    reader = MemoryReader()
    for step in (2, 3):
        save({"a": torch.tensor(step)}, checkpoint_id=f"{step}", storage_writer=MemoryWriter(), no_dist=True)
    with pytest.raises(CheckpointException, match="later saves have replaced the state 1: make a new MemoryReader"):
        load({"a": torch.tensor(0)}, storage_reader=reader, no_dist=True)


def test_a_damaged_state_is_not_kept_instead_of_a_sound_one(memories: KeptMemories) -> None:
    """The save after a restore takes the place of what was damaged, so that a torn one leaves the sound one."""
    for step in (1, 2):
        KeptState(model=_make_model(step)).save(step)
    memory = _own_memory()
    memory.wait_checked()
    newest = max(filter(None, memory.read_records()), key=lambda record: record.generation.number)
    memory.part(newest.start, 1)[:] = b"?"
    assert KeptState(model=_make_model(0)).restore() == 1
    with pytest.raises(StateTooLargeError):
        KeptState(model=torch.nn.Linear(1000, 1000)).save(2)
    assert KeptState(model=_make_model(0)).restore() == 1
    assert memories.read_status()["label"] == "1"


def test_a_parameter_without_a_gradient_has_no_optimizer_state(memories: KeptMemories) -> None:
    """The optimizer's state comes back for each group. Parameters that had no gradient before begin without a state."""
    assert memories.size

    def make() -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
        module = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "later": torch.nn.Linear(2, 1)})
        groups = [{"params": each.parameters(), "lr": 0.1 * number} for number, each in enumerate(module.values(), 1)]
        return module, torch.optim.AdamW(groups)

    model, optimizer = make()
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    KeptState(model=model, optimizer=optimizer).save(1)
    model, optimizer = make()
    assert KeptState(model=model, optimizer=optimizer).restore() == 1
    assert {name for name, each in model.named_parameters() if each in optimizer.state} == {"used.weight", "used.bias"}
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.2]


def test_only_the_launchers_own_memory_is_opened(
    memories: KeptMemories, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A path of /proc may lead to any file: in another pid namespace, and after the end of the launcher."""
    assert memories.size
    described = json.loads(os.environ[ENV_KEPT_STATE])
    (tmp_path / "log").write_bytes(bytes(8192))
    with (tmp_path / "log").open("r+b") as log:
        for change in ({"paths": [f"/proc/{os.getpid()}/fd/{log.fileno()}"]}, {"name": "elastic-run-state-0"}):
            monkeypatch.setenv(ENV_KEPT_STATE, json.dumps({**described, **change}))
            with pytest.raises(KeptStateError, match="can't be opened from here: it is another file there"):
                KeptState(model=_make_model(1)).save(1)


def test_a_launcher_in_a_worker_shares_no_memory(launch: Launch, worker: Worker) -> None:
    """Its workers would have one memory together."""
    program = worker(f"import os; print('kept', repr(os.environ['{ENV_KEPT_STATE}']))")
    job = launch("--keep-state=8MB", "--no-python", *ELASTIC_RUN, str(program))
    assert job.wait_exit() == 0
    assert job.stdout == "kept ''\n"


def test_a_system_without_so_much_memory_is_told_in_a_line() -> None:
    """A limit of `ulimit -f` holds for memory as well."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"keep state gets no 8 MB of memory from the system: File too large"):
            _keep_state(AgentConfig(keep_state="8MB"), LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("label", ["7", "checkpoints/../step=7"])
def test_only_its_own_checkpoints_are_removed(memories: KeptMemories, tmp_path: Path, label: str) -> None:
    """A script may have checkpoints and a link of the same name in the directory; any label is a name in it."""
    assert memories.size
    (tmp_path / "step-7").mkdir()
    (tmp_path / "latest").symlink_to("step-7")
    save({"a": torch.tensor(1)}, checkpoint_id=label, storage_writer=MemoryWriter(), no_dist=True)
    for _ in range(2):
        written = write_checkpoint(tmp_path)
        assert written is not None
        assert {each.name for each in tmp_path.iterdir()} == {"latest", "step-7", written.name}
        assert (tmp_path / "latest").resolve() == written
        # What a writer leaves that is killed when its checkpoint is whole: the next one goes on there.
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").symlink_to("step-7")
        (tmp_path / f"step-6-{'0' * 16}").mkdir()
        (tmp_path / ".latest.00000000").symlink_to(written.name)


def test_an_optimizer_needs_its_module() -> None:
    """The error says what to do."""
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    with pytest.raises(KeptStateError, match="the parameters of optimizer 'optimizer' are in none of the modules"):
        KeptState(model=torch.nn.Linear(1, 1), optimizer=optimizer)

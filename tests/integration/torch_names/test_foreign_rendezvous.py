"""A rendezvous that somebody else wrote for torchrun: torch's own, as a plug-in, under our agents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.sessions import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

_PACKAGES = Path(__file__).parents[1].parent / "data" / "rendezvous_plugin"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Install the plug-in, and keep torch's look-ups of names from waiting for a name server."""
    metadata = tmp_path / "torchs_own-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchs_own\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[torchrun.handlers]\ntorchs-own = torchs_own:get_handler\n"
        "creator-itself = creator_itself:create_rendezvous_handler\n"
    )
    return {"PYTHONPATH": os.pathsep.join((str(_PACKAGES), str(tmp_path))), "RES_OPTIONS": "attempts:0"}


def test_nodes_of_different_size_and_a_restart(launch: Launch, worker: Worker, environment: dict[str, str]) -> None:
    """Two agents meet through torch's handler, agree on the ranks of 1 + 2 workers, and restart together."""
    script = worker(
        "world, local_rank, size = (os.environ[name] for name in ('WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'))\n"
        "say(f'rank {rank} of {world}')\n"
        "mark = f'{sys.argv[1]}.{size}.{local_rank}'\n"
        "if not os.path.exists(mark):\n"
        "    open(mark, 'w').close()\n"
        "    if size == '2': signal.pause()\n"
        "    while not all(os.path.exists(f'{sys.argv[1]}.2.{other}') for other in '01'): time.sleep(0.01)\n"
        "    sys.exit(3)\n"
    )
    mark = str(Path(script).with_name("mark"))
    common = ("--nnodes=2", "--rdzv-backend=torchs-own", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=j")
    conf = "--rdzv-conf=last_call_timeout=1"
    first = launch(*common, conf, "--nproc-per-node=2", "--max-restarts=1", script, mark, env=environment)
    second = launch(*common, conf, "--nproc-per-node=1", "--max-restarts=1", script, mark, env=environment)
    assert first.wait_exit() == 0, first.stderr
    assert second.wait_exit() == 0, second.stderr
    assert "stopping the workers: nodes wait to join" in first.stderr
    # Torch's registry loads the plug-in in the middle of its own import, and need not tell the user.
    assert "Traceback" not in first.stderr + second.stderr
    lines = sorted((first.stdout + second.stdout).splitlines())
    assert len(lines) == 6, lines
    assert set(lines) == {f"rank {rank} of 3" for rank in range(3)}


@pytest.mark.long
@pytest.mark.parametrize("compat", ["", pytest.param("1", marks=pytest.mark.long)])
def test_an_entry_point_that_is_the_creator_itself(
    launch: Launch, worker: Worker, environment: dict[str, str], compat: str
) -> None:
    """A plug-in whose entry point takes the parameters, and asks for torch's class of them, launches a job."""
    script = worker("say(f'rank {rank} of', os.environ['WORLD_SIZE'])\n")
    place = ("--rdzv-backend=creator-itself", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=j")
    job = launch(*place, "--nproc-per-node=2", script, env={**environment, "ELASTIC_RUN_COMPAT": compat})
    assert job.wait_exit() == 0, job.stderr
    assert "Traceback" not in job.stderr
    assert sorted(job.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.long
def test_a_plug_in_that_refuses_is_quoted(launch: Launch, worker: Worker, environment: dict[str, str]) -> None:
    """Where a plug-in's creator raises torch's error the line has its words and its cause, and the code is 201."""
    place = ("--rdzv-backend=creator-itself", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=j")
    job = launch(*place, "--rdzv-conf=refuse=1", worker("say('ran')"), env=environment)
    assert job.wait_exit() == 201, job.stderr
    assert job.stdout == ""
    said = (
        "error: the rendezvous plug-in makes no handler: no luck: refuse is given (LOGLEVEL=DEBUG shows the traceback)"
    )
    assert job.stderr.splitlines()[-1] == f"elastic-run: {said}"

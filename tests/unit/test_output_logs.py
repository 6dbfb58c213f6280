"""Where output goes: what our `Std` and `DefaultLogsSpecs` promise beyond torch's (see tests/parity)."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from elastic_run import files
from elastic_run.multiprocessing import DefaultLogsSpecs, Std


def environments(count: int, *, run_id: str = "job", restarts: int = 0) -> dict[int, dict[str, str]]:
    """Return workers' environments as far as logs need them."""
    return {rank: {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(restarts)} for rank in range(count)}


@pytest.fixture(autouse=True)
def temporary_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point TMPDIR to a directory of the test's own."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    return place


def test_std_accepts_any_rank() -> None:
    """A map may name ranks above 9, which torch refuses."""
    assert Std.from_str("10:3,127:1") == {10: Std.ALL, 127: Std.OUT}


@pytest.mark.parametrize("value", ["", "4", "7", "-1", "0:9", "0:", ":1", "a:1", "0:1,", "0:1;1:2", "\u00b2:1", "1 "])
def test_std_refuses_with_one_line(value: str) -> None:
    """Anything else is refused in one line that names the value."""
    with pytest.raises(ValueError, match=r"\A" + re.escape(repr(value)) + r".*\Z"):
        Std.from_str(value)


def test_the_directory_can_be_asked_for_before_reify(temporary_place: Path) -> None:
    """Whoever asks for the directory that all runs share gets one, and the run's directory lies in it."""
    specs = DefaultLogsSpecs(None, Std.ALL)
    directory = Path(specs.root_log_dir)
    assert directory.is_dir()
    assert directory.parent == temporary_place
    assert Path(specs.reify(environments(1)).stdouts[0]).is_relative_to(directory)
    assert [*temporary_place.iterdir()] == [directory]


def test_a_directory_that_a_subclass_makes_is_used_and_kept(tmp_path: Path) -> None:
    """The hook `_make_log_dir` of torch is asked once for the run's directory, which no clean-up removes."""
    calls = []

    class Own(DefaultLogsSpecs):
        def _make_log_dir(self, log_dir: str | None, rdzv_run_id: str) -> str:
            calls.append((log_dir, rdzv_run_id))
            own = tmp_path / "own"
            own.mkdir()
            return str(own)

    specs = Own()
    for restarts in (0, 1):
        assert Path(specs.reify(environments(1, restarts=restarts)).error_files[0]).is_relative_to(tmp_path / "own")
    specs.cleanup()
    assert calls == [(None, "job")]
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["attempt_0", "attempt_1"]


@pytest.mark.parametrize("above", [1, 2])
def test_a_file_in_the_place_of_a_removed_directory_is_named(above: int, tmp_path: Path) -> None:
    """The system names only the path that can't be made, or says that the file exists."""
    specs = DefaultLogsSpecs(log_dir=str(tmp_path / "above" / "logs"))
    specs.reify(environments(1))
    run = Path(specs.run_log_dir or "")
    place = (run, *run.parents)[above]
    files.remove_tree(str(place))
    place.write_text("")
    with pytest.raises(NotADirectoryError, match=f"Not a directory: '{re.escape(str(place))}'$"):
        specs.reify(environments(1, restarts=1))


def test_every_attempt_is_kept(tmp_path: Path) -> None:
    """Each attempt has a directory of its own, also when one is laid out twice, and none is emptied."""
    specs = DefaultLogsSpecs(str(tmp_path), Std.ALL)
    for restarts in (0, 0, 0, 1):
        paths = specs.reify(environments(1, restarts=restarts)).stdouts
        assert not Path(paths[0]).exists()
        Path(paths[0]).write_text(paths[0], encoding="utf-8")
    assert specs.run_log_dir is not None
    found = sorted(Path(specs.run_log_dir).glob("*/0/stdout.log"))
    assert [path.parts[-3] for path in found] == ["attempt_0", "attempt_0.1", "attempt_0.2", "attempt_1"]
    assert [path.read_text(encoding="utf-8") for path in found] == [str(path) for path in found]


def test_the_name_of_a_run(tmp_path: Path) -> None:
    """A run's directory is named after the job's id and the moment, or the moment and the program without an id."""
    for program, pattern in (("", r"job_\d{8}-\d{4}_[0-9a-f]{4}"), ("train", r"\d{8}-\d{4}_train_[0-9a-f]{4}")):
        specs = DefaultLogsSpecs(str(tmp_path))
        specs.program = program
        specs.reify(environments(1))
        assert specs.run_log_dir is not None
        assert re.fullmatch(pattern, Path(specs.run_log_dir).name)


@pytest.mark.parametrize(("host", "name"), [("", "latest"), ("node1", "latest-node1")])
def test_a_link_points_to_the_latest_run(tmp_path: Path, host: str, name: str) -> None:
    """The link `latest`, of each node its own, points to the newest run; what the user named so is left alone."""
    for _ in range(2):
        specs = DefaultLogsSpecs(str(tmp_path), Std.ALL)
        specs.host = host
        specs.reify(environments(1))
        assert specs.run_log_dir is not None
        assert (tmp_path / name).resolve() == Path(specs.run_log_dir)
    assert [path.name for path in tmp_path.iterdir() if path.is_symlink()] == [name]
    (tmp_path / name).unlink()
    (tmp_path / name).write_text("mine", encoding="utf-8")
    specs = DefaultLogsSpecs(str(tmp_path), Std.ALL)
    specs.host = host
    specs.reify(environments(1))
    assert (tmp_path / name).read_text(encoding="utf-8") == "mine"


def test_directories_that_hold_nothing_are_not_left(tmp_path: Path) -> None:
    """The clean-up removes empty directories of a run, and a run without files with its link, but no file."""
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), Std.ALL)
    paths = [specs.reify(environments(2, restarts=restarts)).stdouts for restarts in (0, 1)]
    Path(paths[1][1]).touch()
    specs.cleanup()
    assert specs.run_log_dir is not None
    found = [str(path.relative_to(specs.run_log_dir)) for path in sorted(Path(specs.run_log_dir).rglob("*"))]
    assert found == ["attempt_1", "attempt_1/1", "attempt_1/1/stdout.log"]
    Path(paths[1][1]).unlink()
    specs.cleanup()
    assert not list((tmp_path / "logs").iterdir())


@pytest.mark.parametrize("run_id", ["a/b/../c", "x" * 300, "größe", "..", "new\nline"])
def test_any_run_id_makes_a_directory(tmp_path: Path, run_id: str) -> None:
    """The directory lies directly in the log directory, whatever the run id is."""
    specs = DefaultLogsSpecs(str(tmp_path / "logs"))
    specs.reify(environments(1, run_id=run_id))
    assert specs.run_log_dir is not None
    assert Path(specs.run_log_dir).parent == tmp_path / "logs"


def test_error_files_are_temporary(temporary_place: Path) -> None:
    """Without a log directory and log files the place of error files is private, and goes with `cleanup`."""
    specs = DefaultLogsSpecs()
    error_file = Path(specs.reify(environments(2)).error_files[1])
    assert specs.is_temporary
    assert specs.run_log_dir is not None
    assert specs.root_log_dir == specs.run_log_dir
    assert stat.S_IMODE(Path(specs.run_log_dir).stat().st_mode) == 0o700
    error_file.write_text("{}", encoding="utf-8")
    (error_file.parent / "deep").mkdir()
    (error_file.parent / "link").symlink_to(temporary_place)
    (temporary_place / "mine").touch()
    specs.cleanup()
    assert [path.name for path in temporary_place.iterdir()] == ["mine"]


def test_a_given_directory_alone_keeps_all_output(tmp_path: Path) -> None:
    """With a log directory, and no redirects nor tee, each rank has files for a copy of what goes to the console."""
    found = DefaultLogsSpecs(str(tmp_path), local_ranks_filter={0}).reify(environments(2))
    assert found.stdouts == {0: "", 1: os.devnull}
    assert [Path(path).parts[-3:] for path in found.kept_stderrs.values()] == [
        ("attempt_0", str(rank), "stderr.log") for rank in range(2)
    ]
    for specs in (DefaultLogsSpecs(str(tmp_path), Std.OUT), DefaultLogsSpecs(str(tmp_path), tee=Std.ERR)):
        assert not specs.reify(environments(2)).kept_stdouts


def test_no_temporary_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no temporary directory can be made, the job runs without error files, and filtered ranks stay silent."""
    monkeypatch.setenv("TMPDIR", "/proc/nowhere")
    monkeypatch.setattr(files, "_TEMPORARY_PLACES", ("/proc",))
    env = environments(2)
    found = DefaultLogsSpecs(local_ranks_filter={0}).reify(env)
    assert found.error_files == {0: "", 1: ""}
    assert [worker["TORCHELASTIC_ERROR_FILE"] for worker in env.values()] == ["", ""]
    assert found.stdouts == {0: "", 1: os.devnull}

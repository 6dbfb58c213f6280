"""The parts of `--preload` that decide: whether it can apply, what `auto` takes, and whether a next round is likely."""

from __future__ import annotations

import os
import site
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from elastic_run.core import supervision
from elastic_run.core.policy import RestartPolicy
from elastic_run.launcher import LaunchConfig
from elastic_run.multiprocessing.warm import messages
from elastic_run.multiprocessing.warm.choice import choose_modules
from elastic_run.multiprocessing.warm.obstacles import find_obstacle
from elastic_run.multiprocessing.warm.sharing import measure_sharing

if TYPE_CHECKING:
    from pathlib import Path

_PYTHON = sys.executable


@pytest.mark.parametrize(
    "command",
    [
        "-u train.py --lr 1",
        "-u -m package.train -m",
        "train.py ${local_rank}",
        "-",
        "-c pass -S",
        "-X faulthandler -Wignore -W error -uOO -Xdev -E -m train",
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
    ("options", "is_read"), [("", True), ("-u -W ignore -X utf8", True), ("-s", False), ("-I", False), ("-Es", False)]
)
def test_the_users_site_is_not_always_read(
    options: str, *, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed there only, a template can't be started with -s or -I: Python would run the script in it."""
    (tmp_path / "elastic-run-compat.pth").write_text(f"# {contract.ENV_TEMPLATE}", encoding="ascii")
    monkeypatch.setattr(site, "getsitepackages", list)
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path))
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    monkeypatch.syspath_prepend(tmp_path)
    obstacle = find_obstacle([_PYTHON, *options.split(), "train.py"])
    assert ("elastic-run-compat.pth isn't there" not in obstacle) == is_read
    assert bool(obstacle) != is_read


@pytest.mark.parametrize(
    ("stop_reason", "changes", "expected"),
    [
        (supervision.AFTER_FAILURE, {}, True),
        (supervision.AFTER_FAILURE, {"restart_times": (1.0,)}, False),
        (supervision.AFTER_FAILURE, {"restart_times": (1.0,), "follows_job": True}, True),
        (supervision.AFTER_HALT, {"restart_times": (1.0,)}, True),
        (supervision.AFTER_SUCCESS, {}, False),
        (supervision.AFTER_SIGNAL, {"follows_job": True}, False),
        (supervision.AFTER_FAILURE, {"ending": supervision.Finish("unkillable_worker")}, False),
        (
            supervision.AFTER_FAILURE,
            {"start_failure": supervision.RoundFailed(0, verdict="cannot_start", detail="")},
            False,
        ),
    ],
)
def test_what_may_start_again(stop_reason: str, changes: dict[str, object], *, expected: bool) -> None:
    """A next generation is worth preparing after a failure with budget left, and when the job decides."""
    agent = supervision.Agent(policy=RestartPolicy(1), local_world_size=2)
    stopping = agent.replace(state=supervision.STOPPING, stop_reason=stop_reason, **changes)
    assert supervision.may_start_again(stopping) is expected


def make_package(path: Path, size: int) -> None:
    """Write a package with so many bytes of code."""
    path.mkdir(parents=True)
    (path / "__init__.py").write_text("raise RuntimeError('executed')\n", encoding="utf-8")
    (path / "code.so").write_bytes(b"\0" * size)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a directory of programs, on a path with packages of others: large, huge and small."""
    others = tmp_path / "site-packages"
    for name, size in (("large", 5 << 20), ("huge", 9 << 20), ("small", 1 << 10), ("shadowed", 5 << 20)):
        make_package(others / name, size)
    programs = tmp_path / "programs"
    make_package(programs / "shadowed", 5 << 20)
    make_package(programs / "own", 5 << 20)
    monkeypatch.setattr(sys, "path", [str(programs), str(others), *sys.path])
    return programs


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import large.part as part, small, json, huge", ["large.part", "huge"]),
        ("from large import x\nfrom large.deep import y\nimport large", ["large", "large.deep"]),
        ("import own, shadowed\nfrom . import large\nfrom .huge import x", []),
        ("try:\n    import large\nexcept ImportError:\n    import huge\nelse:\n    import small", ["large", "huge"]),
        ("if x:\n    import large\nelif y:\n    import huge", ["large", "huge"]),
        ("with x:\n    import large", ["large"]),
        ("if __name__ == '__main__':\n    import large", ["large"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import large\nelse:\n    import huge", ["huge"]),
        ("def f():\n    import large\nclass C:\n    import huge", []),
        ("import nowhere", []),
        ("# coding: latin-1\nx = '\xe9'\nimport large", ["large"]),
        ("import large\nthis is no Python", []),
        ("", []),
    ],
)
def test_auto_takes_what_is_heavy_and_others(program: str, expected: list[str], packages: Path) -> None:
    """Top-level imports of large packages that don't lie beside the program, in order; nothing is executed."""
    (packages / "train.py").write_bytes(program.encode("latin-1"))
    assert choose_modules("file", str(packages / "train.py")) == expected


def test_auto_finds_the_program_in_each_form(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module, a package, a directory, a zip file and a command are read without being executed."""
    for name in ("__init__", "__main__", "train"):
        (packages / "own" / f"{name}.py").write_text(f"import large.{name}\n1 / 0", encoding="utf-8")
    assert choose_modules("module", "own.train") == ["large.train"]
    assert choose_modules("module", "own") == ["large.__main__"]
    assert choose_modules("command", "import huge") == ["huge"]
    assert choose_modules("stdin", "<stdin>") == []
    assert choose_modules("module", "nowhere.at.all") == []
    assert choose_modules("file", "/nowhere") == []
    archive = packages / "archive.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", "import large.zipped")
    for place, expected in ((packages / "own", "large.__main__"), (archive, "large.zipped")):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(place), *sys.path])
            assert choose_modules("module", "__main__") == [expected]


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


@pytest.mark.parametrize("is_new", [True, False])
def test_a_document_of_any_size_goes_through_a_file(monkeypatch: pytest.MonkeyPatch, *, is_new: bool) -> None:
    """An environment of megabytes comes out as it went in; also where Python was built for an old C library."""
    if not is_new:
        monkeypatch.delattr(os, "memfd_create")
    document = {"env": {f"NAME{number}": "v" * 1000 for number in range(4000)}, "argv": ["a", "\udcff"]}
    assert messages.take_from_file(messages.put_into_file(document)) == document


def test_what_cant_be_measured_saves_nothing() -> None:
    """Processes that have ended, or that share nothing, save nothing."""
    assert measure_sharing([], [os.getpid()]) == 0
    assert measure_sharing([2**22 + 1], []) == 0


def test_a_program_is_told_a_wrong_list() -> None:
    """`LaunchConfig` refuses what no module can be called."""
    with pytest.raises(
        ValueError, match=r"^preload: 'torch, numpy' is not a list of modules \(torch,numpy\), nor auto$"
    ):
        LaunchConfig(1, 1, 1, preload="torch, numpy")

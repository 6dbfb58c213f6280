"""The parts of `--preload` that decide: whether it can apply, what `auto` takes, and whether a next round is likely."""

from __future__ import annotations

import os
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from elastic_run.agent.driver.round_waits import find_obstacle
from elastic_run.core.agent import machine
from elastic_run.core.agent.messages import Finish, RoundFailed
from elastic_run.core.job.config import AgentConfig, JobConfig
from elastic_run.launcher import LaunchConfig
from elastic_run.multiprocessing.warm import messages
from elastic_run.multiprocessing.warm.automatic_preload import choose_modules

if TYPE_CHECKING:
    from pathlib import Path

_PYTHON = sys.executable
_GROUPS = pytest.mark.skipif(sys.version_info < (3, 11), reason="except* came with Python 3.11")


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
        ("for x in y:\n    import large\nelse:\n    import huge", ["large", "huge"]),
        ("while x:\n    import large\nelse:\n    import huge", ["large", "huge"]),
        ("match x:\n    case 1:\n        import large\n    case _:\n        import huge", ["large", "huge"]),
        pytest.param("try:\n    import large\nexcept* OSError:\n    import huge", ["large", "huge"], marks=_GROUPS),
        ("class C:\n    import large\n    def f():\n        import huge", ["large"]),
        ("def f():\n    import large\nasync def g():\n    import huge", []),
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


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    "change",
    [
        "os.environ['HF_HOME'] = '/tmp'",
        "os.environ['LD_LIBRARY_PATH'] += ':/tmp'",
        "x, os.environ['HF_HOME'] = 1, '/tmp'",
        "os.environb[b'HF_HOME'] = b'/tmp'",
        "os.environ |= {'HF_HOME': '/tmp'}",
        "from os import environ\nenviron |= {'HF_HOME': '/tmp'}",
        "del os.environ['HF_HOME']",
        "os.environ.update(HF_HOME='/tmp')",
        "home = os.environ.setdefault('HF_HOME', '/tmp')",
        "[os.environ.pop(name) for name in x]",
        "os.environ.clear()",
        "os.putenv('HF_HOME', '/tmp')",
        "os.unsetenv('HF_HOME')",
        "from os import environ\nenviron['HF_HOME'] = '/tmp'",
        "from os import putenv\nputenv('HF_HOME', '/tmp')",
        "from dotenv import load_dotenv\nload_dotenv()",
        "if 'HF_HOME' not in os.environ:\n    os.environ['HF_HOME'] = '/tmp'",
        "try:\n    pass\nfinally:\n    os.environ['HF_HOME'] = '/tmp'",
        "with x:\n    os.environ['HF_HOME'] = '/tmp'\n    import huge.part",
        "class C:\n    os.environ['HF_HOME'] = '/tmp'",
    ],
)
def test_auto_takes_nothing_after_a_change_of_the_environment(change: str) -> None:
    """What the program imports after it has set a variable isn't chosen: its import may read the variable."""
    assert choose_modules("command", f"import os, large\n{change}\nimport huge, large") == ["large"]


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    "reading",
    [
        "home = os.environ['HF_HOME']",
        "home = os.environ.get('HF_HOME') or os.getenv('HF_HOME')",
        "for name, value in os.environ.items():\n    x[name] = value",
        "env = os.environ.copy()\nenv['HF_HOME'] = '/tmp'",
        "x[0] = os.environ\nf()[0] = 1",
        "def f():\n    os.environ['HF_HOME'] = '/tmp'",
        "f = lambda: os.environ.clear()",
        "if TYPE_CHECKING:\n    os.environ['HF_HOME'] = '/tmp'",
        "x.update(HF_HOME='/tmp')\nx['HF_HOME'] = '/tmp'\ndel x['HF_HOME']",
    ],
)
def test_auto_goes_on_after_a_look_at_the_environment(reading: str) -> None:
    """Variables that are read, or that a function would change, leave the imports after them."""
    assert choose_modules("command", f"import os\n{reading}\nimport huge") == ["huge"]


def test_auto_leaves_a_pipe_to_the_program() -> None:
    """A program that can be read only once isn't read, and nothing is chosen."""
    reading, writing = os.pipe()
    os.write(writing, b"import large")
    os.close(writing)
    assert choose_modules("file", f"/dev/fd/{reading}") == []
    assert os.read(reading, 100) == b"import large"
    os.close(reading)


def test_auto_passes_over_broken_links(packages: Path) -> None:
    """A link to nowhere, or to itself, in a package doesn't keep that package or another from being chosen."""
    for package in (packages.parent / "site-packages" / name for name in ("small", "large")):
        (package / "nowhere.so").symlink_to("/nowhere")
        (package / "loop.py").symlink_to("loop.py")
    assert choose_modules("command", "import small, large") == ["large"]


@pytest.mark.parametrize(
    "program", [b"import large\0", b"import large\nx = '\xff'", b"import large\nx = " + b"-" * 20_000 + b"1"]
)
def test_auto_chooses_nothing_of_what_python_cant_read(program: bytes, packages: Path) -> None:
    """A program with null bytes, of no encoding or nested too deeply is for Python to complain of."""
    (packages / "train.py").write_bytes(program)
    assert choose_modules("file", str(packages / "train.py")) == []


@pytest.mark.usefixtures("packages")
def test_auto_chooses_nothing_where_a_finder_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import hook of others that raises costs the choice, not the template."""

    def fail(path: str) -> None:
        raise RuntimeError(path)

    monkeypatch.setattr(sys, "path_hooks", [fail])
    monkeypatch.setattr(sys, "path", ["/nowhere/that/was/asked/for", *sys.path])
    assert choose_modules("command", "import large") == []


@pytest.mark.usefixtures("packages")
def test_auto_repeats_no_warnings() -> None:
    """What Python would warn of in the program is left to the workers to say."""
    assert choose_modules("command", r"x = '\d'; import large") == ["large"]


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


def test_a_program_is_told_a_wrong_list() -> None:
    """`LaunchConfig` refuses what no module can be called."""
    with pytest.raises(
        ValueError, match=r"^preload: 'torch, numpy' is not a list of modules \(torch,numpy\), nor auto$"
    ):
        LaunchConfig(1, 1, 1, agent_config=AgentConfig(preload="torch, numpy"))

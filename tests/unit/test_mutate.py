"""The changes that `make mutate` makes."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.mutate import INTEGRATION, ROOT, Copy, find_mutants, find_tests

if TYPE_CHECKING:
    from pathlib import Path

_SOURCE = textwrap.dedent(
    '''
    """A docstring, with 1 < 2."""
    from typing import TYPE_CHECKING
    if TYPE_CHECKING:
        LIMIT = 7
    __slots__ = ("a", 3)
    WAIT: float = 2.0

    def judge(ü: int, done: bool = False) -> bool:
        """Return 5."""
        _log.warning("no", 9)
        tell(f"{ü + 1}", strict=True)
        if ü < 3 and not done:
            raise ValueError("x" + str(4))
        return ü in {1}
    '''
).encode()

#: A test of a copy, whose programs have another directory and another PYTHONPATH.
_PLACE = textwrap.dedent(
    """
    import os, subprocess, sys
    from pathlib import Path
    from elastic_run.multiprocessing.warm.obstacles import find_obstacle

    ROOT = Path(__file__).parents[2]

    def test_place(tmp_path):
        script = tmp_path / "script.py"
        script.write_text("import elastic_run; print(elastic_run.__file__)")
        command = Path(sys.executable).with_name("elastic-run")
        for program in ([sys.executable], [command, "--standalone"]):
            env = {**os.environ, "PYTHONPATH": str(tmp_path)}
            words = [*program, script]
            found = subprocess.run(words, cwd="/", env=env, capture_output=True, text=True, check=True).stdout
            assert found == f"{ROOT}/elastic_run/__init__.py\\n"

    def test_warm_workers():
        assert find_obstacle([sys.executable, "train.py"]) == ""
    """
).encode()


def test_code_is_changed_and_nothing_else() -> None:
    """Docstrings, texts, logging and code for type checkers stay; all else has its changes, in the right place."""
    described = [mutant.describe().removeprefix("a.py:") for mutant in find_mutants("a.py", _SOURCE)]
    assert described == [
        "7: 2.0 -> 4.0",
        "9: False -> True",
        '12: tell(f"{ü + 1}", strict=True) -> pass',
        "13: ü < 3 and not done -> (ü < 3 or not done)",
        "13: ü < 3 -> (ü <= 3)",
        "13: 3 -> 4",
        "13: not done -> (done)",
        '14: raise ValueError("x" + str(4)) -> pass',
        "15: return ü in {1} -> return None",
        "15: ü in {1} -> (ü not in {1})",
        "15: 1 -> 2",
    ]


def test_every_change_is_python() -> None:
    """A file with a change can still be compiled: otherwise each test would notice it."""
    for path in sorted((ROOT / "elastic_run" / "store").rglob("*.py")):
        source = path.read_bytes()
        for mutant in find_mutants(path.name, source)[::7]:
            changed = source[: mutant.begin] + mutant.new + source[mutant.begin + len(mutant.old) :]
            compile(changed, path.name, "exec", dont_inherit=True)


@pytest.mark.parametrize("room", INTEGRATION)
def test_every_pattern_names_tests_that_exist(room: str) -> None:
    """A test that was renamed still judges the changes of its package."""
    assert [pattern for pattern in INTEGRATION[room].split() if not find_tests(pattern)] == []
    assert (ROOT / "elastic_run" / room).is_dir()


@pytest.mark.long
def test_programs_of_a_copys_tests_run_the_copy(tmp_path: Path) -> None:
    """So a change is seen also where a test sets PYTHONPATH, by the command, and in warm workers."""
    copy = Copy(tmp_path)
    copy.write("tests/unit/test_place.py", _PLACE)
    assert copy.run(["tests/unit/test_place.py"], 120)

"""The changes that `make mutate` makes."""

from __future__ import annotations

import textwrap

from tests.mutate import ROOT, find_mutants

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

"""Changes random places of the package, one at a time, and tells which changes no test notices: `make mutate`.

    python -m tests.mutate report store --sample 30 --seed 2
    python -m tests.mutate report --tests tests/integration/diagnosis/test_report_*.py

A room is a package below `elastic_run`. Each change (a mutant) is made in a copy of the repository, never in the
checkout. The unit tests and scenarios that import from the room run against the copy; if none fails, the tests of
`--tests`. A mutant with which all pass has survived: a test is missing, or the change makes no difference that a user
could notice. Docstrings, texts, logging, code for type checkers and `strict` of `zip` are left alone.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from elastic_run.contract import ENV_TEMPLATE

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
_SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
_UNCHANGED_NAMES = {"TYPE_CHECKING", "__slots__", "__all__", "__getattr__"}
_LOGS = {"_log", "log", "logger", "warnings"}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Args:
        path: The file, relative to the repository.
        line: Where it begins.
        begin: Offset of the changed bytes.
        old: These bytes.
        new: What stands there instead.
    """

    path: str
    line: int
    begin: int
    old: bytes
    new: bytes

    def describe(self) -> str:
        """Return place, old text and new text in one line."""
        texts = (" ".join(text.decode().split())[:90] for text in (self.old, self.new))
        return f"{self.path}:{self.line}: {' -> '.join(texts)}"


def find_mutants(path: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file, at most one for each node of its tree."""
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    found = []
    for node, new in _find_changes(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        found.append(Mutant(path, node.lineno, begin, source[begin:end], new.encode()))
    return found


def _find_changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the nodes below one that can be changed, and what stands there instead."""
    if isinstance(node, (ast.expr, ast.stmt)) and (new := _change(node)) is not None:
        yield node, new
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "exc", "msg"} or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_alone(child):
                yield from _find_changes(child)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in _LOGS
        case ast.If(test=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name in _UNCHANGED_NAMES
        case ast.Import() | ast.ImportFrom() | ast.Raise(exc=None) | ast.keyword(arg="strict"):
            return True
    return False


def _change(node: ast.expr | ast.stmt) -> str | None:  # noqa: PLR0911 - a table
    """Return what stands in place of a node, or None if it stays."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _SWAPPED:
            return _unparse(ast.Compare(node.left, [_SWAPPED[type(op)]()], node.comparators))
        case ast.BoolOp():
            return _unparse(ast.BoolOp(_SWAPPED[type(node.op)](), node.values))
        case ast.BinOp() if type(node.op) in _SWAPPED and not _has_text(node):
            return _unparse(ast.BinOp(node.left, _SWAPPED[type(node.op)](), node.right))
        case ast.UnaryOp(op=ast.Not()):
            return _unparse(node.operand)
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value)):
            return str(value + 1)
        case ast.Constant(value=float(value)):
            return str(value * 2 or 1.0)
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            return "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Break() | ast.Continue() | ast.Raise():
            return "pass"
    return None


def _unparse(node: ast.expr) -> str:
    return f"({ast.unparse(ast.fix_missing_locations(node))})"


def _has_text(node: ast.AST) -> bool:
    return any(isinstance(part, (ast.JoinedStr, ast.List, ast.Tuple)) for part in ast.walk(node)) or any(
        isinstance(part, ast.Constant) and isinstance(part.value, (str, bytes)) for part in ast.walk(node)
    )


class Copy:
    """A copy of the repository, in which one mutant at a time is tried out.

    It has an interpreter of its own, which finds the copy before the checkout: a test may start a program with another
    directory and another PYTHONPATH.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stamp = itertools.count(1_000_000_000, 10)  # a later second for each change: Python compiles it again
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        )
        for name in listed.stdout.decode().splitlines():
            if (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, directory / name)
        self._python = _make_interpreter(directory)

    def read(self, path: str) -> bytes:
        """Read a file of the package."""
        return (self._directory / path).read_bytes()

    def write(self, path: str, source: bytes) -> None:
        """Write a file of the package."""
        (self._directory / path).write_bytes(source)
        stamp = next(self._stamp)
        os.utime(self._directory / path, (stamp, stamp))

    def run(self, tests: list[str], limit: float) -> bool:
        """Run tests until one fails; return whether all have passed in time."""
        options = ["-q", "-x", "-n0", "--durations=0", f"--timeout={limit}", "-p", "no:cacheprovider", "-m", "not long"]
        with subprocess.Popen(
            [self._python, "-m", "pytest", *options, *tests],
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                return process.wait(limit) == 0
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # the tests' fixtures end what they have started
                return False


def _make_interpreter(directory: Path) -> Path:
    """Make a virtual environment with the packages and commands of this one, in which a copy is installed."""
    place, commands = directory / ".venv", Path(sys.executable).parent
    venv.create(place, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    installed = sysconfig.get_path("purelib")
    (packages / "copy.pth").write_text(f"{directory}\nimport site; site.addsitedir({installed!r})\n")
    # Preload looks for this file. The installed one, which copy.pth makes Python read, has the code.
    (packages / "elastic-run-compat.pth").write_text(f"# {ENV_TEMPLATE}\n")
    own = place / "bin"
    for command in commands.iterdir():
        if not (own / command.name).exists():
            source = command.read_bytes()
            (own / command.name).write_bytes(source.replace(f"#!{commands}/".encode(), f"#!{own}/".encode(), 1))
            shutil.copymode(command, own / command.name)
    return own / "python"


@dataclass(frozen=True)
class Room:
    """A package, and its tests in the order in which they run: quick ones first."""

    name: str
    stages: list[list[str]]

    @classmethod
    def find(cls, name: str, tests: list[str]) -> Room:
        """Find the unit tests of a room, which come before other tests."""
        words = (f"elastic_run.{name}", f"elastic_run import {name}")
        units = [
            str(path.relative_to(ROOT))
            for path in sorted([*ROOT.glob("tests/unit/test_*.py"), *ROOT.glob("tests/scenarios/test_*.py")])
            if any(word in _read(path) for word in words) and path.stem not in {"test_layers", "test_indexes"}
        ]
        return cls(name, [stage for stage in (units, tests) if stage])

    def choose(self, sample: int, seed: int) -> list[Mutant]:
        """Choose mutants at random; the same ones for the same seed and source."""
        paths = sorted(path.relative_to(ROOT) for path in (ROOT / "elastic_run" / self.name).rglob("*.py"))
        found = [mutant for path in paths for mutant in find_mutants(str(path), (ROOT / path).read_bytes())]
        return random.Random(f"{self.name} {seed}").sample(found, min(sample, len(found)))  # noqa: S311 - no secret


def _read(test: Path) -> str:
    """Return the text of a test, and of the script by which it may reach the package."""
    script = test.with_name(f"{test.stem.removeprefix('test_')}_script.py")
    return test.read_text() + (script.read_text() if script.is_file() else "")


def try_out(room: Room, mutants: list[Mutant], jobs: int) -> list[Mutant]:
    """Try mutants out, several at a time; return those that survive."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as directory, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        limits = []
        for number in range(jobs):
            copies.put(Copy(Path(directory, str(number))))
        first = copies.get()
        for stage in room.stages:
            began = time.monotonic()
            if not first.run(stage, 600):
                sys.exit(f"{room.name}: a test fails without any change: {' '.join(stage)}")
            limits.append(10 + 3 * jobs * (time.monotonic() - began))
        copies.put(first)

        def survives(mutant: Mutant) -> bool:
            copy = copies.get()
            source = copy.read(mutant.path)
            copy.write(mutant.path, source[: mutant.begin] + mutant.new + source[mutant.begin + len(mutant.old) :])
            try:
                stages = [_put_nearest_first(stage, mutant) for stage in room.stages]
                is_alive = all(copy.run(stage, limit) for stage, limit in zip(stages, limits, strict=True))
            finally:
                copy.write(mutant.path, source)
                copies.put(copy)
            if is_alive:
                print(mutant.describe(), flush=True)  # noqa: T201 - a command prints
            return is_alive

        results = list(pool.map(survives, mutants))
    return [mutant for mutant, is_alive in zip(mutants, results, strict=True) if is_alive]


def _put_nearest_first(stage: list[str], mutant: Mutant) -> list[str]:
    """Return tests in an order in which those that name the changed module run first: most likely one of them fails."""
    name = Path(mutant.path).stem
    return sorted(stage, key=lambda path: name not in _read(ROOT / path))


def _find_rooms() -> list[str]:
    return sorted(path.parent.name for path in (ROOT / "elastic_run").glob("*/__init__.py"))


def main() -> None:
    """Run as a command."""
    # The tests are ended by it, and would inherit that a shell ignores it for what it runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rooms", nargs="*", default=_find_rooms(), help="packages of elastic_run; all unless given")
    parser.add_argument("--sample", type=int, default=10, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=1, help="another seed is another sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--tests", nargs="*", default=[], help="paths of more tests, for what no unit test notices")
    arguments = parser.parse_args()
    for name in arguments.rooms:
        room = Room.find(name, arguments.tests)
        mutants = room.choose(arguments.sample, arguments.seed)
        alive = try_out(room, mutants, arguments.jobs)
        print(f"{name}: {len(mutants) - len(alive)} of {len(mutants)} killed", flush=True)  # noqa: T201 - ditto


if __name__ == "__main__":
    main()

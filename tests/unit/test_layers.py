"""Who may import whom. The arrows of docs/architecture.md, read from the source of every module."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2] / "elastic_run"

#: Part -> what else of the package it may import. `rendezvous.api` means that module only, not its backends.
ALLOWED: dict[str, set[str]] = {
    "contract": set(),
    "errors": set(),
    "notices": set(),
    "cli": {"contract", "errors", "notices", "cluster", "core", "events", "multiprocessing", "rendezvous", "launcher"},
    "core": {"contract"},
    "loop": {"contract"},
    "utils": {"contract"},
    "metrics": {"contract", "utils"},
    "events": {"contract", "utils"},
    "timer": {"contract", "multiprocessing.process.process_table"},
    "lazy": {"utils.logging"},
    "compat": {"contract"},
    "records": set(),
    "signals": set(),
    "slurm_variables": set(),
    "store": {"contract", "core", "loop", "utils"},
    "multiprocessing": {"contract", "core", "loop", "utils", "events", "metrics", "cluster.numa"},
    "report": {"contract", "core", "loop", "utils", "multiprocessing.output"}
    | {"store.jobstore.api", "rendezvous.session"},
    "rendezvous": {"contract", "core", "loop", "store", "utils", "events", "report.wait_status", "report.wait_texts"},
    "cluster": {"contract", "core", "utils", "slurm_variables"},
    "agent": {"contract", "core", "loop", "multiprocessing", "report", "cluster", "events", "metrics", "utils"}
    | {"store.tcpstore", "timer", "rendezvous.api", "rendezvous.errors", "rendezvous.session"},
    "worker": {"contract", "slurm_variables"},
}
#: Room of `store` -> the rooms that it may import; modules outside of the rooms import no room.
ROOMS = {"tcpstore": {"tcpstore"}, "jobstore": {"tcpstore", "jobstore"}}
#: What the command line's modules leave to the launcher, which alone sees all.
INNER = {"agent", "loop", "store"}
SEE_ALL = {"__init__", "launcher"}

#: Subclasses of torch's classes, for training scripts; the launcher never imports them.
FOR_WORKERS = {("utils", "data", "elastic_distributed_sampler"), ("worker", "sampler")}

#: The one way from a training script to the launcher, taken when the script starts its own workers.
LAUNCHES_ITSELF = ("worker", "launching")

MODULES = sorted(path.relative_to(ROOT).with_suffix("").parts for path in ROOT.rglob("*.py"))


@functools.cache
def parse(module: tuple[str, ...]) -> ast.Module:
    """Return a module's syntax tree."""
    return ast.parse((ROOT / Path(*module).with_suffix(".py")).read_text(encoding="utf-8"))


def imported_names(tree: ast.AST) -> set[str]:
    """Return the dotted names that a module imports anywhere, type-checking blocks and functions included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def is_allowed(name: str, part: str) -> bool:
    """Tell whether a part may import a name below `elastic_run`, given without that prefix."""
    target = name.partition(".")[0]
    if part in SEE_ALL or target in {part, "__version__", "lazy", "records", "signals"}:
        return True
    if part not in ALLOWED:
        return target not in INNER
    return any(f"{name}.".startswith(f"{allowed}.") for allowed in ALLOWED[part])


def test_a_part_imports_only_what_its_layer_may_see() -> None:
    """Every import of the package's own modules follows an arrow of the architecture."""
    strays = []
    for module in MODULES:
        own = {name for name in imported_names(parse(module)) if name.startswith("elastic_run.")}
        part = "launcher" if module == LAUNCHES_ITSELF else module[0]
        bad = [name for name in own if not is_allowed(name.removeprefix("elastic_run."), part)]
        strays += [f"{'.'.join(module)} imports {name}" for name in sorted(bad)]
    assert strays == []


def test_the_rooms_of_the_stores_build_on_each_other_in_one_direction() -> None:
    """A TCPStore knows nothing of job stores, and what both use knows neither."""
    strays = []
    for module in MODULES:
        if module[0] == "store":
            seen = {
                name.split(".")[2] for name in imported_names(parse(module)) if name.startswith("elastic_run.store.")
            }
            bad = (seen & set(ROOMS)) - ROOMS.get(module[1], set())
            strays += [f"{'.'.join(module)} imports {room}" for room in sorted(bad)]
    assert strays == []


def test_the_core_needs_the_standard_library_only() -> None:
    """`core` and `contract` import nothing that has to be installed."""
    pure = [module for module in MODULES if module[0] in {"core", "contract"}]
    roots = {name.partition(".")[0] for module in pure for name in imported_names(parse(module))}
    assert roots - sys.stdlib_module_names - {"elastic_run"} == set()


def test_importing_a_module_never_imports_torch() -> None:
    """Importing torch is left to functions that need it, never done at the top of a module."""
    strays = []
    for module in MODULES:
        top = [node for node in parse(module).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name for node in top for name in imported_names(node)}
        if module not in FOR_WORKERS and any(name.partition(".")[0] == "torch" for name in names):
            strays.append(".".join(module))
    assert strays == []


@functools.cache
def imported_modules() -> dict[str, set[str]]:
    """Return for each module the package's modules that it imports anywhere.

    The package itself is left out: Python imports it in front of each of its modules, in a circle or not.
    """
    names = {".".join(module).removesuffix(".__init__"): module for module in MODULES if module != ("__init__",)}
    graph = {}
    for name, module in names.items():
        imported = (text.partition("elastic_run.") for text in imported_names(parse(module)))
        own = [text for before, prefix, text in imported if prefix and not before]
        found = {text if text in names else text.rpartition(".")[0] for text in own}
        graph[name] = (found & set(names)) - {name}
    return graph


def reachable(start: str) -> set[str]:
    """Return the modules that a module imports, directly or through others."""
    graph = imported_modules()
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    """There is no cycle of imports, those in functions and those for type checkers included."""
    cycles = {name for name in imported_modules() if name in reachable(name)}
    assert cycles == set()

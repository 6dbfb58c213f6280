"""Who may import whom. The arrows of docs/architecture.md, read from the source of every module."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3] / "elastic_run"

#: Part -> what else of the package it may import. `rendezvous.api` means that module only, not its backends.
ALLOWED: dict[str, set[str]] = {
    "contract": set(),
    "notices": set(),
    "cli": {
        "contract",
        "notices",
        "files",
        "cluster",
        "schedulers",
        "core",
        "events",
        "multiprocessing",
        "rendezvous",
        "launch_config",
    }
    | {"control", "diagnosis", "report", "hosts.protocol", "hosts.remote"},
    "hosts": {"contract", "notices", "core", "loop", "multiprocessing", "rendezvous.addresses", "store.connecting"}
    | {"report.text"},
    "control": {"contract", "notices"},
    "core": {"contract"},
    "loop": {"contract"},
    "utils": {"contract"},
    "metrics": {"contract", "utils"},
    "events": {"contract", "utils"},
    "timer": {"contract", "multiprocessing.process_table", "multiprocessing.fork_exec"},
    "compat": {"contract"},
    "records": set(),
    "signals": set(),
    "files": set(),
    "worker_start": {"diagnosis.fault_thread", "diagnosis.recorder"},
    "store": {"contract", "core", "loop", "utils"},
    "multiprocessing": {"contract", "core", "loop", "utils", "events", "metrics", "cluster.numa"}
    | {"files", "worker_start"},
    "report": {"contract", "core", "loop", "utils", "multiprocessing.errors", "multiprocessing.output"}
    | {"rendezvous.events", "schedulers.actions", "files", "hosts.protocol"},
    "rendezvous": {"contract", "core", "loop", "store", "utils", "events", "report.waiting"} | {"files"},
    "cluster": {"contract", "core", "files", "utils"},
    "schedulers": {"contract", "notices", "files", "core", "cluster", "rendezvous.addresses"},
    "agent": {"contract", "core", "loop", "multiprocessing", "report", "cluster", "events", "metrics", "utils"}
    | {
        "notices",
        "files",
        "schedulers.actions",
        "worker.kept_checkpoint",
        "worker.kept_state",
        "worker.kept_server",
        "control",
        "diagnosis",
        "store.errors",
        "store.worker_store",
        "timer",
        "rendezvous.api",
        "rendezvous.events",
        "rendezvous.session",
    },
    "diagnosis": {
        "contract",
        "core",
        "loop",
        "multiprocessing",
        "utils",
        "cluster",
        "store",
        "rendezvous.utils",
        "rendezvous.addresses",
    }
    | {"report.text", "files"},
    "worker": {"contract", "core.kept_generations", "schedulers.slurm_variables"},
}
#: What the command line's modules leave to the launcher, which alone sees all.
INNER = {"agent", "loop", "store"}
SEE_ALL = {"__init__", "launcher", "launch_config"}

#: Subclasses of torch's classes, for training scripts; the launcher never imports them.
FOR_WORKERS = {
    *(("worker", name) for name in ("kept_checkpoint", "kept_state", "memory_storage", "sampler")),
}

#: The one way from a training script to the launcher, taken when the script starts its own workers.
LAUNCHES_ITSELF = ("worker", "launching")

#: The table of torch's module paths: compat imports what a program asks for, which may be all.
TABLE_OF_ALIASES = ("compat", "alias")

#: The agent has torch's rendezvous package under torch's name, `rdzv`; any other name of it would be a backend's.
NAMED_AS_IN_TORCH = {"agent.__init__ imports elastic_run.rendezvous"}

#: The group of entry points of event handlers.
NO_MODULES = {"elastic_run.event_handlers"}

MODULES = sorted(path.relative_to(ROOT).with_suffix("").parts for path in ROOT.rglob("*.py"))


#: A text that is the name of a module, or of something in one.
_NAMES_A_MODULE = re.compile(r"elastic_run(\.[a-z_]\w*)+(:\w*)?")


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


def named_in_strings(module: tuple[str, ...]) -> set[str]:
    """Return the dotted names that a module imports by strings: homes of `lazy_names`, and texts that name a module.

    A home is relative to its module, and may have the name under which it is looked up there behind a colon.
    """
    if module == TABLE_OF_ALIASES:
        return set()
    tree = parse(module)
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = {text.replace(":", ".").rstrip(".") for text in texts if _NAMES_A_MODULE.fullmatch(text)} - NO_MODULES
    package = ".".join(("elastic_run", *module)).removesuffix(".__init__")
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "lazy_names":
            homes = [text for text in _texts_of(call.args[1], tree) if not text.startswith("elastic_run")]
            names.update(f"{package}.{home.replace(':', '.').rstrip('.')}" for home in homes)
    return names


def _texts_of(node: ast.expr, tree: ast.Module) -> list[str]:
    """Return the values of a dict of texts: written out, a union, `dict.fromkeys`, or a name of the module for one."""
    if isinstance(node, ast.Dict):
        return [ast.literal_eval(value) for value in node.values]
    if isinstance(node, ast.BinOp):
        return _texts_of(node.left, tree) + _texts_of(node.right, tree)
    if isinstance(node, ast.Call):
        return [ast.literal_eval(node.args[-1])]
    assert isinstance(node, ast.Name)
    (value,) = [
        statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.id
    ]
    return _texts_of(value, tree)


def is_allowed(name: str, part: str) -> bool:
    """Tell whether a part may import a name below `elastic_run`, given without that prefix."""
    target = name.partition(".")[0]
    if part in SEE_ALL or target in {part, "__version__", "lazy_names", "alias_modules", "records", "signals"}:
        return True
    if part not in ALLOWED:
        return target not in INNER
    return any(f"{name}.".startswith(f"{allowed}.") for allowed in ALLOWED[part])


def test_a_part_imports_only_what_its_layer_may_see() -> None:
    """Every import of the package's own modules follows an arrow of the architecture."""
    strays = []
    for module in MODULES:
        names = imported_names(parse(module)) | named_in_strings(module)
        own = {name for name in names if name.startswith("elastic_run.")}
        part = "launcher" if module == LAUNCHES_ITSELF else module[0]
        bad = [name for name in own if not is_allowed(name.removeprefix("elastic_run."), part)]
        strays += [f"{'.'.join(module)} imports {name}" for name in sorted(bad)]
    assert set(strays) == NAMED_AS_IN_TORCH


def test_imports_by_strings_are_found() -> None:
    """The names that are loaded lazily, and a module that another process imports by its name, count as imports."""
    assert "elastic_run.rendezvous.api.rendezvous_handler_registry" in named_in_strings(("rendezvous", "registry"))
    assert "elastic_run.multiprocessing.functions.spawn" in named_in_strings(("__init__",))
    assert "elastic_run.events.api" in named_in_strings(("events", "__init__"))


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
        found_names = imported_names(parse(module)) | named_in_strings(module)
        imported = (text.partition("elastic_run.") for text in found_names)
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


def test_no_packages_of_the_core_import_each_other() -> None:
    """Of two packages of the core, at most one imports the other."""
    arrows = {
        (name.rpartition(".")[0], found.rpartition(".")[0])
        for name, imported in imported_modules().items()
        for found in imported
        if name.startswith("core.") and found.startswith("core.")
    }
    assert {(one, other) for one, other in arrows if one != other and (other, one) in arrows} == set()

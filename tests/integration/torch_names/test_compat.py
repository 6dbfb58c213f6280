"""Torch's module paths mean ours where a program asks for it: everything in processes of its own, with real torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.compat.alias import PATHS
from tests.support.torch_python import INSTALL, TorchPython, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Torch's own modules below the same paths, which are not in our table.
OUTSIDE = (
    "torch.distributed.elastic.multiprocessing.redirects",
    "torch.distributed.elastic.multiprocessing.tail_log",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.multiprocessing.subprocess_handler",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
)


@pytest.fixture(scope="module")
def installed() -> Iterator[TorchPython]:
    """Start an interpreter in which torch's paths mean ours, with warnings as errors."""
    with TorchPython("-W", "error", head=INSTALL) as python:
        yield python


@pytest.fixture
def check_installed(installed: TorchPython, tmp_path: Path) -> Callable[[str], str]:
    """Run code that must succeed where torch's paths mean ours, and return what it printed."""

    def check(code: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(code, encoding="utf-8")
        done = installed.run(path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return check


def test_installing_imports_neither_torch_nor_the_launcher() -> None:
    """`install` costs next to nothing: torch and our launcher are imported when the program asks for them."""
    check(INSTALL + "import sys; assert not {'torch', 'elastic_run.run', 'elastic_run.launcher'} & set(sys.modules)")


@pytest.mark.long
def test_each_path_of_the_table_means_ours(check_installed: Callable[[str], str]) -> None:
    """Every module of the table can be imported by torch's path, and gives out the very objects of ours."""
    check_installed(f"""
from importlib import import_module
for path, home in {PATHS!r}.items():
    alias, ours = import_module(path), import_module(home)
    assert alias.__name__ == path, alias
    assert alias.__file__ == ours.__file__, alias.__file__
    names = getattr(ours, "__all__", None) or [n for n in vars(ours) if not n.startswith("_")]
    for name in names:
        # RendezvousHandlerCreator is made anew each time it is asked for.
        assert getattr(alias, name) == getattr(ours, name), (path, name)
    assert set(names) <= set(dir(alias)), path
    package, _, child = path.rpartition(".")
    assert getattr(import_module(package), child) is alias, path
""")


def test_a_module_that_is_imported_from_its_package_is_an_alias(check_installed: Callable[[str], str]) -> None:
    """`from torch.distributed.elastic.multiprocessing import api` gives torch's names, before any import of `.api`."""
    check_installed(f"""
from importlib import import_module
for path in {PATHS!r}:
    package, _, child = path.rpartition(".")
    names = {{}}
    exec(f"from {{package}} import {{child}}", names)
    assert names[child] is import_module(path), path
from torch.distributed.elastic.multiprocessing import api
assert api.PContext and api.LogsSpecs
""")


def test_torchs_other_modules_of_these_packages_can_be_imported(check_installed: Callable[[str], str]) -> None:
    """What is outside of our promise is torch's own, and can be imported beside ours."""
    check_installed(f"""
from importlib import import_module
for path in {OUTSIDE!r}:
    module = import_module(path)
    assert "/torch/distributed/elastic/" in module.__file__, module.__file__
""")


def test_torchs_private_modules_leave_our_registry_alone(check_installed: Callable[[str], str]) -> None:
    """Torch's own rendezvous modules can be imported in each way there is, and `c10d` is still ours."""
    check_installed("""
from elastic_run.rendezvous import rendezvous_handler_registry as registry
before = dict(registry._registry)
from torch.distributed.elastic.rendezvous import _etcd_stub, dynamic_rendezvous, etcd_rendezvous
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
assert _etcd_stub.__file__.endswith("/torch/distributed/elastic/rendezvous/_etcd_stub.py")
assert rendezvous_handler_registry is registry
import torch.distributed.elastic.rendezvous as rendezvous
assert not hasattr(rendezvous, "_name_that_nobody_has")  # for which torch's own module registers its backends
assert registry._registry == before
assert registry._registry["c10d"].__module__.startswith("elastic_run."), registry._registry
""")


def test_a_missing_name_is_told_with_its_home(check_installed: Callable[[str], str]) -> None:
    """A public name that we lack is an AttributeError that says whose module this is."""
    said = check_installed("""
import torch.distributed.run as run
assert not hasattr(run, "nothing")
try:
    run.nothing
except AttributeError as error:
    print(error)
try:
    from torch.distributed.run import nothing
except ImportError as error:
    print(error)
""").splitlines()
    assert said[0] == (
        "torch.distributed.run is elastic_run.run here (elastic_run.compat), which has no 'nothing'; "
        "without elastic_run.compat it is torch's own"
    )
    assert said[1].startswith("cannot import name 'nothing' from 'torch.distributed.run' (")
    assert said[1].endswith("/elastic_run/run.py)")


@pytest.mark.long
def test_names_that_torchs_modules_borrow_are_there(check_installed: Callable[[str], str]) -> None:
    """Every public name of torch's modules can be had by its path, also one from another module: ours if we have it."""
    names = check(
        f"""
from importlib import import_module
from types import ModuleType
for path in {list(PATHS)!r}:
    for name, value in vars(import_module(path)).items():
        home = getattr(value, "__module__", None)
        is_torchs = str(home).startswith("torch.distributed") or (home is None and name.isupper())
        if not name.startswith("_") and is_torchs and not isinstance(value, ModuleType | dict):
            print(path, name, home)
"""
    )
    wanted = [line.split() for line in names.splitlines()]
    assert ["torch.distributed.run", "elastic_launch", "torch.distributed.launcher.api"] in wanted
    check_installed(f"""
from importlib import import_module
for path, name, home in {wanted!r}:
    value = getattr(import_module(path), name)
    assert value is not None, (path, name)
    of = getattr(value, "__module__", None) or "elastic_run"
    assert home not in {list(PATHS)!r} or of.partition(".")[0] in ("elastic_run", "typing"), (path, name, of)
from torch.distributed.run import LaunchConfig, elastic_launch
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, record
import elastic_run, elastic_run.agent, elastic_run.events
assert (LaunchConfig, elastic_launch) == (elastic_run.LaunchConfig, elastic_run.elastic_launch)
assert (DEFAULT_ROLE, record) == (elastic_run.agent.DEFAULT_ROLE, elastic_run.events.record)
""")


def test_who_patches_torchs_path_patches_ours(check_installed: Callable[[str], str]) -> None:
    """unittest.mock.patch on one of torch's paths changes what our launcher sees, and takes it back."""
    check_installed("""
import sys
from unittest import mock
import elastic_run.run
before = elastic_run.run.say
with mock.patch("torch.distributed.run.say") as said:
    assert elastic_run.run.say is said
assert elastic_run.run.say is before
""")


def test_exceptions_and_pickles_agree(check_installed: Callable[[str], str]) -> None:
    """`except` by torch's path catches ours, and a pickle made by torch's path or by ours is read by the other."""
    check_installed("""
import pickle
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
import elastic_run
try:
    raise elastic_run.ChildFailedError("train.py", {0: elastic_run.ProcessFailure(0, 1, 1, "")})
except ChildFailedError as error:
    assert isinstance(error.get_first_failure()[1], ProcessFailure)
parameters = RendezvousParameters("c10d", "h:1", "j", 1, 2, a="b")
assert pickle.loads(pickle.dumps(parameters)).get("a") == "b"
by_torchs_path = b"ctorch.distributed.elastic.rendezvous.api\\nRendezvousParameters\\n."
assert pickle.loads(by_torchs_path) is RendezvousParameters
""")


@pytest.mark.long
def test_modules_that_were_imported_before_are_replaced() -> None:
    """Modules of torch's that something has imported, as `torch.distributed.checkpoint` does, become ours."""
    check(
        """
import sys
import torch.distributed.run
import torch.distributed.elastic.multiprocessing.tail_log
import torch.distributed.checkpoint
import elastic_run, elastic_run.compat as compat
compat.install()
compat.install()
assert compat.is_installed()
from torch.distributed.launcher.api import LaunchConfig
assert torch.distributed.run is sys.modules["torch.distributed.run"]
assert torch.distributed.run.main is elastic_run.run.main
assert LaunchConfig is elastic_run.LaunchConfig
assert torch.distributed.elastic.multiprocessing.tail_log.TailLog
"""
    )

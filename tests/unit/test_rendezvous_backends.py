"""The built-in rendezvous backends stand in one table."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_run import contract
from elastic_run.cli.flags import FLAGS
from elastic_run.rendezvous import rendezvous_handler_registry
from elastic_run.rendezvous.backend_table import BACKENDS
from elastic_run.run import run_command

_ROOT = Path(__file__).parents[2] / "elastic_run"


def test_the_registry_knows_each_backend() -> None:
    """Every backend of the table is registered."""
    assert set(BACKENDS) <= set(rendezvous_handler_registry._registry)


def test_the_help_names_each_backend_that_meets_in_a_store() -> None:
    """The help of --rdzv-backend lists the names that a user can give."""
    (flag,) = (flag for flag in FLAGS if flag.dest == "rdzv_backend")
    assert flag.text.startswith("Rendezvous backend: static, c10d, etcd, etcd-v2, etcd-v3, or ")


def test_the_facts_of_a_backend_stand_in_the_table_only() -> None:
    """No module but the table writes the name of an etcd backend; default ports stand there or in `contract`."""
    facts = {"etcd-v2", "etcd-v3", 2379, contract.DEFAULT_C10D_PORT}
    homes = {
        path.relative_to(_ROOT).as_posix()
        for path in _ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in facts
    }
    assert homes == {"rendezvous/backend_table.py", "contract.py"}


def test_the_table_loads_no_backend() -> None:
    """To read the table costs no import of a store, a handler or torch."""
    program = (
        "import sys, elastic_run.rendezvous.backend_table; "
        "rooms = 'elastic_run.store', 'elastic_run.rendezvous.coordination'; "
        "others = 'torch', 'socket', 'dataclasses', 'typing'; "
        "print([name for name in sys.modules if name.startswith(rooms) or name in others])"
    )
    told = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert told == "[]\n"


@pytest.mark.parametrize("name", ["etcd", "etcd-v2", "etcd-v3"])
def test_a_store_that_other_jobs_use_has_no_default_place(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No server is known that this node could ask."""
    with pytest.raises(SystemExit):
        run_command([f"--rdzv-backend={name}", "--rdzv-id=j", __file__])
    assert f"error: --rdzv-endpoint: is needed with --rdzv-backend={name}: " in capsys.readouterr().err

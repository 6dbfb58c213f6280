"""The wait for the import of torch.distributed, with a module that stands for it."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from elastic_run.diagnosis import recorder_hook

if TYPE_CHECKING:
    from pathlib import Path

_MODULE = "stands_for_torch_distributed"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Give the names of the sockets at which this process answers; the module has not been imported."""
    names: list[str] = []
    (tmp_path / f"{_MODULE}.py").write_text("VALUE = 7\n")
    monkeypatch.setattr(recorder_hook, "_TRIGGER", _MODULE)
    monkeypatch.setattr(recorder_hook, "_serve", names.append)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(contract.ENV_FLIGHT_RECORDER, "elastic-run-1")
    monkeypatch.delitem(sys.modules, _MODULE, raising=False)
    return names


def test_the_recorder_is_served_from_the_import_on(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the module's own code; other imports are left alone, and the variable does not reach a child."""
    finders = list(sys.meta_path)
    recorder_hook.begin()
    assert contract.ENV_FLIGHT_RECORDER not in os.environ
    assert (served, sys.meta_path[1:]) == ([], finders)
    importlib.import_module("colorsys")
    assert served == []
    module = importlib.import_module(_MODULE)
    monkeypatch.setitem(sys.modules, _MODULE, module)
    assert (module.VALUE, served, sys.meta_path) == (7, ["elastic-run-1"], finders)


def test_a_fork_of_a_template_that_has_imported_it_serves_at_once(
    served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no import to wait for."""
    monkeypatch.setitem(sys.modules, _MODULE, sys)
    recorder_hook.begin()
    assert served == ["elastic-run-1"]

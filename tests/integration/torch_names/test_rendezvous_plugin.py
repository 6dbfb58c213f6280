"""Rendezvous backends that other packages bring, found by their installed metadata in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_PACKAGES = Path(__file__).parents[1].parent / "data" / "rendezvous_plugin"
_PROGRAM = """
import json, sys
from elastic_run.rendezvous import RendezvousParameters, get_rendezvous_handler, rendezvous_handler_registry

backend, settings = sys.argv[1], json.loads(sys.argv[2])
try:
    handler = get_rendezvous_handler(RendezvousParameters(backend, "host-1", "job-1", 1, 4, **settings))
    info = handler.next_rendezvous().bootstrap_store_info
    found = [type(handler).__module__, handler.get_run_id(), info.master_addr, info.master_port]
except Exception as error:
    found = [type(error).__name__, str(error)]
loaded = sorted({"meeting_place", "broken_place", "importlib.metadata", "torch"} & set(sys.modules))
print(json.dumps([found, loaded]))
"""


def _install(directory: Path, package: str, version: str, entry_points: dict[str, str]) -> None:
    """Write the metadata that an installer would write for a package."""
    metadata = directory / f"{package}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[torchrun.handlers]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Install a good package and a broken one, each of which brings backends."""
    _install(
        tmp_path,
        "meeting_place",
        "1.0",
        {"meeting-place": "meeting_place:get_handler", "c10d": "meeting_place:get_handler"},
    )
    _install(
        tmp_path,
        "broken_place",
        "2.5",
        {"broken": "broken_place:get_handler", "no-function": "meeting_place:none", "no-creator": "builtins:list"},
    )
    return tmp_path


def _ask(site: Path, backend: str, **settings: object) -> tuple[list[object], list[str]]:
    """Ask a fresh interpreter for a backend: what it found, and which of the interesting modules it loaded."""
    path = os.pathsep.join([str(_PACKAGES), str(site), str(Path(__file__).parents[1].parent.parent)])
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, backend, json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ended.stderr == ""
    found, loaded = json.loads(ended.stdout)
    return found, loaded


def test_a_plugin_is_found_by_its_name(site: Path) -> None:
    """A package's handler is found under its entry point's name and gets all parameters; no other is loaded."""
    found, loaded = _ask(site, "meeting-place", port="1234")
    assert found == ["meeting_place", "job-1", "host-1", 1234]
    assert loaded == ["importlib.metadata", "meeting_place"]


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            "broken",
            "broken_place:get_handler) can't be loaded: ModuleNotFoundError: No module named 'a_missing_library'",
        ),
        (
            "no-function",
            "meeting_place:none) can't be loaded: AttributeError: module 'meeting_place' has no attribute 'none'",
        ),
        (
            "no-creator",
            "builtins:list) returned [], not a function that builds a handler",
        ),
    ],
)
def test_a_broken_plugin_is_named_with_its_package_and_error(site: Path, backend: str, message: str) -> None:
    """A plug-in that can't be loaded is one line that names the backend, the package and what went wrong."""
    found, _ = _ask(site, backend)
    assert found == ["ValueError", f"rendezvous backend {backend!r}: plug-in broken_place 2.5 ({message}"]


def test_a_built_in_backend_comes_before_plugins(site: Path) -> None:
    """A plug-in can't take a built-in name, and for a built-in name the installed packages are not even looked at."""
    found, loaded = _ask(site, "local")
    assert found == ["ValueError", "rendezvous backend 'local' is for one node, not for up to 4"]
    assert loaded == []


def test_an_unknown_backend_is_answered_with_plugins_too(site: Path) -> None:
    """The list of known backends holds those of installed packages, without loading them."""
    found, loaded = _ask(site, "meeting-plaice")
    assert str(found[1]).startswith(
        "the rendezvous backend 'meeting-plaice' is not registered, did you mean 'meeting-place'?; known: "
    )
    assert "broken, c10d, " in str(found[1])
    assert loaded == ["importlib.metadata"]


def test_importing_the_interface_loads_nothing_slow() -> None:
    """The packages on the way to the first worker bring none of the modules that cost more than a worker's start."""
    program = (
        "import sys; before = set(sys.modules)\n"
        "import elastic_run.rendezvous, elastic_run.events, elastic_run.metrics, elastic_run.utils\n"
        "from elastic_run import events\n"
        "events.is_recorded(); events.record(None); events.construct_and_record_rdzv_event('', '', 'FAILED')\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    slow = (
        "asyncio ctypes dataclasses datetime difflib importlib.metadata inspect json logging multiprocessing random"
        " shutil socket string subprocess tempfile torch traceback typing uuid warnings"
    )
    assert not set(slow.split()) & set(ended.stdout.split())

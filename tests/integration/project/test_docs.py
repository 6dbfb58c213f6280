"""The pages build without a warning and say what the code says, and pip gets what it should from this repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from html import unescape
from pathlib import Path

import pytest

import elastic_run
from elastic_run.cli.flags import FLAGS
from elastic_run.contract import EXIT_CODES
from elastic_run.core.agent import machine as agent_machine
from elastic_run.core.failure.job_result import Attempt, JobResult
from elastic_run.core.failure.root_cause import WorkerEnd
from elastic_run.core.failure.traceback_text import parse_exception
from elastic_run.report.failure_documents import failure_document

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the pages once."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "default"}
    built = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return directory


def read(page: Path) -> str:
    """Return a page's text without its tags, blanks made one."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))))


def test_every_flag_is_in_the_reference(site: Path) -> None:
    """The page about the command line has each flag with its description."""
    text = read(site / "command-line.html")
    assert [flag.name for flag in FLAGS if flag.name not in text or flag.text[:40] not in text] == []


def test_every_exit_code_is_in_its_table(site: Path) -> None:
    """The page about exit codes has each verdict with its meaning."""
    text = read(site / "exit-codes.html")
    assert [name for _, name, meaning in EXIT_CODES if name not in text or meaning not in text] == []


def test_the_state_diagram_is_the_table_of_the_code(site: Path) -> None:
    """The architecture page draws every state of an agent and lists every transition."""
    page, text = (site / "architecture.html").read_text(encoding="utf-8"), read(site / "architecture.html")
    (drawing,) = [part.partition("</svg>")[0] for part in page.split("<svg viewBox")[1:]]
    for step, transition in agent_machine.TRANSITIONS.items():
        assert f">{step[0]}</tspan>" in drawing
        assert f"{step[0]} {step[1].__name__} {' or '.join(transition.after)}" in text


def test_the_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """No script, style sheet, font or picture comes from the network."""
    loaded = re.compile(r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*(?:src|href)="?(https?:)?//')
    assert [page.name for page in site.rglob("*.html") if loaded.search(page.read_text(encoding="utf-8"))] == []


def test_every_key_of_the_failure_file_is_described(site: Path) -> None:
    """The page about failure.json names each key that the file has, at every depth."""
    described = set(re.findall(r"<code[^>]*>(\w+)</code>", (site / "failure-json.html").read_text(encoding="utf-8")))
    assert keys_of(failure_document(an_ending())) - described - {"number", "name"} == set()


def keys_of(value: object) -> set[str]:
    """Return all keys of a JSON value."""
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def an_ending() -> JobResult:
    """Return an ending with everything in it."""
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    x()\nValueError: no\n'
    worker = WorkerEnd(
        rank=0,
        local_rank=0,
        role="default",
        host="node",
        pid=1,
        exitcode=-9,
        ended_at=1.0,
        uptime=1.0,
        restart_count=0,
        was_stopped=False,
        exception=parse_exception(text),
        error_file="",
        stderr_tail=tuple(text.splitlines()),
        log_file="",
    )
    return JobResult(
        verdict="worker_failed",
        exit_code=1,
        entrypoint="a.py",
        role="default",
        run_id="none",
        root=worker,
        ends=(worker,),
        attempts=(Attempt(restart_count=0, root=worker, started_at=0.0, uptime=1.0),),
        restarts_used=1,
        max_restarts=1,
        log_dir="logs",
        detail="",
        signal=15,
        world_size=1,
        nnodes=1,
        survivors=((1, "io"),),
    )


def test_no_compiled_file_is_published(site: Path) -> None:
    """The site holds pages and pictures, not what Python compiled beside them."""
    assert [path.name for path in site.rglob("*.py*")] == []


def test_values_are_shown_as_they_are_typed(site: Path) -> None:
    """No page shows a backslash before a bar: `N|auto|cpu` is what users type."""
    pages = site.glob("*.html")
    assert [page.name for page in pages if r"\|" in page.read_text(encoding="utf-8")] == []


def test_a_flag_stays_in_one_line(site: Path) -> None:
    """Words of code have the class that keeps browsers from breaking them at hyphens; sentences of code may break."""
    page = (site / "quickstart.html").read_text(encoding="utf-8")
    assert '<code class="word">--shutdown-timeout</code>' in page
    assert "code.word" in (site / "site.css").read_text(encoding="utf-8")


# --- packaging --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(directory),
        str(ROOT),
    ]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return zipfile.ZipFile(next(directory.glob("*.whl")))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """Every module is in the wheel, typed, and neither tests nor tools are."""
    names = set(wheel.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "elastic_run").rglob("*.py")}
    assert modules <= names
    assert "elastic_run/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {
        "elastic_run",
        "elastic-run-compat.pth",
        f"elastic_run-{elastic_run.__version__}.dist-info",
    }
    # Only beside the package does Python read it.
    assert not [name for name in names if name.endswith("/elastic-run-compat.pth")]


def test_the_wheel_has_the_console_script_and_the_licence(wheel: zipfile.ZipFile) -> None:
    """`elastic-run` is installed as a command, and the licence travels along."""
    metadata = f"elastic_run-{elastic_run.__version__}.dist-info"
    assert "elastic-run = elastic_run.__main__:main" in wheel.read(f"{metadata}/entry_points.txt").decode()
    assert "BSD 3-Clause" in wheel.read(f"{metadata}/licenses/LICENSE").decode()


def test_the_console_script_and_the_module_are_one() -> None:
    """`elastic-run --version` and `python -m elastic_run --version` say the same."""
    script = Path(sys.executable).with_name("elastic-run")
    answers = {
        subprocess.run([*command, "--version"], check=True, capture_output=True, text=True).stdout
        for command in ([str(script)], [sys.executable, "-m", "elastic_run"])
    }
    assert len(answers) == 1
    assert elastic_run.__version__ in answers.pop()

"""Interpreters with torch: forks of one that has it, and interpreters in which torch's module paths may mean ours."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import elastic_run
from tests.support.launch import clean_environment
from tests.support.wait import DEADLINE, DeadlinePassedError, stretched

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType


# --- programs as forks of a process that has torch: each import of torch takes a second -------------------------------
#: Runs each program as Python's main module: what follows the loop is run in the forks only.
_SERVER = """
import gc, json, os, sys
{head}
import torch
gc.freeze()  # a fork that looks at all objects when it ends takes half a second, too
for request in sys.stdin:
    path, words, env, outputs = json.loads(request)
    fork = os.fork()
    if not fork:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
else:
    sys.exit()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for number, name in enumerate(outputs, 1):
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
os.environ.clear()
os.environ.update(env)
__file__, sys.argv, sys.path[0] = path, [path, *words], os.path.dirname(path)
exec(compile(open(path).read(), path, "exec"))
"""


class TorchPython:
    """A Python interpreter for which the import of torch costs nothing.

    Args:
        options: Python's own options.
        head: Code that is run before torch is imported.
        env: Its environment, as far as torch reads it when it is imported.
    """

    def __init__(self, *options: str, head: str = "", env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *options, "-c", _SERVER.format(head=head)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )

    def __enter__(self) -> TorchPython:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def run(
        self, path: Path, *words: str, env: Mapping[str, str] | None = None, deadline: float = DEADLINE
    ) -> subprocess.CompletedProcess[str]:
        """Run a program, and wait for its end."""
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] is not None
        assert pipes[1] is not None
        outputs = [path.with_suffix(f".{name}") for name in ("out", "err")]
        request = [str(path), words, {**os.environ, **(env or {})}, [*map(str, outputs)]]
        print(json.dumps(request), file=pipes[0], flush=True)
        if not select.select([pipes[1]], [], [], stretched(deadline))[0]:
            message = f"{path} still runs: {outputs[1].read_text(encoding='utf-8')}"
            raise DeadlinePassedError(message)
        code = int(pipes[1].readline())
        return subprocess.CompletedProcess([str(path)], code, *(each.read_text(encoding="utf-8") for each in outputs))


# --- torch's module paths may mean ours -------------------------------------------------------------------------------
#: The file by which the variable acts; the wheel puts it beside the package.
PTH = Path(elastic_run.__file__).parent / "compat" / "elastic-run-compat.pth"
VARIABLE = "ELASTIC_RUN_COMPAT"
INSTALL = "import elastic_run.compat as compat; compat.install()\n"


def run(
    python: Path, *words: str, env: dict[str, str | None] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter with these arguments, and wait for its end."""
    return subprocess.run(
        [str(python), *words],
        check=False,
        capture_output=True,
        text=True,
        env=clean_environment({VARIABLE: None} | (env or {})),
        cwd=cwd,
        timeout=100,
    )


def check(code: str) -> str:
    """Run code that must succeed with warnings as errors, and return what it printed."""
    done = run(Path(sys.executable), "-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout

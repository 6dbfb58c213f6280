"""`main` and `run` called from a program: torch's functions and ours raise the same, and none ends the program."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.launch import clean_environment
from tests.support.torchrun import with_hosts_file, write_hosts_file

if TYPE_CHECKING:
    from pathlib import Path

#: Prints for each case the exception: the names of its classes, its exit code, that of the first failed worker, and the
#: program's name in it.
_PROGRAM = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
for function, words in json.loads(sys.argv[2]):
    try:
        module.main(words) if function == "main" else module.run(module.parse_args(words))
        print(json.dumps([["nothing"], None, None, None]), flush=True)
    except BaseException as error:
        first = error.get_first_failure()[1].exitcode if hasattr(error, "get_first_failure") else None
        names = [cls.__name__ for cls in type(error).__mro__]
        print(json.dumps([names, getattr(error, "code", None), first, getattr(error, "name", None)]), flush=True)
"""

#: What the program calls, and the flags in front of the script; by what torch raises.
_CASES = {
    "worker fails": ("main", []),
    "worker fails in run": ("run", []),
    "restarts are used up": ("main", ["--max-restarts=1"]),
    "not a number of nodes": ("main", ["--nnodes=two"]),
    "too many numbers": ("main", ["--nnodes=1:2:3"]),
    "not a number of workers": ("main", ["--nproc-per-node=many"]),
    "no such device": ("main", ["--nproc-per-node=gpu"]),
    "not a rank": ("main", ["--local-ranks-filter=one"]),
    "no such plug-in": ("main", ["--logs-specs=nowhere"]),
    "no such stream": ("main", ["--tee=out"]),
    "unknown flag": ("main", ["--never-heard-of"]),
    "help": ("main", ["--help"]),
}


def _raised_by(module: str, script: Path, tmp_path: Path) -> dict[str, tuple[list[str], list[int | str | None]]]:
    cases = [(function, [*flags, str(script)]) for function, flags in _CASES.values()]
    command = [sys.executable, "-c", _PROGRAM, module, json.dumps(cases)]
    done = subprocess.run(
        with_hosts_file(command, write_hosts_file(tmp_path)),
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env=clean_environment({"CUDA_VISIBLE_DEVICES": ""}),
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert len(found) == len(_CASES), done.stderr
    return {name: (names, codes) for name, (names, *codes) in zip(_CASES, found, strict=True)}


def test_main_and_run_raise_what_torchs_raise(tmp_path: Path) -> None:
    """A program that calls `main` or `run` catches torch's exceptions, and goes on after each of them."""
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(7)\n", encoding="utf-8")
    theirs = _raised_by("torch.distributed.run", script, tmp_path)
    ours = _raised_by("elastic_run.run", script, tmp_path)
    for name, (names, codes) in theirs.items():
        assert names[0] in ours[name][0], f"{name}: torch raises {names[0]}, ours {ours[name][0]}"
        assert ours[name][1] == codes, name


def test_the_legacy_main_raises_too(tmp_path: Path) -> None:
    """`launch.main` raises a worker's failure and a wrong value as `run.main` does."""
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(7)\n", encoding="utf-8")
    raised = _raised_by("elastic_run.launch", script, tmp_path)
    assert raised["worker fails"][0][0] == "ChildFailedError"
    assert "ValueError" in raised["not a number of nodes"][0]


def test_a_program_of_torchs_commands_name_is_a_command(tmp_path: Path) -> None:
    """Torch's console script `torchrun` calls `main` without words: it ends with the job's exit code."""
    (tmp_path / "train.py").write_text("import sys; sys.exit(7)\n", encoding="utf-8")
    command = tmp_path / "torchrun"
    command.write_text("import sys\nfrom elastic_run.run import main\nsys.exit(main())\n", encoding="utf-8")
    words = [sys.executable, str(command), str(tmp_path / "train.py")]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=clean_environment(), timeout=100)
    assert done.returncode == 7
    assert "Traceback" not in done.stderr

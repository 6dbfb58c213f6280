"""Bounds of the closing report: its lines, its width, its title, and paths that stay whole, whatever a job has said."""

from __future__ import annotations

import pytest

from elastic_run import contract
from elastic_run.core.failure.job_result import Attempt, JobResult, RecorderFinding
from elastic_run.core.failure.root_cause import ExceptionText
from elastic_run.report.closing_report import ending_sentence, find_annotation, render
from elastic_run.report.text import columns
from tests.support.job_results import STDERR, captured, result, stopped, worker_end

GARBAGE = "\x00\xff\x1b[2J\x07\u202e日本語\r" * 50


def worst(**more: object) -> JobResult:
    """Return an ending of which every part is as long, as many and as odd as can be."""
    lines = (*(f'  File "/{GARBAGE}", line {number}, in f' for number in range(90)), GARBAGE)
    failed = [
        worker_end(rank, 1, exception=ExceptionText(f"Error{kind}", "\n".join([GARBAGE] * 9), lines, "", GARBAGE))
        for rank, kind in enumerate("ABCD")
    ]
    failed[0].host, failed[0].remark, failed[0].restart_count, failed[0].log_file = GARBAGE, GARBAGE, 12, "/" + GARBAGE
    return result(
        *failed,
        *stopped(*range(10, 400, 2)),
        *stopped(*range(500, 600, 3), exitcode=-9),
        worker_end(700, 0),
        entrypoint=GARBAGE,
        detail=GARBAGE,
        log_dir="/" + "d" * 500,
        failure_file="/" + "e" * 500,
        restarts_used=12,
        attempts=tuple(
            Attempt(restart_count=number, root=worker_end(number, -number), started_at=0.0, uptime=1e9)
            for number in range(1, 12)
        ),
        survivors=tuple((number, GARBAGE) for number in range(9)),
        verdict="unkillable_worker",
        **more,
    )


WORST = worst()
JOBS: dict[str, JobResult] = {
    "worst of all": WORST,
    "garbage on stderr": result(worker_end(0, -11, GARBAGE)),
    "ten megabytes": result(worker_end(0, 1, "x" * 10_000_000)),
    "long directory": result(worker_end(0, 1), log_dir="/" + "日" * 300),
    "long sentence": result(verdict="rendezvous", exit_code=201, detail="many words " * 200),
    **{name.stem: result(worker_end(0, 1, captured(name.stem)), *stopped(1)) for name in sorted(STDERR.glob("*.txt"))},
    **{verdict: result(verdict=verdict, exit_code=1, detail="x") for _, verdict, _ in contract.EXIT_CODES},
}


@pytest.mark.parametrize("name", JOBS)
def test_no_report_is_longer_or_wider_than_promised(name: str) -> None:
    """25 lines or fewer, as wide as the terminal unless a path needs more, and nothing that a terminal would obey."""
    for width in (40, 60, 80, 101, 200):
        lines = render(JOBS[name], width=width)
        assert len(lines) <= 25
        assert all(columns(line) <= max(60, min(width, 120)) or "/" in line for line in lines)
        assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_paths_and_commands_stay_whole(width: int) -> None:
    """A path that is longer than a line, a path with spaces and a command can be copied from one line."""
    place = "/scratch/" + "a directory of words/" * 8 + "train.py"
    missing, logs = "/data/" + "shard/" * 30 + "0.bin", "/logs/" + "run of today/" * 12
    text = (
        f'Traceback (most recent call last):\n  File "{place}", line 7, in <module>\n    open(name)\n'
        f"FileNotFoundError: [Errno 2] No such file or directory: '{missing}'\n"
    )
    root = worker_end(0, 1, text, log_file=f"{logs}/attempt_0/0/stderr.log")
    lines = render(result(root, log_dir=logs, failure_file=f"{logs}/failure.json"), width=width)
    for whole in (f"{place}:7 in <module>", f"'{missing}'", logs, "attempt_0/0/stderr.log", "failure.json"):
        assert sum(whole in line for line in lines) == 1, whole
    lines = render(result(worker_end(0, -9)), width=width)
    assert sum("`dmesg | grep -i oom`" in line for line in lines) == 1
    assert "the kernel." in " ".join(line[9:] for line in lines)
    lines = render(result(worker_end(0, 1), entrypoint=place))
    assert lines[0].startswith("-- elastic-run: train.py failed -")


def test_a_report_without_a_line_to_spare_is_still_made() -> None:
    """Each section keeps a line, however many lines the sections before it take."""
    crowded = worst(recorder=RecorderFinding("rank 1 did not join " * 50))
    for width in (60, 80, 120):
        lines = render(crowded, width=width)
        labels = [line[:9].strip() for line in lines if line[:9].strip()]
        assert labels[1:] == ["cause", "recorder", "others", "before", "verdict", "stuck", "logs", "hint"]
        assert len(lines) <= 25


@pytest.mark.parametrize(
    ("code", "verdict"), [(code, name) for code, name, _ in contract.EXIT_CODES if isinstance(code, int) and code != 0]
)
def test_the_sentence_of_each_verdict_is_whole_on_80_columns(code: int, verdict: str) -> None:
    """The title of a job with a script such as smallest.py is not shortened, whatever the verdict is."""
    job = result(verdict=verdict, exit_code=code, entrypoint="smallest.py")
    assert f" {ending_sentence(job)} -" in render(job, width=80)[0]


@pytest.mark.parametrize(
    "job",
    [
        result(*stopped(0), verdict="signal", exit_code=131, signal=3),
        result(worker_end(0, 1), verdict="hung", exit_code=212),
        result(worker_end(0, 1), verdict="repeated_failure", exit_code=202),
    ],
    ids=["stopped", "hung", "repeated"],
)
def test_a_narrow_terminal_shows_the_sentence_in_full(job: JobResult) -> None:
    """On 60 columns the name of the launcher is left out rather than a part of the sentence."""
    title = render(job, width=60)[0]
    assert title.startswith(f"-- {ending_sentence(job)} -")
    assert len(title) == 60


def test_a_long_name_leaves_room_for_the_ending() -> None:
    """Where the title is too long, the program's name is shortened, and not what became of the job."""
    job = result(verdict="rendezvous", exit_code=201, entrypoint="package.with_a.long_name.of_its_module")
    title = render(job, width=80)[0]
    assert ": the nodes did not come together -" in title
    assert len(title) == 80
    assert "module: the" in title


def test_a_cuda_error_shows_no_advice_that_all_of_them_have() -> None:
    """The report shows the program's line and the hint, not torch's four lines of advice."""
    lines = render(result(worker_end(1, -6, captured("cuda_assert")), *stopped(0)))
    assert lines[3] == "         torch.AcceleratorError: CUDA error: device-side assert triggered"
    assert lines[4].startswith("trace    /home/anna/project/failure.py:32 in <module>")


def test_an_abort_in_c_shows_what_was_said_and_no_frames() -> None:
    """Below an exception torch writes the calls of C++, twice; the report shows the lines between them."""
    lines = render(result(worker_end(0, -6, captured("nccl_aborted"))))
    assert not any("frame #" in line for line in lines)
    assert any(line.startswith("stderr   ") for line in lines)
    only_frames = render(result(worker_end(0, -6, "frame #0: step() + 0x9d (0x7f in libc10.so)\n")))
    assert any("frame #0" in line for line in only_frames)


ACTIONS = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": "/home/runner/repo/"}
_TRACE = (
    "Traceback (most recent call last):\n"
    '  File "/home/runner/repo/train.py", line 7, in <module>\n    step(1)\n'
    '  File "/venv/lib/python3.11/site-packages/torch/nn/module.py", line 99, in forward\n    fail()\n'
    "ValueError: 50%, of what: all\n"
)


def test_the_annotation_names_the_users_line() -> None:
    """The command has the file below the checked-out repository, the line, a title, and the cause, all escaped."""
    assert find_annotation(result(worker_end(1, 1, _TRACE), worker_end(0, 0)), ACTIONS) == (
        "::error file=train.py,line=7,title=train.py failed::rank 1 on gpu07 (local 1, pid 4701) failed with exit "
        "code 1 after 12.3 s: ValueError: 50%25, of what: all"
    )


def test_a_failure_without_a_traceback_has_no_place() -> None:
    """A worker that was killed has a title and a message only; a comma and a colon in a title are escaped."""
    job = result(worker_end(0, -9), entrypoint="a,b:c.py")
    assert find_annotation(job, ACTIONS).startswith("::error title=a%2Cb%3Ac.py failed::rank 0 on gpu07")
    lost = result(verdict="store_lost", detail="gone\nfor good")
    assert find_annotation(lost, ACTIONS) == "::error title=train.py%3A the job's store can't be reached::gone for good"


@pytest.mark.parametrize("environ", [{}, {"GITHUB_ACTIONS": "false"}])
def test_there_is_none_elsewhere(environ: dict[str, str]) -> None:
    """Without GITHUB_ACTIONS=true there is no such line, nor after a stop by signal."""
    assert not find_annotation(result(worker_end(0, 1, captured("value_error"))), environ)
    assert not find_annotation(result(worker_end(0, 1), signal=15), ACTIONS)

"""The closing report, as a tired person reads it."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.failure.job_result import Attempt, JobResult, RecorderFinding
from elastic_run.core.failure.root_cause import OomKills
from elastic_run.report.closing_report import render
from tests.support.job_results import NOON, captured, result, stopped, worker_end

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Show times in UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def report(job: JobResult) -> str:
    """Return a report as one text."""
    return "\n".join(render(job))


def test_the_whole_report_of_a_job_that_was_tried_three_times() -> None:
    """Cause, trace, others, earlier attempts, logs: each line as it is meant to be."""
    root = worker_end(1, 1, captured("value_error"), restart_count=2, log_file="/logs/job7_x/attempt_2/1/stderr.log")
    job = result(
        root,
        worker_end(0, 1, captured("gloo_peer_failed"), after=0.21),
        *stopped(2, 3, 4, 5, 6, 7),
        restarts_used=2,
        max_restarts=2,
        log_dir="/logs/job7_x",
        failure_file="/logs/job7_x/failure.json",
        attempts=(
            Attempt(restart_count=0, root=worker_end(3, -9), started_at=NOON, uptime=11220.0),
            Attempt(restart_count=1, root=root, started_at=NOON, uptime=12.9),
        ),
    )
    assert (
        report(job)
        == """\
-- elastic-run: train.py failed after 2 restarts ---------------- exit code 1 --
cause    rank 1 on gpu07 (local rank 1, pid 4701) failed with exit code 1
         at 2026-11-20 10:11:12.047, 12.3 s after its start, attempt 2
         ValueError: loss is not finite: 3
trace    /home/anna/project/value_error.py:8 in <module>
           main()
         /home/anna/project/value_error.py:2 in main
           loss = compute(3)
         /home/anna/project/value_error.py:5 in compute
           raise ValueError(f"loss is not finite: {x}")
others   rank 0 failed as a consequence 0.21 s later: Connection closed by pe...
         ranks 2-7 were stopped
before   attempt 0 failed after 3 h 07 min: rank 3 was killed by SIGKILL
         attempt 1 failed after 12.9 s: rank 1 in the same way
logs     /logs/job7_x
         rank 1: attempt_2/1/stderr.log, report as JSON: failure.json"""
    )


def test_one_line_in_place_of_a_report_that_another_node_shows() -> None:
    """The line has the cause and the exit code, and names the place of the whole report."""
    root = worker_end(1, 1, captured("value_error"), restart_count=2)
    job = result(root, *stopped(40, 41), restarts_used=2, max_restarts=2, is_brief=True)
    line = (
        "elastic-run: train.py failed after 2 restarts, exit code 1: rank 1 on gpu07 (local 1, pid 4701) failed with "
        "exit code 1 after 12.3 s: ValueError: loss is not finite: 3; the whole report is in the output of gpu07 and "
        "of the node with rank 0"
    )
    assert render(job) == [line]
    job.failure_file = "/logs/x/failure.json"
    assert render(job, color=True) == [f"{line}, and as JSON in /logs/x/failure.json"]


def test_one_line_in_place_of_the_report_of_a_signal() -> None:
    """All nodes of a job get the signal of `scancel`."""
    job = JobResult("signal", 143, "train.py", signal=15, is_brief=True)
    assert render(job) == ["elastic-run: train.py was stopped by SIGTERM, exit code 143"]
    job.detail = "SIGTERM came from pid 7 (slurmstepd)"
    assert render(job) == [f"elastic-run: train.py was stopped by SIGTERM, exit code 143: {job.detail}"]


def test_the_one_line_names_the_likeliest_cause() -> None:
    """If all that failed have only lost a peer, the line names the rank that had left the loop."""
    lost = worker_end(0, 1, captured("gloo_peer_failed"))
    (line,) = render(result(lost, worker_end(1, 0, after=-2.0), is_brief=True))
    assert "exit code 1: rank 1 ended with code 0, 2.0 s earlier: did it leave the loop early?; the whole" in line


def test_the_whole_report_of_a_worker_that_the_oom_killer_ended() -> None:
    """Without an exception the last lines of stderr stand there, and the kernel's counter makes the hint sure."""
    job = result(
        worker_end(3, -9, "step 1\n\x1b[31mstep 2\x1b[0m\n\n", oom_kills=OomKills(1, 1)),
        worker_end(0, 1, captured("gloo_peer_killed"), after=0.03),
        *stopped(1, 2),
        *stopped(4, exitcode=-9),
        worker_end(5, 0, after=-2.0),
    )
    assert (
        report(job)
        == """\
-- elastic-run: train.py failed ------------------------------- exit code 137 --
cause    rank 3 on gpu07 (local rank 3, pid 4703) was killed by SIGKILL
         at 2026-11-20 10:11:12.047, 12.3 s after its start
         the kernel's OOM killer ended it: the job's memory limit is reached
stderr   step 1
         step 2
others   rank 0 failed as a consequence 0.03 s later: Read error [127.0.0.1]:...
         rank 4 did not stop in time and was killed
         ranks 1-2 were stopped
         rank 5 had ended with exit code 0
logs     none kept; --log-dir=DIR keeps them
hint     Use a smaller batch or fewer DataLoader workers, or ask for more
         memory."""
    )


def test_the_whole_report_of_the_same_import_error_twice() -> None:
    """Our own verdict is told beside the cause, and all ranks that failed alike share a line."""
    text = 'Traceback (most recent call last):\n  File "/p/train.py", line 3, in <module>\n    import flash_attn\n'
    text += "ModuleNotFoundError: No module named 'flash_attn'\n"
    ends = [worker_end(rank, 1, text, after=rank / 100) for rank in range(8)]
    job = result(
        *ends,
        verdict="repeated_failure",
        exit_code=202,
        restarts_used=1,
        detail="the program failed twice with the same error: a restart can't help",
        attempts=(Attempt(restart_count=0, root=ends[2], started_at=NOON, uptime=1.2),),
    )
    assert (
        report(job)
        == """\
-- elastic-run: train.py failed again in the same way --------- exit code 202 --
cause    rank 0 on gpu07 (local rank 0, pid 4700) failed with exit code 1
         at 2026-11-20 10:11:12.047, 12.3 s after its start
         ModuleNotFoundError: No module named 'flash_attn'
trace    /p/train.py:3 in <module>
           import flash_attn
others   ranks 1-7 had the same ModuleNotFoundError
before   attempt 0 failed after 1.2 s: rank 2 in the same way
verdict  the program failed twice with the same error: a restart can't help
logs     none kept; --log-dir=DIR keeps them
hint     The workers' Python can't find that module: activate the environment
         that has it (PYTHON_EXEC names another interpreter), or add its
         directory to PYTHONPATH."""
    )


def test_a_stop_by_signal_takes_two_lines() -> None:
    """Whoever sent the signal knows why; there is nothing to explain."""
    job = result(*stopped(*range(8)), verdict="signal", exit_code=143, signal=15)
    assert (
        report(job)
        == """\
-- elastic-run: train.py was stopped by SIGTERM --------------- exit code 143 --
workers  ranks 0-7 were stopped"""
    )


def test_a_verdict_without_a_worker_is_told_by_its_sentence() -> None:
    """Where no worker failed, the cause is what the launcher says."""
    job = result(verdict="rendezvous", exit_code=201, detail="7 of 8 nodes joined within 600 s; missing: gpu03")
    assert (
        report(job)
        == """\
-- elastic-run: train.py: the nodes did not come together ----- exit code 201 --
cause    7 of 8 nodes joined within 600 s; missing: gpu03
hint     Every node needs the same --rdzv-id and the same --rdzv-endpoint (or
         --master-addr and --master-port). `elastic-run doctor` on every node,
         with the same --nnodes and --rdzv-endpoint, checks the network."""
    )


def test_an_unkillable_worker_is_named_with_what_it_waits_for() -> None:
    """The pid and the kernel function tell an administrator where to look."""
    job = result(
        worker_end(0, 1, captured("value_error")),
        verdict="unkillable_worker",
        exit_code=203,
        survivors=((4711, "nfs_wait_bit_killable"), (4712, ""), (4713, "x"), (4714, "y")),
    )
    text = report(job)
    assert (
        "stuck    pid 4711 sleeps in the kernel in nfs_wait_bit_killable\n         pid 4712 sleeps in the ker" in text
    )
    assert "... (4 in all)" in text
    assert "look at dmesg" in text


def test_an_unreadable_error_file_is_one_clause() -> None:
    """A remark on the worker stands under its cause."""
    job = result(worker_end(0, 1, captured("value_error"), remark="its error.json is not valid JSON"))
    assert "         its error.json is not valid JSON\n         ValueError" in report(job)


def test_a_cause_is_told_where_a_chain_began() -> None:
    """A chained exception names where the chain began and its last step; of a group the last member is told."""
    chained = " ".join(report(result(worker_end(0, 1, captured("chained")))).split())
    assert "caused by json.decoder.JSONDecodeError: Expecting property name" in chained
    assert "(by way of ConfigError: config.json can't be read)" in chained
    group = report(result(worker_end(0, 1, captured("group"))))
    assert "caused by" not in group
    assert "OSError: [Errno 5] Input/output error" in group


def test_a_library_s_frames_give_way_to_the_user_s_own() -> None:
    """The user's line and the innermost two stand there, with dots for what was left out."""
    text = report(result(worker_end(0, 1, captured("clients_missing"))))
    assert "trace    /home/anna/project/late.py:2 in <module>" in text
    assert "         ...\n         torch/distributed/rendezvous.py:280 in _env_rendezvous_handler" in text
    assert "c10d_logger" not in text


def test_failures_without_a_root_or_an_exception_are_told_too() -> None:
    """Workers that failed while the launcher was stopped by a signal, and a bare exit code among others."""
    job = result(worker_end(0, 3), worker_end(1, 0), verdict="signal", exit_code=143, signal=15, root=None)
    assert "workers  rank 0 failed (exit code 3)\n         rank 1 had ended with exit code 0" in report(job)
    job = result(worker_end(0, 1, captured("value_error")), worker_end(1, 3, after=-0.5))
    assert "others   rank 1 failed 0.50 s earlier (exit code 3)" in report(job)


def test_a_deep_traceback_shows_its_inner_end() -> None:
    """Of the user's own frames those next to the error have precedence."""
    frames = "".join(f'  File "/p/train.py", line {line}, in step{line}\n    step{line + 1}()\n' for line in range(30))
    lines = render(result(worker_end(0, 1, f"Traceback (most recent call last):\n{frames}KeyError: 'x'\n")))
    assert lines[4] == "trace    ..."
    assert "         /p/train.py:29 in step29" in lines
    assert "         /p/train.py:25 in step25" in lines
    assert not any("step1(" in line for line in lines)


def test_a_message_of_many_lines_shows_its_head_and_tail() -> None:
    """The first lines and the last of a long message are kept."""
    message = "\n".join(f"line {number}" for number in range(50))
    text = f'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    g()\nRuntimeError: {message}\n'
    root = worker_end(0, 1)
    lines = render(result(worker_end(0, 1, text[: text.index("line 20")])))
    assert "         RuntimeError: line 0" in lines
    assert lines[lines.index("         RuntimeError: line 0") + 2] == "         ..."
    assert root.exception is None


def test_attempts_that_failed_alike_share_a_line() -> None:
    """Ten attempts take three lines at most."""
    one, other = worker_end(1, -11), worker_end(0, 1, captured("value_error"))
    roots = [one, one, one, other, None, other, one]
    attempts = tuple(
        Attempt(restart_count=number, root=root, started_at=NOON, uptime=1.0 + number)
        for number, root in enumerate(roots)
    )
    text = report(result(worker_end(2, 5), attempts=attempts))
    assert "before   attempts 0-2 failed after 1.0 s to 3.0 s: rank 1 was killed by SIGSEGV\n" in text
    assert "... (7 attempts in all)\n         attempt 6 failed after 7.0 s: rank 1 was killed by SIGSEGV\n" in text
    assert "... (6 attempts in all)" in report(result(worker_end(2, 5), attempts=attempts[:6]))
    same = tuple(Attempt(restart_count=number, root=None, started_at=NOON, uptime=1.0) for number in range(2))
    assert "attempts 0-1 failed after 1.0 s: no worker failed by itself" in report(result(attempts=same, detail="x"))
    assert "rank 0, ValueError: loss" in report(result(worker_end(2, 5), attempts=attempts[3:4]))


def test_a_log_outside_of_the_log_directory_has_its_whole_path() -> None:
    """Only what lies below the directory is shortened."""
    job = result(worker_end(0, 1, log_file="/else/stderr.log"), log_dir="/logs")
    assert "logs     /logs\n         rank 0: /else/stderr.log" in report(job)
    assert report(result(worker_end(0, 1), log_dir="/logs")).endswith("logs     /logs")


def test_colour_changes_nothing_but_colour() -> None:
    """Without its escapes the coloured report is the plain one, which has none; red are the title and the exception."""
    job = result(worker_end(0, 1, captured("value_error")), *stopped(1))
    plain, coloured = render(job), render(job, color=True)
    assert "\x1b" not in "".join(plain)
    assert [re.sub(r"\x1b\[\d+m", "", line).rstrip() for line in coloured] == plain
    assert coloured[0].startswith("\x1b[1m\x1b[31m-- elastic-run")
    red = [line for line in coloured[1:] if "\x1b[31m" in line]
    assert [line.partition("\x1b[31m")[2] for line in red] == ["ValueError: loss is not finite: 3\x1b[0m"]


def test_the_recorder_is_no_part_of_the_trace() -> None:
    """The frame of `@record` is in every recorded traceback, and takes no line of the report."""
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/ada/train.py", line 9, in <module>\n    main()\n'
        '  File "/env/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", '
        "line 362, in wrapper\n    return f(*args, **kwargs)\n"
        '  File "/home/ada/train.py", line 5, in main\n    raise ValueError("no")\n'
        "ValueError: no\n"
    )
    shown = report(result(worker_end(0, 1, text)))
    assert "/home/ada/train.py:5 in main" in shown
    assert "wrapper" not in shown


def test_who_left_early_is_named_where_nobody_else_is_to_blame() -> None:
    """Where all that is known is a lost peer, a rank that had ended with 0 before it is asked about."""
    lost = "Traceback (most recent call last):\n{}: Connection reset by peer\n"
    root = worker_end(0, 1, lost.format("RuntimeError"))
    early, late = worker_end(3, 0, after=-2.0), worker_end(1, 0, after=1.0)
    text = report(result(root, early, late))
    assert "rank 3 ended with code 0, 2.0 s earlier: did it leave the loop early?" in text
    assert "rank 1 ended with exit code 0" in text
    own = worker_end(0, 1, "Traceback (most recent call last):\nValueError: own\n")
    assert "leave the loop" not in report(result(own, early))
    server = worker_end(0, 1, lost.format("ConnectionResetError"))
    assert "leave the loop" not in report(result(server, early))


@pytest.mark.parametrize(
    "job",
    [
        JobResult("hung", 212, detail="rank 1 is in count", versions="torch 2.4.0 on h1; torch 2.13.0 on h0"),
        JobResult("signal", 143, signal=15, versions="torch 2.4.0 on h1; torch 2.13.0 on h0"),
    ],
    ids=["hung", "stopped"],
)
def test_versions_that_differ_are_in_the_report_where_no_worker_failed(job: JobResult) -> None:
    """Collectives of two versions may hang: then there is no failed worker beside which to say it."""
    said = " ".join(" ".join(render(job)).split())
    assert "nodes the nodes differ: torch 2.4.0 on h1; torch 2.13.0 on h0" in said


def test_what_the_flight_recorder_says_stands_behind_the_cause() -> None:
    """The rank that did not join is named in the report, also of a job that was stopped."""
    said = "rank 1 did not join all_reduce number 812 of group 'default', in which ranks 0, 2-3 wait (train.py:88)"
    job = JobResult(verdict="signal", exit_code=130, entrypoint="train.py", signal=2, recorder=RecorderFinding(said))
    lines = render(job)
    assert [line for line in lines if line.startswith("recorder ")] == [
        "recorder rank 1 did not join all_reduce number 812 of group 'default', in which"
    ]
    assert len(lines) <= 25

"""The root cause of a round, found among all the ways in which its workers ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_run.core.failure.root_cause import (
    BARE_END,
    LOST_RANK,
    OWN_EXCEPTION,
    ExceptionText,
    WorkerEnd,
    failure_signature,
    find_root_cause,
    has_lost_rank,
    is_deterministic,
    is_secondary,
    is_unguarded_launch,
    severity,
)
from elastic_run.core.failure.traceback_text import parse_exception

DATA = Path(__file__).parents[1] / "data" / "stderr"
OWN = ExceptionText("ValueError", "bad batch 17", where="train.py:9")
SERVER = ExceptionText("ConnectionResetError", "[Errno 104] Connection reset by peer")
LOST = ExceptionText("RuntimeError", "[/x/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:13965")


def end(
    rank: int = 0,
    exitcode: int = 1,
    at: float = 0.0,
    *,
    exception: ExceptionText | None = None,
    stopped: bool = False,
    tail: tuple[str, ...] = (),
) -> WorkerEnd:
    """Return a worker's end, as short as a table needs it."""
    return WorkerEnd(
        rank=rank,
        local_rank=rank,
        role="default",
        host="node0",
        pid=100 + rank,
        exitcode=exitcode,
        ended_at=at,
        uptime=at,
        was_stopped=stopped,
        exception=exception,
        stderr_tail=tail,
    )


def captured(name: str) -> ExceptionText:
    """Return the exception of a captured stderr."""
    exception = parse_exception((DATA / f"{name}.txt").read_text(encoding="utf-8"))
    assert exception is not None
    return exception


CAUSES: list[tuple[str, list[WorkerEnd], int | None]] = [
    ("nobody ended", [], None),
    ("all succeeded", [end(0, 0), end(1, 0)], None),
    ("all were stopped", [end(0, -15, stopped=True), end(1, -9, stopped=True)], None),
    ("the earliest of two exceptions", [end(0, 1, 2.0, exception=OWN), end(1, 1, 1.0, exception=OWN)], 1),
    ("the lower rank of two at one moment", [end(1, 1, exception=OWN), end(0, 1, exception=OWN)], 0),
    ("an exception before an earlier signal", [end(0, -11, 1.0), end(1, 1, 1.5, exception=OWN)], 1),
    ("a bare exit code and a signal by time", [end(0, 3, 2.0), end(1, -9, 1.0)], 1),
    ("a signal before an earlier lost connection", [end(0, 1, 1.0, exception=LOST), end(1, -9, 1.5)], 1),
    ("an exception before a lost connection", [end(0, 1, 1.0, exception=LOST), end(1, 1, 1.5, exception=OWN)], 1),
    ("a connection of its own before one to a rank", [end(0, 1, exception=LOST), end(1, 1, 1.0, exception=SERVER)], 1),
    ("a lone lost connection", [end(0, 1, 1.0, exception=LOST), end(1, 0)], 0),
    ("the earliest of lost connections", [end(0, 1, 2.0, exception=LOST), end(1, 1, 1.0, exception=LOST)], 1),
    ("a signal and the stopped", [end(0, -15, 0.5, stopped=True), end(1, -9, 0.4)], 1),
    ("a slow death", [end(0, 1, 1.0, exception=LOST), end(1, 1, 2.0, exception=OWN, stopped=True)], 1),
    (
        "no stopped worker that obeyed",
        [
            end(0, 1, 1.0, exception=LOST),
            end(1, 1, 0.5, exception=ExceptionText("KeyboardInterrupt"), stopped=True),
            end(2, -15, 0.5, stopped=True),
            end(3, 1, 0.5, exception=LOST, stopped=True),
            end(4, 1, 0.5, exception=ExceptionText("SignalException", "got SIGTERM"), stopped=True),
        ],
        0,
    ),
    ("no stopped worker where there is a cause", [end(0, -9, 2.0), end(1, 1, 1.0, exception=OWN, stopped=True)], 0),
]


@pytest.mark.parametrize(("ends", "rank"), [case[1:] for case in CAUSES], ids=[case[0] for case in CAUSES])
def test_the_root_cause_is_the_failure_that_the_others_followed_from(ends: list[WorkerEnd], rank: int | None) -> None:
    """Exceptions go before signals and bare exits, those before consequences, then the earliest."""
    root = find_root_cause(ends)
    assert (root.rank if root else None) == rank


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gloo_peer_failed", LOST_RANK),
        ("gloo_peer_killed", LOST_RANK),
        ("gloo_timeout", LOST_RANK),
        ("store_gone", LOST_RANK),
        ("clients_missing", LOST_RANK),
        ("connect_timeout", LOST_RANK),
        ("nccl_aborted", LOST_RANK),
        ("nccl_watchdog", LOST_RANK),
        ("gloo_own_exception", OWN_EXCEPTION),
        ("port_taken", OWN_EXCEPTION),
        ("cuda_out_of_memory", OWN_EXCEPTION),
        ("value_error", OWN_EXCEPTION),
    ],
)
def test_what_torch_says_of_a_lost_peer_is_a_consequence(name: str, expected: int) -> None:
    """A lost connection and a collective's time-out are told from a rank's own fault, in torch's own words."""
    worker = end(exception=captured(name))
    assert severity(worker) == expected
    assert is_secondary(worker) == has_lost_rank(worker) == (expected == LOST_RANK)


def test_what_nccl_says_of_another_size_is_a_consequence() -> None:
    """NCCL calls data that is longer than its receiver's buffer an invalid usage; which rank is wrong is not known."""
    text = (
        "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "NET/Socket : peer 192.0.2.2<36140> message truncated : receiving 524288 bytes instead of 65536."
    )
    assert is_secondary(end(-6, exception=ExceptionText("c10::DistBackendError", text)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
        ("requests.exceptions.ConnectionError", "HTTPConnectionPool(host='data'): Connection refused"),
        ("redis.exceptions.ConnectionError", "Error 111 connecting to cache:6379. Connection refused."),
    ],
)
def test_a_connection_of_the_program_s_own_has_lost_no_rank(name: str, message: str) -> None:
    """It is no likelier cause than others, for it may have been to a peer; but nobody is left running for it."""
    worker = end(exception=ExceptionText(name, message))
    assert is_secondary(worker)
    assert not has_lost_rank(worker)


def test_a_crash_in_native_code_is_a_signal_even_if_python_dumped_its_stack() -> None:
    """Faulthandler's text doesn't turn a SIGSEGV into an exception of the program."""
    assert severity(end(exitcode=-11, exception=captured("segv"))) == BARE_END


def test_an_abort_that_speaks_of_a_lost_peer_is_a_consequence() -> None:
    """NCCL's watchdog aborts the process; its last lines tell."""
    assert severity(end(exitcode=-6, tail=("step 3", "[E] Watchdog caught collective operation timeout"))) == LOST_RANK
    assert severity(end(exitcode=-6, tail=("free(): invalid pointer",))) == BARE_END


def test_a_rank_that_gloo_ends_because_of_a_longer_tensor_is_a_consequence() -> None:
    """The peer sent more bytes than the rank's collective takes: either of them may have the wrong size."""
    said = "  what():  op.nbytes. 8 vs 4. Received data size doesn't match expected size. Is there a distributed …"
    aborted = end(exitcode=-6, tail=("terminate called", said))
    assert severity(aborted) == LOST_RANK


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("CUDA error at 0x7f00aa11 in pid 4711", "CUDA error at 0x7f22bb33 in pid 4722"),
        ("loss 0.31 at step 1200", "loss 1e-07 at step 7"),
        ("/tmp/tmpabc1/x missing", "/tmp/tmpzzz9/y missing"),
        ("store key 1f3870be274f6c49b3e31a0c6728957f", "store key 9b74c9897bac770ffc029102a200c5de"),
    ],
)
def test_failures_that_differ_in_numbers_only_are_the_same(first: str, second: str) -> None:
    """Addresses, numbers, temporary paths and hashes don't make a failure another one."""
    one, two = (end(exception=ExceptionText("RuntimeError", text, where="t.py:3")) for text in (first, second))
    assert failure_signature(one) == failure_signature(two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (end(exitcode=1), end(exitcode=2)),
        (end(exception=OWN), end(exception=ExceptionText("TypeError", "bad batch 17", where="train.py:9"))),
        (end(exception=OWN), end(exception=ExceptionText("ValueError", "bad file", where="train.py:9"))),
        (end(exception=OWN), end(exception=ExceptionText("ValueError", "bad batch 17", where="train.py:10"))),
        (end(tail=("disk full",)), end(tail=("out of ideas", ""))),
    ],
)
def test_failures_that_differ_in_kind_or_place_are_different(one: WorkerEnd, two: WorkerEnd) -> None:
    """Exit code, type, message, place, and without an exception the last line, tell failures apart."""
    assert failure_signature(one) != failure_signature(two)


def test_without_an_exception_the_last_line_that_says_something_counts() -> None:
    """Blank lines at the end and what came before don't matter."""
    assert failure_signature(end(tail=("a", "disk 3 full", " "))) == failure_signature(end(tail=("b", "disk 4 full")))


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (end(exception=ExceptionText("ImportError")), True),
        (end(exception=ExceptionText("ModuleNotFoundError")), True),
        (end(exception=ExceptionText("builtins.SyntaxError")), True),
        (end(exception=captured("indentation_error")), True),
        (end(exception=OWN), False),
        (end(exitcode=126), True),
        (end(exitcode=127), True),
        (end(exitcode=2, tail=("python: can't open file 'x.py': [Errno 2] No such file or directory",)), True),
        (end(exitcode=2, tail=("train.py: error: unrecognized arguments: --lr",)), True),
        (end(exitcode=2, tail=("grep: x: binary file matches",)), False),
        (end(exitcode=1, tail=("/opt/venv/bin/python: No module named no_mod",)), True),
        (end(exitcode=1, tail=("disk quota exceeded",)), False),
        (end(exitcode=-9), False),
        (end(exitcode=1), False),
    ],
)
def test_only_what_cannot_go_away_by_itself_is_deterministic(worker: WorkerEnd, *, expected: bool) -> None:
    """Missing modules and programs, syntax errors and wrong arguments come back; the rest may not."""
    assert is_deterministic(worker) is expected


@pytest.mark.parametrize(
    ("exception", "expected"),
    [
        (ExceptionText("RuntimeError", lines=("  File spawn.py, line 140, in _check_not_importing_main", "x")), True),
        (ExceptionText("RuntimeError", lines=("  File worker.py, line 300, in refuse_unguarded_main",)), True),
        (ExceptionText("RuntimeError", lines=("in _check_not_importing_main_of_mine",)), False),
        (OWN, False),
        (None, False),
    ],
)
def test_a_launch_without_a_main_guard_is_recognised(exception: ExceptionText | None, *, expected: bool) -> None:
    """The function that refuses the launch stands in the traceback, multiprocessing's or ours."""
    assert is_unguarded_launch(end(exception=exception)) is expected


@pytest.mark.parametrize(("exitcode", "expected"), [(-9, 9), (137, 9), (143, 15), (1, None), (128, None), (200, None)])
def test_a_signal_is_known_also_through_a_shell(exitcode: int, expected: int | None) -> None:
    """128+n, which a shell makes of a signal, is understood; 128 and codes above the last signal are just codes."""
    assert end(exitcode=exitcode).signal == expected


def test_an_exception_knows_its_short_name_and_its_line() -> None:
    """Modules and C++ namespaces are cut off, and a message has one line here."""
    exception = ExceptionText("c10::DistBackendError", "first\nsecond")
    assert (exception.name, exception.summary) == ("DistBackendError", "c10::DistBackendError: first")
    assert ExceptionText("AssertionError").summary == "AssertionError"
    assert "bad batch" in repr(OWN)

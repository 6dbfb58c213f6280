"""Stacks of workers: what faulthandler writes, ranks at the same place, and the lines about them."""

from __future__ import annotations

import os
import re
import resource
import threading
from pathlib import Path

import pytest

from elastic_run import contract, worker_start
from elastic_run.core.failure.stacks import (
    Dump,
    Frame,
    Group,
    Place,
    Stacks,
    Thread,
    find_place,
    group_dumps,
    parse_stacks,
    shorten_stacks,
)
from elastic_run.diagnosis.kernel_view import describe_threads
from elastic_run.diagnosis.stack_requests import render_stacks, write_stacks
from elastic_run.report import stack_lines
from tests.support.torch_python import PTH

_TEXTS = Path(__file__).parents[1] / "data" / "faulthandler"
_TORCH = "/venv/lib/python3.11/site-packages/torch"


def _text(*frames: tuple[str, int, str], others: str = "") -> str:
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    return "\n".join([*([others] if others else []), "Thread 0x00007f0a (most recent call first):", *lines]) + "\n"


_WAITS = _text(
    (f"{_TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"),
    (f"{_TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
    ("/home/user/train.py", 88, "step"),
    ("/home/user/train.py", 120, "<module>"),
)
_LOADS = _text(("/home/user/data.py", 41, "load_batch"), ("/home/user/train.py", 80, "step"))


@pytest.mark.parametrize("name", ["3.9", "3.10", "3.11", "3.12", "3.13"])
def test_texts_of_releases_of_python(name: str) -> None:
    """What each release of Python writes has both threads, with their frames; the main thread comes last."""
    stacks = parse_stacks((_TEXTS / f"python-{name}.txt").read_text(encoding="utf-8"))
    helper, main = stacks.threads
    assert helper.frames[0].function == "wait"
    assert helper.frames[0].file.endswith(f"python{name}/threading.py")
    assert helper.frames[-1].function == "_bootstrap"
    assert main.frames[0] == Frame("/home/user/job/train.py", 10, "load_batch")
    assert main.frames[-2] == Frame("na\\xefve file.py", 1, "<module>")
    assert main.frames[-1] == Frame("/home/user/job/train.py", 16, "<module>")
    assert stacks.main == main
    assert find_place(stacks) == Place("load_batch", "/home/user/job/train.py", 10)


def test_text_of_python_3_14() -> None:
    """Python 3.14 adds a thread's name; a line may be unknown."""
    text = 'Thread 0x00007f0a [pin memory] (most recent call first):\n  File "a.py", line ??? in f\n'
    assert parse_stacks(text) == Stacks((Thread((Frame("a.py", 0, "f"),), "pin memory"),))


def test_a_text_that_is_too_long_keeps_the_main_thread() -> None:
    """The newest threads go first, which stand before it; of a main thread alone its innermost calls stay."""
    text = _text(("main.py", 1, "f"), others=_WAITS * 50)
    assert shorten_stacks(text, len(text)) == text
    short = shorten_stacks(text, 3 * len(_WAITS))
    assert short.endswith(_text(("main.py", 1, "f")))
    assert parse_stacks(short).main == parse_stacks(text).main
    assert shorten_stacks(_WAITS, 60) == _WAITS[:60]
    assert shorten_stacks("x" * 100, 10) == "x" * 10


def test_a_torn_or_foreign_text() -> None:
    """Frames without a thread, other lines and an empty text are no stacks; nothing raises."""
    assert parse_stacks('  File "a.py", line 3 in f\nFatal Python error: none\n') == Stacks(())
    assert parse_stacks("").main is None
    assert find_place(parse_stacks("")).problem == "runs no Python code at the moment"
    assert find_place(parse_stacks("Thread 0x0f (most recent call first):\n  <no Python frame>\n")).problem


def test_what_a_worker_repeats_of_the_contract() -> None:
    """The module that each worker imports does not import `contract`; the .pth file reads nothing but the variables."""
    names = [name for name in vars(worker_start) if name.isupper() and not name.startswith(("_", "TYPE"))]
    assert len(names) == 6
    assert [getattr(worker_start, name) for name in names] == [getattr(contract, name) for name in names]
    asked = re.findall("ELASTIC_RUN_[A-Z_]+", PTH.read_text(encoding="ascii").splitlines()[2])
    assert asked == [contract.ENV_STACK_PIPE, contract.ENV_FLIGHT_RECORDER, contract.ENV_FAULTS]


def test_the_frame_of_our_own_handler_is_passed_over() -> None:
    """A handler of the program may interrupt it and hang there: the place is what the program's line has called."""
    ours = Frame(contract.STACK_HANDLER_FILE, 1, "write_stacks")
    calls = [
        ("/w/fault.py", 3, "sleep_for_ever"),
        (ours.file, ours.line, ours.function),
        ("/w/train.py", 8, "<module>"),
    ]
    text = "".join(f'  File "{file}", line {line} in {function}\n' for file, line, function in calls)
    found = parse_stacks(f"Thread 0x00 (most recent call first):\n{text}")
    assert found.main == Thread((Frame("/w/fault.py", 3, "sleep_for_ever"), Frame("/w/train.py", 8, "<module>")))


def test_more_threads_than_python_writes() -> None:
    """Python leaves out the oldest of more than 100 threads: no other thread is taken for the main one."""
    stacks = parse_stacks(_WAITS + "...\n")
    assert stacks.is_cut
    assert stacks.main is None
    assert "more than 100 threads" in find_place(stacks).problem


def test_the_place_is_the_innermost_frame_of_the_users_program() -> None:
    """It is named after the library's function that it has called, wrappers aside; who waits for others is known."""
    assert find_place(parse_stacks(_WAITS)) == Place("all_reduce", "/home/user/train.py", 88, is_waiting=True)
    assert find_place(parse_stacks(_LOADS)) == Place("load_batch", "/home/user/data.py", 41)
    inner = ((f"{_TORCH}/nn/modules/linear.py", 120, "forward"), (f"{_TORCH}/nn/modules/module.py", 1, "_call_impl"))
    place = find_place(parse_stacks(_text(*inner, ("/home/user/train.py", 7, "main"))))
    assert place == Place("forward", "/home/user/train.py", 7)
    only_wrapper = _text((f"{_TORCH}/utils/_contextlib.py", 120, "decorate_context"), ("train.py", 7, "main"))
    assert find_place(parse_stacks(only_wrapper)) == Place("main", "train.py", 7)


@pytest.mark.parametrize("caller", [(), (("/venv/lib/python3.11/site-packages/tqdm/std.py", 1181, "__iter__"),)])
def test_a_rank_without_data_is_in_its_data_loader(caller: tuple[tuple[str, int, str], ...]) -> None:
    """Also where a library asks for the batch; `__next__` and `__iter__` would tell a reader nothing."""
    inner = [("/usr/lib/python3.11/selectors.py", 415, "select"), ("/usr/lib/python3.11/queue.py", 113, "get")]
    loader = f"{_TORCH}/utils/data/dataloader.py"
    loads = [*inner, (loader, 1464, "_get_data"), (loader, 725, "__next__")]
    place = find_place(parse_stacks(_text(*loads, *caller, ("/home/user/train.py", 30, "main"))))
    assert place == Place("DataLoader", "/home/user/train.py", 30)


_CHECKPOINT = f"{_TORCH}/distributed/checkpoint"
_SAVE = (
    (f"{_CHECKPOINT}/state_dict_saver.py", 355, "_save_state_dict"),
    (f"{_CHECKPOINT}/logger.py", 87, "wrapper"),
    (f"{_CHECKPOINT}/state_dict_saver.py", 191, "save"),
    ("/home/user/train.py", 50, "main"),
)


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        ([(f"{_CHECKPOINT}/filesystem.py", 299, "_write_item"), *_SAVE], Place("save", "/home/user/train.py", 50)),
        (
            [
                (f"{_TORCH}/distributed/distributed_c10d.py", 3252, "all_gather"),
                (f"{_TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
                (f"{_TORCH}/distributed/distributed_c10d.py", 3001, "gather_object"),
                (f"{_CHECKPOINT}/utils.py", 130, "gather_object"),
                *_SAVE,
            ],
            Place("gather_object", "/home/user/train.py", 50, is_waiting=True),
        ),
        (
            [
                ("/venv/lib/python3.11/site-packages/transformers/modeling_llama.py", 300, "forward"),
                (f"{_TORCH}/distributed/fsdp/fully_sharded_data_parallel.py", 863, "forward"),
                (f"{_TORCH}/nn/modules/module.py", 1, "_call_impl"),
                ("/home/user/train.py", 60, "main"),
            ],
            Place("forward", "/home/user/train.py", 60),
        ),
        (
            [
                (f"{_TORCH}/nn/parallel/distributed.py", 1523, "_pre_forward"),
                (f"{_TORCH}/nn/parallel/distributed.py", 1632, "forward"),
                (f"{_TORCH}/nn/modules/module.py", 1562, "_call_impl"),
                ("/home/user/train.py", 60, "main"),
            ],
            Place("forward", "/home/user/train.py", 60, is_waiting=True),
        ),
        (
            [
                (f"{_TORCH}/nn/modules/linear.py", 120, "forward"),
                (f"{_TORCH}/nn/modules/module.py", 1562, "_call_impl"),
                (f"{_TORCH}/nn/parallel/distributed.py", 1640, "forward"),
                (f"{_TORCH}/nn/modules/module.py", 1562, "_call_impl"),
                ("/home/user/train.py", 60, "main"),
            ],
            Place("forward", "/home/user/train.py", 60),
        ),
        (
            [
                (f"{_TORCH}/distributed/pipelining/schedules.py", 500, "_wait_batch_p2p"),
                (f"{_TORCH}/distributed/pipelining/schedules.py", 700, "step"),
                ("/home/user/train.py", 61, "main"),
            ],
            Place("step", "/home/user/train.py", 61, is_waiting=True),
        ),
        (
            [
                ("/venv/lib/python3.11/site-packages/elastic_run/worker/joining.py", 80, "wait_all"),
                ("/venv/lib/python3.11/site-packages/elastic_run/worker/joining.py", 66, "arrive"),
                ("/venv/lib/python3.11/site-packages/elastic_run/worker/distributed.py", 170, "init_distributed"),
                ("/home/user/train.py", 7, "main"),
            ],
            Place("init_distributed", "/home/user/train.py", 7, is_waiting=True),
        ),
        (
            [
                ("/pex/torch-2.13.whl/torch/distributed/distributed_c10d.py", 3252, "all_reduce"),
                ("/pex/torch-2.13.whl/torch/distributed/c10d_logger.py", 83, "wrapper"),
                ("/home/user/train.py", 88, "step"),
            ],
            Place("all_reduce", "/home/user/train.py", 88, is_waiting=True),
        ),
    ],
    ids=[
        "writes a checkpoint",
        "waits in a checkpoint",
        "computes in FSDP",
        "waits in DDP",
        "computes in DDP",
        "waits for a stage",
        "joins",
        "pex",
    ],
)
def test_only_a_rank_that_communicates_waits(calls: list[tuple[str, int, str]], place: Place) -> None:
    """Not one that writes a checkpoint or computes below torch.distributed; a wait has the name of the collective."""
    assert find_place(parse_stacks(_text(*calls))) == place


def test_a_main_thread_that_has_ended_is_told() -> None:
    """A thread that is no daemon keeps a program whose main thread has come to its end, or has raised."""
    place = find_place(parse_stacks(_text(("/usr/lib/python3.11/threading.py", 1590, "_shutdown"))))
    assert place == Place(problem="has ended its main thread, and another thread still runs")


def test_a_program_that_is_installed_has_a_place() -> None:
    """Where all frames are in packages (`-m package`), the innermost one is the place."""
    text = _text(("/usr/lib/python3.11/socket.py", 5, "recv"), ("<frozen runpy>", 88, "_run_code"))
    assert find_place(parse_stacks(text)) == Place("recv", "/usr/lib/python3.11/socket.py", 5)


def test_the_odd_one_out_comes_last() -> None:
    """Ranks that wait for others come first, then the larger group, last those whose stacks are not known."""
    dumps = {rank: Dump(_WAITS) for rank in range(3)} | {3: Dump(_LOADS), 4: Dump(problem="is stopped")}
    groups = group_dumps(dumps)
    assert [group.ranks for group in groups] == [(0, 1, 2), (3,), (4,)]
    assert groups[2] == Group(Place(problem="is stopped"), (4,), None)
    loading = group_dumps({0: Dump(_WAITS), 1: Dump(_LOADS), 2: Dump(_LOADS)})
    assert [group.ranks for group in loading] == [(0,), (1, 2)]


def test_helper_threads_do_not_divide_ranks() -> None:
    """Ranks whose main threads are at one place are one group, whatever their other threads do."""
    helper = 'Thread 0x0b (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 320 in wait\n'
    one = Dump(_text(("/home/user/data.py", 41, "load_batch"), others=helper))
    assert [group.ranks for group in group_dumps({0: one, 1: Dump(_LOADS)})] == [(0, 1)]


def test_the_summary_is_one_line() -> None:
    """It says which ranks wait where, and where the odd one is."""
    dumps = {rank: Dump(_WAITS) for rank in range(3)} | {3: Dump(_LOADS)}
    assert (
        stack_lines.summary(dumps) == "ranks 0-2 wait in all_reduce (train.py:88); rank 3 is in load_batch (data.py:41)"
    )
    assert stack_lines.summary({0: Dump(_WAITS), 1: Dump(problem="is stopped")}) == (
        "rank 0 waits in all_reduce (train.py:88); rank 1 is stopped"
    )
    both = stack_lines.summary({0: Dump(problem="is stopped"), 1: Dump(problem="is stopped")})
    assert both == "ranks 0-1: each is stopped"
    assert stack_lines.summary({0: Dump(_LOADS), 1: Dump(_LOADS)}) == "ranks 0-1 are in load_batch (data.py:41)"


def test_the_text_of_the_main_thread_alone_is_read() -> None:
    """Its text calls it a stack."""
    text = 'Stack (most recent call first):\n  File "/home/user/data.py", line 41 in load_batch\n'
    main = parse_stacks(text).main
    assert main is not None
    assert [frame.function for frame in main.frames] == ["load_batch"]
    assert shorten_stacks(text * 2, len(text) + 1) == text


def test_many_places_are_folded() -> None:
    """A thousand ranks at a thousand places make no thousand clauses; the odd ones out are not among those left out."""
    dumps = {rank: Dump(_text((f"/home/user/{rank}.py", 1, "f"))) for rank in range(1000)}
    dumps |= {7: Dump(problem="is stopped"), 500: Dump(_WAITS), 501: Dump(_WAITS)}
    summary = stack_lines.summary(dumps)
    assert summary.count(";") == 8
    assert summary.startswith("ranks 500-501 wait in all_reduce (train.py:88); rank 0 is in f (0.py:1); ")
    assert "; ranks 3-6, 8-499, 502-996 elsewhere; " in summary
    assert summary.endswith("; rank 999 is in f (999.py:1); rank 7 is stopped")
    details = [*stack_lines.details(dumps)]
    assert sum("innermost call first" in line for line in details) == 7
    assert details[-2:] == ["rank 999, innermost call first:", "  /home/user/999.py:1 in f"]


def test_names_of_hostile_programs_are_shown_as_text() -> None:
    """An escape sequence in a function's name does not reach the terminal."""
    assert "\x1b" not in stack_lines.summary({0: Dump(_text(("/home/\x1b[2J.py", 1, "\x1b[31mf")))})
    assert not any("\x1b" in line for line in stack_lines.details({0: Dump(_text(("\x1b.py", 1, "f")))}))


def test_without_a_log_directory_one_stack_of_each_group_is_shown() -> None:
    """Long stacks are cut, and the line says so; a rank without stacks has none to show."""
    deep = _text(*((f"/home/user/{depth}.py", depth, "f") for depth in range(30)))
    lines = [*stack_lines.details({0: Dump(deep), 1: Dump(problem="is stopped")})]
    assert lines[:2] == ["rank 0, innermost call first:", "  /home/user/0.py:0 in f"]
    assert lines[-1] == "  (20 more)"
    assert len([*stack_lines.details({0: Dump(_LOADS)})]) == 3
    assert [*stack_lines.details({0: Dump("Thread 0x0f (most recent call first):\n  <no Python frame>\n")})] == []


def test_one_rank_is_shown_whole() -> None:
    """All threads of a rank, and what the kernel tells where there is no stack."""
    assert [*stack_lines.rank_lines({0: Dump(_LOADS)})] == ["=== rank 0", *_LOADS.splitlines()]
    stopped = Dump(problem="is stopped", details="thread 7\x1b")
    assert next(iter(stack_lines.rank_lines({1: stopped}))) == "=== rank 1: is stopped"
    assert "\x1b" not in "".join(stack_lines.rank_lines({1: stopped}))


def test_the_closing_line_tells_what_follows() -> None:
    """The job goes on, and how it is stopped."""
    assert stack_lines.closing("/l/stacks.txt", 2.0) == (
        "all stacks: /l/stacks.txt; the job goes on (a second SIGQUIT within 2 s stops it)"
    )
    assert "--log-dir" in stack_lines.closing("", 2.0)
    assert (
        stack_lines.overdue({0: Dump(_LOADS)}, "")
        == "not stopped yet, SIGKILL follows: rank 0 is in load_batch (data.py:41)"
    )
    assert stack_lines.overdue({0: Dump(_LOADS)}, "/l/s").endswith(" (all stacks: /l/s)")


def test_files_of_stacks_are_never_overwritten(tmp_path: Path) -> None:
    """Each moment has its own file."""
    paths = [write_stacks(str(tmp_path), {0: Dump(_LOADS)}) for _ in range(3)]
    assert [Path(path).name for path in paths] == ["stacks.txt", "stacks.1.txt", "stacks.2.txt"]
    text = render_stacks({1: Dump(problem="is stopped", details="thread 7"), 0: Dump(_LOADS)}, "now")
    assert text == f"Stacks of 2 workers, now\n\n=== rank 0\n{_LOADS}\n=== rank 1: is stopped\nthread 7\n"


def test_a_full_disk_leaves_no_empty_file(tmp_path: Path) -> None:
    """The error comes out; a file of nothing would look like stacks."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_stacks(str(tmp_path), {0: Dump(problem="is stopped")})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_each_thread_is_described_as_the_kernel_shows_it() -> None:
    """Where Python answers nothing, there is a line for each thread of the process, with its number and state."""
    end = threading.Event()
    helper = threading.Thread(target=end.wait)
    helper.start()
    try:
        text = describe_threads(os.getpid())
    finally:
        end.set()
        helper.join()
    threads = [line for line in text.splitlines() if not line.startswith(" ")]
    assert any(line.startswith(f"thread {os.getpid()} (") and " state R" in line for line in threads)
    assert any(line.startswith(f"thread {helper.native_id} (") for line in threads)

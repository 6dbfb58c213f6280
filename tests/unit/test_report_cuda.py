"""The report of a failure on a GPU leaves out the advice that torch writes below every CUDA error."""

from __future__ import annotations

from elastic_run.report import render
from tests.support.job_results import captured, result, stopped, worker_end


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

"""What helps against the failures that everybody meets."""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.failure.diagnose import find_rule
from elastic_run.core.failure.root_cause import ExceptionText, OomKills
from elastic_run.report.closing_report import render
from elastic_run.report.failure_rules import built_in_rules, read_rules
from elastic_run.report.text import wrap
from tests.support.job_results import captured, explained, result, worker_end

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_run.core.failure.job_result import JobResult


def raised(name: str, message: str = "") -> JobResult:
    """Return a job that ended with an exception."""
    return result(worker_end(0, 1, exception=ExceptionText(name, message)))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (result(worker_end(0, -9)), "dmesg | grep -i oom"),
        (result(worker_end(0, 137)), "dmesg | grep -i oom"),
        (result(worker_end(0, -9, oom_kills=OomKills(1, 3))), "ask for more memory"),
        (result(worker_end(0, -9, oom_kills=OomKills(0, 1))), "dmesg | grep -i oom"),
        (result(worker_end(0, -9, oom_kills=OomKills(None, 0))), "The kernel's OOM killer did not do this"),
        (result(worker_end(0, -9, oom_kills=OomKills(None, 0))), "a limit of CPU time (`ulimit -Ht`)"),
        (result(worker_end(0, -9, oom_kills=OomKills(None, None))), "shows whether it was the kernel"),
        (result(worker_end(0, -7)), "--shm-size"),
        (result(worker_end(0, 1, captured("dataloader_killed"))), "--ipc=host"),
        (result(worker_end(0, -11)), "PYTHONFAULTHANDLER=1"),
        (result(worker_end(0, -11, captured("segv"))), "below that line"),
        (result(worker_end(0, -11, captured("value_error"))), "Native code crashed. PYTHONFAULTHANDLER=1"),
        (raised("ConnectionResetError", "[Errno 104] Connection reset by peer"), "If it is a server"),
        (raised("r.ConnectionError", "('Connection aborted.', ConnectionResetError(104, 'x'))"), "If it is a server"),
        (result(worker_end(0, -6)), "PYTHONFAULTHANDLER=1"),
        (result(worker_end(0, -6, captured("thread_at_end"))), "torch.distributed.nn"),
        (result(worker_end(0, -15)), "did not send SIGTERM"),
        (result(worker_end(0, -10)), "no handler for it"),
        (result(worker_end(0, 1, captured("cuda_out_of_memory"))), "nvidia-smi"),
        (result(worker_end(0, 1, captured("port_taken"))), "ss -ltnp"),
        (result(worker_end(0, -6, captured("nccl_watchdog"))), "did not time out"),
        (result(worker_end(0, 1, captured("gloo_peer_failed"))), "lost a peer"),
        (result(worker_end(0, 1, captured("clients_missing"))), "init_process_group"),
        (result(worker_end(0, 2, captured("missing_script"))), "script is not there"),
        (result(worker_end(0, 1, captured("no_module"))), "PYTHON_EXEC"),
        (result(worker_end(0, 2, captured("usage"))), "LOCAL_RANK"),
        (result(worker_end(0, 1, captured("thread"))), "df -h"),
        (result(worker_end(0, 126)), "chmod +x"),
        (result(worker_end(0, 127)), "PATH"),
        (raised("ModuleNotFoundError", "No module named 'x'"), "PYTHONPATH"),
        (raised("ImportError", "libcudnn.so.9: cannot open shared object file"), "LD_LIBRARY_PATH"),
        (raised("ImportError", "cannot import name 'x' from 'y'"), "version"),
        (raised("ImportError", "cannot import name 'x' from partially initialized module 'y'"), "rename"),
        (raised("RuntimeError", "CUDA error: invalid device ordinal"), "--nproc-per-node"),
        (raised("DistBackendError", "Duplicate GPU detected : rank 0 and rank 1"), "LOCAL_RANK"),
        (raised("OSError", "[Errno 24] Too many open files"), "ulimit -n"),
        (raised("MemoryError"), "memory is full"),
        (result(verdict="not_found", exit_code=127), "relative path"),
        (result(verdict="not_executable", exit_code=126), "chmod +x"),
        (
            result(verdict="not_executable", exit_code=126, detail="x is not in a format that can be executed"),
            "another processor",
        ),
        (result(worker_end(0, 1), verdict="unkillable_worker", exit_code=203), "dmesg"),
        (result(verdict="cannot_start", exit_code=204), "ulimit -a"),
        *(
            (
                result(verdict="cannot_start", exit_code=204, detail=f"x can't be started: {OSError(number, said)}"),
                help_,
            )
            for number, said, help_ in (
                (errno.ENOSPC, "No space left on device", "df -h"),
                (errno.EDQUOT, "Disk quota exceeded", "quota"),
                (errno.EROFS, "Read-only file system", "read-only"),
                (errno.EACCES, "Permission denied", "ls -ld"),
                (errno.ENOTDIR, "Not a directory", "a directory is needed"),
                (errno.E2BIG, "Argument list too long", "into a file"),
                (errno.EMFILE, "Too many open files", "ulimit -n"),
                (errno.EMFILE, "1 worker needs 28 file descriptors here, but only 16 are allowed", "ulimit -n` shows"),
                (errno.ENFILE, "Too many open files in system", "fs.file-max"),
                (errno.ENOMEM, "Cannot allocate memory", "ulimit -v"),
                (errno.EAGAIN, "Resource temporarily unavailable", "ulimit -u"),
                (errno.EADDRNOTAVAIL, "can't listen on 192.0.2.1: Cannot assign requested address", "ip addr"),
            )
        ),
        (
            result(
                verdict="cannot_start",
                exit_code=204,
                detail="no program: no directory for temporary files can be written to",
            ),
            "TMPDIR, /tmp and /var/tmp",
        ),
        (result(verdict="internal_error", exit_code=205), "report"),
        (result(verdict="rendezvous", exit_code=201), "elastic-run doctor"),
        (
            result(
                verdict="rendezvous",
                exit_code=201,
                detail="the store at e:2379 could not be reached for 20 s: etcd at e:2379: database space exceeded",
            ),
            "etcd answers",
        ),
        (result(verdict="nodes_lost", exit_code=206), "lost nodes"),
        (result(verdict="refused", exit_code=208), "same flags, script, token"),
        (
            result(verdict="refused", exit_code=208, detail="--node-rank=1 was given to two nodes: a and b"),
            "of its own",
        ),
    ],
)
def test_a_well_known_cause_has_its_remedy(job: JobResult, words: str) -> None:
    """The advice names the command, flag or variable that helps, in three lines at most."""
    text = job.advice
    assert text is not None
    assert words in text
    assert "..." not in "".join(wrap(text, 71, 3)).replace("(..., find", "")
    lines = render(job, width=60)
    assert text.split() == " ".join(line[9:] for line in lines).split()[-len(text.split()) :]


@pytest.mark.parametrize(
    "job",
    [
        raised("ValueError", "loss is not finite"),
        result(worker_end(0, 3)),
        result(worker_end(0, -16)),
        result(verdict="signal", signal=15, exit_code=143),
        result(verdict="store_lost", exit_code=207),
    ],
)
def test_no_advice_is_better_than_a_guess(job: JobResult) -> None:
    """A failure without a well-known cause has none."""
    assert job.advice is None


#: Real texts: torch 2.13 on a file that was cut and on another model, the kernel, NCCL (2.28.9 over sockets), torch's
#: debug level DETAIL, torch 2.11 with CUDA 13.0 on an H100.
_REAL_TEXTS = {
    "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory.": "cut short",
    "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534\ncaused by RuntimeError: "
    "basic_ios::clear: iostream error": "most often full",
    "RuntimeError: [enforce fail at inline_container.cc:588] . PytorchStreamWriter failed writing file data/2: file "
    "write failed": "most often full",
    "RuntimeError: unable to allocate shared memory(shm) for file </torch_14516_203864758_0>: No space left on device "
    "(28)": "--shm-size",
    "RuntimeError: unable to write to file </torch_33_1719583_9>: No space left on device (28)": "--shm-size",
    "RuntimeError: Error(s) in loading state_dict for Linear:\n\tsize mismatch for weight": "another model",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": "defective",
    "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', GPU has fallen off the bus.": "nvidia-smi -q",
    "NCCL WARN Mismatched NCCL version detected : rank 1 version 22705 rank 0 version 22304": "each node",
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running": "--flight-recorder",
    "NET/Socket : peer 192.0.2.2<36140> message truncated : receiving 524288 bytes instead of 65536.": "on the rank",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4096.00 GiB. GPU 0 has a total capacity": "batch",
    "torch.AcceleratorError: CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in": "index",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered": "CUDA_LAUNCH_BLOCKING=1",
    "torch.AcceleratorError: CUDA error: invalid device ordinal\nGPU device may be out of range": "--nproc-per-node",
    "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 60": "set_device",
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing": "'spawn'",
}


@pytest.mark.parametrize(("text", "words"), _REAL_TEXTS.items())
def test_a_rule_knows_the_real_text(text: str, words: str) -> None:
    """Each rule fits the text that the program really writes."""
    rule = find_rule(built_in_rules(), text)
    assert rule is not None
    assert words in rule.help


def test_a_rule_of_the_user_comes_first(tmp_path: Path) -> None:
    """A file of --failure-rules is asked before the rules of elastic-run, and the report shows what it says."""
    path = tmp_path / "rules.toml"
    path.write_text('[[rule]]\nmatch = "Errno 28"\nhelp = "Ask Anna."\n', encoding="utf-8")
    job = raised("OSError", "[Errno 28] No space left on device")
    assert "df -h" in (job.advice or "")
    (job.rule,) = read_rules(str(path))
    assert explained(job).advice == "Ask Anna."
    assert render(job)[-1] == "hint     Ask Anna."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rules.toml: there is no [[rule]], a table with match and help"),
        ("# mine\nx = 1", "rules.toml: 'x' is not a key outside of rules; each rule begins with [[rule]]"),
        ('\n[[ "rules" ]]\nmatch = "a"', "rules.toml: 'rules' is not a key outside of rules; each rule begins"),
        ("rule = []\n[a.b]", "rules.toml: 'a' is not a key outside of rules"),
        ("rule = [1]", "rules.toml, rule 1: the rule's help is missing"),
        ("[[rule]]\nmatch = [", "rules.toml: is not TOML"),
        (
            '[[rule]]\nmatch = "a"\nhelp = "b"\n\n[[rule]]\nmatch = "c"\n',
            "toml, rule 2: the rule's help is missing",
        ),
        ('\n[[rule]]\nmatch = "("\nhelp = "b"\n', "rules.toml, rule 1: match is not a regular expression"),
        (
            '[[rule]]\nmatch = "a"\nhelp = "b"\ndecision = "stp"',
            "rules.toml, rule 1: the rule's decision is 'stp', which is none",
        ),
        (
            '[[rule]]\nmatch = "a"\nhelp = "b"\ndecision = 1',
            "rules.toml, rule 1: the rule's decision is missing, empty or no",
        ),
        ('[[rule]]\nmatch = "a"\nhelp = "b"\nmacth = "c"\n', "rules.toml, rule 1: 'macth' is not a key of a rule"),
        ('[[rule]]\nmatch = "a"\nhelps = "b"\n', "rules.toml, rule 1: 'helps' is not a key of a rule"),
        ("rule = " + "[" * 100_000, "rules.toml: its lists or tables are nested too deeply"),
        ("\n" + "a." * 100_000 + "a = 1", "rules.toml:2: the line has more than 100 dots"),
        (
            f'[[rule]]\nmatch = "{"(" * 5_000}{")" * 5_000}"\nhelp = "b"',
            "rules.toml, rule 1: match is not a regular expression",
        ),
        ('[[rule]]\nmatch = "a{99999999999}"\nhelp = "b"', "rules.toml, rule 1: match is not a regular expression"),
    ],
)
def test_an_error_in_a_file_of_rules_names_the_rule(text: str, message: str, tmp_path: Path) -> None:
    """A wrong rule is refused in one line with file, number and reason."""
    path = tmp_path / "rules.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_rules(str(path))
    assert "\n" not in str(caught.value)

"""What elastic-run does unlike torchrun on purpose, as the parity tests see it: a list that is read before it grows.

Each entry says in which case of the matrix it shows, and where users read about it. Whatever differs and is covered by
none of them is a defect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.parity.matrix import Case

#: Stands for what was not seen at all.
ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    """One thing in which elastic-run differs from torchrun on purpose.

    Args:
        name: What it is.
        reason: Why.
        documented: Words in docs/migrating-from-torchrun.md that tell users.
        seen_in: A case of the matrix in which it shows.
        covers: Tells from a case, a key and what was seen under torchrun and elastic-run, whether this is it.
    """

    name: str
    reason: str
    documented: str
    seen_in: str
    covers: Callable[[Case, str, Any, Any], bool]


def _values(*endings: str, torchrun: object, elastic_run: object) -> Callable[[Case, str, Any, Any], bool]:
    """Make a `covers` for keys with some endings that have one value under each launcher."""
    return lambda _case, key, theirs, ours: key.endswith(endings) and (theirs, ours) == (torchrun, elastic_run)


def _is_exit_code(case: Case, key: str, theirs: object, ours: object) -> bool:
    return key == "exit code" and theirs == 1 and ours == case.exit_code


def _is_of_worker(case: Case, key: str, theirs: object, ours: object) -> bool:
    return _is_exit_code(case, key, theirs, ours) and ours not in {2, 143}


def _is_of_stop(case: Case, key: str, theirs: object, ours: object) -> bool:
    return _is_exit_code(case, key, theirs, ours) and case.stops and ours == 143


def _is_of_usage(case: Case, key: str, theirs: Any, ours: Any) -> bool:
    if key == "launcher's lines on stderr":
        return bool(theirs) and len(ours) == 1 and ours[0].startswith("elastic-run: error: ")
    return _is_exit_code(case, key, theirs, ours) and ours == 2


def _is_report(_case: Case, key: str, theirs: Any, ours: Any) -> bool:
    if key != "launcher's lines on stderr" or not any(re.search("ChildFailedError|SignalExc", line) for line in theirs):
        return False
    start = next((number for number, line in enumerate(ours) if line.startswith("-- elastic-run: ")), len(ours))
    return 0 < len(ours) - start <= 25 and not any("elastic_run/run.py" in line for line in ours)


def _is_restart(_case: Case, key: str, theirs: Any, ours: Any) -> bool:
    if key != "launcher's lines on stderr" or not any("closing signal SIGTERM" in line for line in theirs):
        return False
    return len(ours) == 1 and ours[0].startswith("elastic-run: ") and "restart 1 of 2" in ours[0]


def _is_threads_notice(_case: Case, key: str, theirs: Any, ours: Any) -> bool:
    if key != "notice of threads":
        return False
    # The banner begins with an empty line, which may have the prefix of torch's log. A line of torchrun's own workers
    # may tear, and leave another one.
    return len([line for line in theirs if line.rpartition("] ")[2]]) == 3 and len(ours) == 1


def _is_notice_of_flags(_case: Case, key: str, theirs: Any, ours: Any) -> bool:
    is_line = key == "launcher's lines on stderr" and theirs == [] and len(ours) == 1
    return is_line and "behind the script, so" in ours[0]


def _is_stack_pipe(_case: Case, key: str, theirs: object, ours: object) -> bool:
    if key.endswith(": env ELASTIC_RUN_STACK_PIPE"):  # a worker in Python removes it
        return theirs == ABSENT
    return key.endswith(": descriptors above 2") and isinstance(theirs, int) and ours == 1


def _is_place_of_files(case: Case, key: str, theirs: Any, ours: Any) -> bool:
    if key != "launcher's lines on stderr" or "--tee" not in " ".join(case.arguments):
        return False
    return theirs == [] and len(ours) == 1 and ours[0].startswith("elastic-run: the log files are in ")


def _is_token(_case: Case, key: str, theirs: object, ours: object) -> bool:
    return key.endswith(": env ELASTIC_RUN_TOKEN") and theirs == ABSENT and isinstance(ours, str)


def _keeps_output(case: Case) -> bool:
    """Whether a log directory is given, and nothing about its files."""
    text = " ".join(case.arguments)
    return re.search("--log[-_]dir", text) is not None and not re.search(r"-(?:-tee|-redirects|t|r)[ =]?\d", text)


def _shares_stdout(case: Case) -> bool:
    """Whether workers share stdout with stderr, or with each other."""
    words = (*case.arguments, *(f"{name}={value}" for name, value in case.env.items()))
    has_several = re.search(r"(?i)nproc[-_]per(?:[-_]node)?[ =][2-9]", " ".join(words)) is not None
    return case.is_merged or case.on_terminal or has_several


def _is_own_file(case: Case, key: str, theirs: Any, ours: Any) -> bool:
    kept = ("/stdout.log", "/stderr.log") if _keeps_output(case) else ()
    own = ("/failure.json", "/events.jsonl", "/latest", *kept)
    return key == "log files" and [path for path in ours if not path.endswith(own)] == theirs


def _is_kept_output(case: Case, key: str, theirs: object, ours: object) -> bool:
    """Shown output passes through the launcher, and output of ranks that are not shown goes to files."""
    fact = key.rpartition(": ")[2]
    return _keeps_output(case) and (
        (theirs == ABSENT and key.endswith((".log", ".log: ")))
        or (fact == "stdout is the launcher's" and (theirs, ours) == (True, False))
        or (fact in {"stdout kind", "stderr kind"} and (theirs, ours) == ("character device", "file"))
    )


def _is_parent_error(case: Case, key: str, theirs: Any, ours: Any) -> bool:
    return key == "parent's error file" and theirs is None and ours["message"]["errorCode"] == case.exit_code


def _is_nohup(_case: Case, key: str, theirs: Any, ours: Any) -> bool:
    return key.endswith(": ignored signals") and sorted({"SIGHUP", *theirs}) == sorted(ours)


def _is_run_path(case: Case, key: str, _theirs: object, ours: object) -> bool:
    """What tells a command of ours from a function in a process that torch's multiprocessing has spawned."""
    expected = {
        "descriptors above 2": 0,
        "caught signals": ["SIGINT"],
        "leads group": True,
        "leads session": True,
        "unbuffered": True,
    }
    fact = key.partition(": ")[2]
    return "--run-path" in case.arguments and (fact == "original argv" or expected.get(fact) == ours)


#: All of them. A new one needs a reason, and a line for users.
DIFFERENCES = (
    Difference(
        name="exit code of the worker",
        reason="a scheduler can decide by it",
        documented="the exit code of the worker that failed first; 128+n if signal n ended it",
        seen_in="fails with 7",
        covers=_is_of_worker,
    ),
    Difference(
        name="exit code after SIGTERM",
        reason="that is what a stopped program returns",
        documented="stopped by SIGTERM: a traceback, 1 | 143",
        seen_in="stopped",
        covers=_is_of_stop,
    ),
    Difference(
        name="bad input",
        reason="law 10: one line, exit 2, nothing started",
        documented="one line that names flag, value and allowed values; exit code 2; nothing is started",
        seen_in="wrong size",
        covers=_is_of_usage,
    ),
    Difference(
        name="report",
        reason="law 10: the cause is among at most 25 lines, and there is no traceback of the launcher",
        documented="traceback of the launcher, then a box; no cause without `@record` | at most 25 lines",
        seen_in="fails with 1",
        covers=_is_report,
    ),
    Difference(
        name="word of a restart",
        reason="the report replaces torch's log lines",
        documented="traceback of the launcher, then a box; no cause without `@record` | at most 25 lines",
        seen_in="restarted",
        covers=_is_restart,
    ),
    Difference(
        name="files of its own",
        reason="the reports for programs, and a link to the newest run",
        documented="also as [failure.json](failure-json.md)",
        seen_in="fails with 7",
        covers=_is_own_file,
    ),
    Difference(
        name="kept output",
        reason="whoever names a log directory looks for logs in it",
        documented="`--log-dir` without `--tee` and `--redirects` keeps error files only | it keeps a copy of all",
        seen_in="some ranks",
        covers=_is_kept_output,
    ),
    Difference(
        name="place of the files",
        reason="nobody finds a directory of a random name",
        documented="`--tee` without `--log-dir` does not say where its files are | the launcher's last line names",
        seen_in="prefix",
        covers=_is_place_of_files,
    ),
    Difference(
        name="parent's error file without @record",
        reason="the launcher above learns the cause, which needs no @record here",
        documented="the parent's `TORCHELASTIC_ERROR_FILE` is written only if the worker had `@record`",
        seen_in="parent's error file without a record",
        covers=_is_parent_error,
    ),
    Difference(
        name="run id with --standalone",
        reason="the user finds the job by the id that the user gave",
        documented="`--standalone` replaces the id of `--rdzv-id` by a random one | the id is kept",
        seen_in="standalone",
        covers=_values("env TORCHELASTIC_RUN_ID", torchrun="$ID", elastic_run="mine"),
    ),
    Difference(
        name="notice of threads",
        reason="a banner drowns what matters",
        documented="a banner of five lines about `OMP_NUM_THREADS` | one line",
        seen_in="standalone",
        covers=_is_threads_notice,
    ),
    Difference(
        name="notice of flags behind the script",
        reason="whoever writes a launcher's flag there mostly means the launcher",
        documented="a flag of the launcher behind the script goes to the script, without a line | with a line",
        seen_in="launcher's flags behind the script",
        covers=_is_notice_of_flags,
    ),
    Difference(
        name="a store for each round",
        reason="law 7: a late worker must not meet keys of the last round",
        documented="every round has a fresh store on a fresh port, unless `--master-port` fixes it",
        seen_in="restarted",
        covers=_values("addresses of all attempts", torchrun=1, elastic_run=2),
    ),
    Difference(
        name="loopback by name",
        reason="the store of a single node listens on loopback only",
        documented="on one node `MASTER_ADDR` is what `--master-addr` says | `localhost`",
        seen_in="old front door, old flags",
        covers=_values(": env MASTER_ADDR", torchrun="127.0.0.1", elastic_run="localhost"),
    ),
    Difference(
        name="token",
        reason="law 6: a descendant that left the session is found by it",
        documented="workers also get `ELASTIC_RUN_TOKEN`",
        seen_in="plain",
        covers=_is_token,
    ),
    Difference(
        name="pipe for stacks",
        reason="the launcher shows where a worker is, without ptrace",
        documented="workers also have descriptor 900",
        seen_in="plain",
        covers=_is_stack_pipe,
    ),
    Difference(
        name="nohup",
        reason="a job under nohup must survive the terminal",
        documented=(
            "SIGHUP ends the job also under `nohup`, which makes programs ignore it | a signal that was ignored at the "
            "start stays ignored"
        ),
        seen_in="nohup",
        covers=_is_nohup,
    ),
    Difference(
        name="stderr through the launcher",
        reason="the report shows its end",
        documented="the workers' stderr goes straight to the console | it passes through the launcher unchanged",
        seen_in="plain",
        covers=_values(": stderr is the launcher's", torchrun=True, elastic_run=False),
    ),
    Difference(
        name="stdout on stderr's way",
        reason="where both are one file, as under 2>&1 and on a terminal, one way keeps their order",
        documented="stdout does the same in [some cases](output-and-logs.md#what-you-can-rely-on)",
        seen_in="streams merged",
        covers=lambda case, key, theirs, ours: (
            key.endswith(": stdout is the launcher's") and theirs and not ours and _shares_stdout(case)
        ),
    ),
    Difference(
        name="stderr of ranks that are not shown",
        reason="the report shows its end all the same",
        documented="the workers' stderr goes straight to the console | it passes through the launcher unchanged",
        seen_in="some ranks",
        covers=lambda case, key, theirs, ours: (
            case.name == "some ranks"
            and ((key.endswith(": stderr kind") and ours == "pipe") or (key.endswith(": stderr is stdout") and theirs))
        ),
    ),
    Difference(
        name="tee through a pipe",
        reason="nothing is cut, lost or late",
        documented="`--tee` follows the file, with a delay; lines can be cut, lost or repeated",
        seen_in="tee",
        covers=_values(": stdout kind", ": stderr kind", torchrun="file", elastic_run="pipe"),
    ),
    Difference(
        name="temporary files",
        reason="nobody asked for them",
        documented="without `--log-dir` files pile up in the temporary directory",
        seen_in="plain",
        covers=_values("left in TMPDIR", torchrun=["torchelastic_$RANDOM"], elastic_run=[]),
    ),
    Difference(
        name="--run-path",
        reason="there is no torch to spawn a function with: the script gets an interpreter and a session of its own",
        documented="`--run-path` calls the script as a function, in a process that multiprocessing has spawned",
        seen_in="run path",
        covers=_is_run_path,
    ),
)

"""The end of a job, and from its evidence the causes, the likeliest first. Pure, and imported only after a failure.

Rules
- A failure of a worker's own, by `severity`, is the cause. The kernel's log, else the OOM killer's counters, show where
  a SIGKILL came from.
- If all failures are of a lost peer, the cause is elsewhere: at nodes that the job has lost, at a rank that had ended
  with code 0 while the others went on, at the rank that the flight recorder names, or at a rank that did not stop and
  waited for nobody. A rank that had ended and that the flight recorder names, too, comes first.
- A flight recorder that has not seen all ranks of the job accuses nobody above the failure itself.
- Different versions of torch on the nodes are possible causes of any failure: they are reported beside it.
- Failures that are equal (`has_equal_error`) are one cause of several ranks.

Sources of the kernel's lines: mm/oom_kill.c, arch/x86/mm/fault.c, arch/x86/kernel/traps.c, arch/arm64/kernel/traps.c,
and NVIDIA's list of Xid errors. The kernel logs a crash with the number of the thread, which is the pid in the main
thread only.
"""

from __future__ import annotations

import re
from signal import SIGKILL, SIGUSR1, SIGUSR2, Signals

from elastic_run.contract import HANG
from elastic_run.core.failure.job_result import Cause
from elastic_run.core.failure.root_cause import has_equal_error, has_lost_rank, is_secondary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elastic_run.core.failure.job_result import JobResult, Rule
    from elastic_run.core.failure.root_cause import WorkerEnd

# Kinds of causes.
EXCEPTION = "exception"
END = "end"
OOM_KILL = "oom_kill"
GPU_DEFECT = "gpu_defect"
LOG_DISK_FULL = "log_disk_full"
OTHER_VERSION = "other_version"
EARLY_EXIT = "early_exit"
STUCK = "stuck"
HUNG = "hang"
NODE_EVENT = "node_event"
COLLECTIVE = "collective"
LOST_PEER = "lost_peer"
#: Kind of a rule, not of a cause: the program meets at another address than that of the job's store.
OWN_ADDRESS = "own_address"
#: Verdicts whose detail says which nodes are lost, or why this node has to go.
_OF_NODES = frozenset(("nodes_lost", "excluded", "unhealthy"))
#: Verdicts against which something helps, whatever a worker has failed of.
_OF_LAUNCHER = frozenset(("cannot_start", "unkillable_worker"))
#: How far a cause is proved, the surest first.
CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"


def explain(result: JobResult, rules: Sequence[Rule] = ()) -> JobResult:
    """Fill in the causes of a job that has not succeeded, and what helps; `rules` are those of elastic-run."""
    result.causes = diagnose(result, rules)
    if result.root is not None and result.verdict not in _OF_LAUNCHER:
        result.advice = result.causes[0].help or None
    elif result.root is not None or result.signal is None:
        of_verdict = (rule for rule in rules if rule.cause == result.verdict and re.search(rule.match, result.detail))
        result.advice = next((rule.help for rule in of_verdict), None)
    return result


#: Characters of a text in which a rule's expression is searched for.
_MOST = 8 * 1024
#: The address at which a client of torch's store has found nobody.
_UNANSWERED = re.compile(r"client socket has [^()\n]*\([^()\n]*, (\d{1,5})\)")


def diagnose(result: JobResult, rules: Sequence[Rule] = ()) -> tuple[Cause, ...]:
    """Return the causes of a job's end, the likeliest first."""
    root = result.root
    event = (Cause(NODE_EVENT, (), CERTAIN, (result.detail,)),) if result.verdict in _OF_NODES and result.detail else ()
    if root is None:
        return (*event, *_collective(result, LIKELY))
    versions = (Cause(OTHER_VERSION, (), POSSIBLE, (result.versions,)),) if result.versions else ()
    if not has_lost_rank(root):
        own = (_own_failure(root, result, rules),)
        first = (*event, *own) if is_secondary(root) else (*own, *event)
        return (*first, *versions, *_collective(result, POSSIBLE))
    ended = (each.rank for each in result.ends if _ended_early(each, root))
    early = _elsewhere(EARLY_EXIT, ended, "exit code 0 while the others went on")
    places = result.stuck if result.stuck is not None else _find_stuck(result.ends)
    stuck = _elsewhere(STUCK, places, "it did not stop, and its stacks show no wait for others")
    collective = _collective(result, LIKELY)
    accused = {rank for cause in collective for rank in cause.ranks}
    names_early = bool(accused & {rank for cause in early for rank in cause.ranks})
    elsewhere = [*early, *collective] if names_early else [*collective, *early]
    return (*event, *elsewhere, *stuck, _own_failure(root, result, rules), *versions)


def find_rule(rules: Sequence[Rule], said: str, kind: str = "") -> Rule | None:
    """Return the first rule that fits, or None."""
    return next((rule for rule in rules if rule.cause in ("", kind) and re.search(rule.match, said)), None)


def last_words(end: WorkerEnd) -> str:
    """Return the text in which rules are searched for.

    It is the worker's exception, else the end of its stderr, and the line of the kernel's log.
    """
    exception = end.certain_exception
    if exception is None:
        said = "\n".join(end.stderr_tail)[-_MOST:]
    else:
        said = f"{exception.type}: {exception.message[:_MOST]}\n{exception.cause}"
    return f"{said}\n{end.kernel_line}" if end.kernel_line else said


def _ended_early(end: WorkerEnd, root: WorkerEnd) -> bool:
    return end.exitcode == 0 and not end.was_stopped and end.uptime < root.uptime


def is_stuck(end: WorkerEnd) -> bool:
    """Whether a worker did not stop, and waited for nobody."""
    return end.stuck_at is not None and not end.stuck_at.is_waiting


def has_failed(end: WorkerEnd) -> bool:
    """Whether a worker failed by itself."""
    return end.exitcode != 0 and not end.was_stopped


def _find_stuck(ends: Sequence[WorkerEnd]) -> list[int]:
    """Return the ranks that did not stop and waited for nobody.

    If those are as many as the ranks that failed, or more, only those count that had been there before the stop: many
    workers that do not stop are busy with the stop itself. They save a checkpoint, for example.
    """
    stuck = [end for end in ends if is_stuck(end)]
    if len(stuck) >= sum(map(has_failed, ends)):
        stuck = [end for end in stuck if end.is_unmoved]
    return [end.rank for end in stuck]


def _own_failure(root: WorkerEnd, result: JobResult, rules: Sequence[Rule]) -> Cause:
    alike = (end.rank for end in result.ends if end.rank != root.rank and has_equal_error(end, root))
    ranks = (root.rank, *sorted(alike))
    if result.is_log_disk_full:
        return Cause(LOG_DISK_FULL, ranks, LIKELY, ("nothing more fits on the disk of the log files",), _LOG_DISK_FULL)
    kind, confidence, why = _classify(root)
    said = last_words(root)
    unanswered = _UNANSWERED.search(said)  # a client has waited at another port than that of the store
    meets_elsewhere = unanswered is not None and result.store_port not in (None, int(unanswered[1]))
    if result.rule is not None:
        return Cause(kind, ranks, confidence, why, result.rule.help)
    if kind == OOM_KILL:
        return Cause(kind, ranks, confidence, why, _OOM[confidence][1])
    rule = find_rule(rules, f"{said}\n{_describe_end(root)}", OWN_ADDRESS if meets_elsewhere else kind)
    return Cause(kind, ranks, confidence, why, "" if rule is None else rule.help)


def _describe_end(end: WorkerEnd) -> str:
    """Return how a worker ended, in the words of the rules for ends that say nothing but their number."""
    if end.signal is None:
        return f"ended with exit code {end.exitcode}"
    name = {each.value: each.name for each in Signals}.get(end.signal, str(end.signal))
    if end.signal == SIGKILL and end.oom_kills is not None and end.oom_kills.machine == 0:
        return f"ended by {name}, without a kill by the OOM killer"
    return f"ended by {name}{', passed on' if end.signal in (SIGUSR1, SIGUSR2) and end.remark else ''}"


def _classify(root: WorkerEnd) -> tuple[str, str, tuple[str, ...]]:
    """Return kind, confidence and reasons of a worker's failure."""
    logged = (f"the kernel's log: {root.kernel_line}",) if root.kernel_line else ()
    if is_oom_kill(root.kernel_line):
        return OOM_KILL, CERTAIN, logged
    if is_gpu_defect(root.kernel_line):
        return GPU_DEFECT, LIKELY, logged
    if has_lost_rank(root):
        return LOST_PEER, POSSIBLE, ("its error is typical of a rank that has lost a peer",)
    if root.exception is not None:
        is_hang, is_certain = root.exception.type == HANG, root.exception.is_certain
        why = ("no rank made progress", "its stacks at two moments are equal")
        said = ("the exception at the end of its stderr", *logged)
        kind = HUNG if is_hang else EXCEPTION
        return kind, CERTAIN if is_certain and not is_hang else LIKELY, why if is_hang else said
    kills = root.oom_kills
    if root.signal == SIGKILL and kills is not None and (kills.group or kills.machine):
        confidence = CERTAIN if kills.group else LIKELY
        return OOM_KILL, confidence, ("SIGKILL", _OOM[confidence][0])
    return END, CERTAIN, ("its exit status", *logged)


def _elsewhere(kind: str, ranks: Iterable[int], why: str) -> tuple[Cause, ...]:
    """Return a cause at ranks of which the others have lost each other, if there are any."""
    found = tuple(sorted(ranks))
    return (Cause(kind, found, LIKELY, (why, "all failures are of a lost peer")),) if found else ()


def _collective(result: JobResult, confidence: str) -> tuple[Cause, ...]:
    found = result.recorder
    if found is None or not found.ranks or not found.is_whole_job:
        return ()
    return (Cause(COLLECTIVE, found.ranks, confidence, ("the dumps of the flight recorder",)),)


# --- the kernel's log -------------------------------------------------------------------------------------------------
#: ILL, TRAP, ABRT, BUS, FPE, KILL, SEGV.
_CRASHES = frozenset((4, 5, 6, 7, 8, 9, 11))
#: Xid errors of a GPU, its memory or its link: double-bit errors, failed repairs, NVLink errors, a GPU that fell off
#: the bus, no answer of its GSP. Others, such as 13, 31 and 43, are mostly errors of the program.
_DEFECTS = frozenset((48, 63, 64, 74, 79, 94, 95, 110, 119, 120, 140))
_OOM_KILL = re.compile(r"\bKilled process (\d+)\b")
_CRASH = re.compile(r"\[(\d+)\]:? (?:segfault at|trap |general protection|unhandled )")
_XID = re.compile(r"\bNVRM: Xid \([^)]*\): (\d+),")
_GPU = re.compile(r"CUDA|NCCL|cuDNN|NVML|\bGPU\b", re.IGNORECASE)
#: A process of the worker whose death the worker tells: `DataLoader worker (pid 4711) is killed by signal: Killed`.
_CHILD = re.compile(r"\bpid(?:\(s\))?:? (\d+)")


def may_tell(end: WorkerEnd, words: str) -> bool:
    """Whether the kernel's log may say something of a worker's failure."""
    return end.signal in _CRASHES or _GPU.search(words) is not None or _CHILD.search(words) is not None


def find_line(end: WorkerEnd, words: str, lines: Sequence[str], *, has_own_pids: bool) -> str:
    """Return the line that tells the cause of a worker's failure, or ""."""
    pids = {str(end.pid), *_CHILD.findall(words)} if has_own_pids else frozenset[str]()
    for pattern in (_OOM_KILL, _CRASH):
        for line in lines:
            found = pattern.search(line)
            if found is not None and found[1] in pids:
                return line
    is_of_gpu = end.signal in _CRASHES or _GPU.search(words) is not None
    return next(filter(is_gpu_defect, lines), "") if is_of_gpu else ""


def is_oom_kill(line: str) -> bool:
    """Whether a line tells a kill by the OOM killer."""
    return _OOM_KILL.search(line) is not None


def is_gpu_defect(line: str) -> bool:
    """Whether a line tells a defect of a GPU, rather than an error of the program that used it."""
    found = _XID.search(line)
    return found is not None and int(found[1]) in _DEFECTS


# --- hints for causes that no rule is for -----------------------------------------------------------------------------
#: A kill by the OOM killer, by how far it is proved: what the report says of it, and what helps.
_OOM = {
    CERTAIN: (
        "the kernel's OOM killer ended it: the job's memory limit is reached",
        "Use a smaller batch or fewer DataLoader workers, or ask for more memory.",
    ),
    LIKELY: (
        "meanwhile the kernel's OOM killer ended a process on this machine",
        "Use less memory, or ask for more. To be sure: `dmesg | grep -i oom`",
    ),
}
_LOG_DISK_FULL = (
    "The disk of the log directory is full, and a worker whose output is redirected there fails when it prints: "
    "`df -h` shows the disk, --log-dir chooses another."
)

"""The job's history: how each round ended, as lines while the job runs and as a result for the report.

Most modules that it needs are imported when there is something to report, so that no worker waits for them.
"""

from __future__ import annotations

import os
import time

from elastic_run.agent.script_name import program_name
from elastic_run.core.agent import machine, messages
from elastic_run.core.config import FEW_NODES
from elastic_run.core.job.restart_policy import STOP_JOB, Failure
from elastic_run.multiprocessing import process_table
from elastic_run.multiprocessing.fork_exec import own_interpreter
from elastic_run.signals import SIGKILL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from elastic_run.agent.context import AgentContext
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.agent.messages import Command
    from elastic_run.core.failure.job_result import Attempt, JobResult, RecorderFinding, Rule
    from elastic_run.core.failure.root_cause import EqualErrors, OomKills, WorkerEnd
    from elastic_run.core.failure.stacks import Dump, Place
    from elastic_run.core.job.documents import End, NodeEnds

#: Modules that the report of a failure needs.
_NEEDED_AT_THE_END = (
    "json",
    "elastic_run.cluster.limits",
    "elastic_run.core.failure.traceback_text",
    "elastic_run.multiprocessing.errors.error_file",
    "elastic_run.report.closing_report",
    "elastic_run.report.failure_rules",
)
#: Attempts that are remembered beside the first one.
_LAST_ATTEMPTS = 63
#: Seconds to find a rule of the user, and the process that searches: an expression may backtrack without end.
_SEARCH = 5.0
_SEARCHER = """
import json, re, sys
rules, said = json.load(sys.stdin)
for place, rule in enumerate(rules):
    print(place, flush=True)
    if re.search(rule, said):
        break
else:
    print(-1)
"""


class History:
    """The rounds of a job so far; `ends` are those of the last round if one failed, `root` its first failure.

    `blamed` is a worker of this round that is the cause, however the stop of the round lets it end; `overdue` are the
    stacks of workers that did not stop in time, by global rank.
    """

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._attempts: list[Attempt] = []
        self.ends: tuple[WorkerEnd, ...] = ()
        self.root: WorkerEnd | None = None
        self._round: Round | None = None
        self._survivors: tuple[tuple[int, str], ...] = ()
        self._oom_kills: OomKills | None = None
        self._rule: tuple[WorkerEnd, Rule | None] | None = None
        self._is_prepared = False
        self.versions = ""
        self.blamed: WorkerEnd | None = None
        self.overdue: Mapping[int, Dump] = {}
        self._before_stop: Mapping[int, Dump] = {}
        self._stuck: Mapping[int, Place] | None = None
        self._equal_errors: EqualErrors | None = None

    def begin(self) -> None:
        """Read the OOM killer's counters: from the first start of workers on it may end one of them."""
        if self._oom_kills is None:
            self._count_oom_kills()

    def prepare(self) -> None:
        """Import the modules that the end or a restart of a job will need, while no worker waits.

        `pip install` may replace the files of elastic-run while the job runs: then a failure would have no report.
        """
        if not self._is_prepared:
            self._is_prepared = True
            from importlib import import_module

            for name in _NEEDED_AT_THE_END:
                import_module(name)

    def keep_before_stop(self, dumps: Mapping[int, Dump]) -> None:
        """Keep the stacks of workers of this round that run on when another one has lost a peer, by global rank."""
        self._before_stop = dumps

    def add_round(self, ended: Round, survivors: list[int]) -> Failure | None:
        """Add a round that is over, and return its failure for the restart policy, or None if no worker failed."""
        self._round = ended
        self._survivors = tuple((pid, process_table.wait_channel(pid)) for pid in survivors)
        self.ends = ended.close()
        blamed, self.blamed = self.blamed, None
        if blamed is not None:
            self.ends = (blamed, *(end for end in self.ends if end.rank != blamed.rank))
        self.root = None
        if not self.ends:
            return None
        self._add_remarks()
        _add_kernel_lines(self.ends, time.monotonic() - ended.started)
        from elastic_run.core.failure.root_cause import find_root_cause

        self.root = find_root_cause(self.ends)
        if self.root is None:
            return None
        self.root.oom_kills = self._count_oom_kills()
        exception = self.root.certain_exception
        if exception is not None and exception.name == "PermissionError" and not self.root.remark:
            from elastic_run.files import explain_denial

            self.root.remark = explain_denial(exception.message)  # here: other nodes may not see that path
        return failure_of(self.root, ended.uptime, self._find_rule(self.root))

    def _add_remarks(self) -> None:
        """Add to each worker the sender of the signal that ended it, and where it was if it did not stop in time."""
        from elastic_run.report import lines

        dumps, self.overdue = self.overdue, {}
        before, self._before_stop = self._before_stop, {}
        for end in self.ends:
            number = -end.exitcode
            if not end.remark and number in self._context.senders.passed_on:
                end.remark = lines.passed_on(number, self._context.senders.find(number))
            elif not end.remark and number in self._context.senders.warned_with:
                end.remark = lines.warned_with(number)
            dump = dumps.get(end.rank) if end.was_stopped else None
            if dump is not None:
                from elastic_run.core.failure.stacks import find_place, has_not_moved, parse_stacks

                end.stuck_at = find_place(parse_stacks(dump.text), dump.problem)
                end.is_unmoved = has_not_moved(before.get(end.rank), dump)

    def root_cause_document(self, failure: Failure | None) -> dict[str, Any] | None:
        """Return the last round's failure on this node as a document for the other nodes, or None."""
        if not self.ends or self._round is None:
            return None
        from elastic_run.core.failure.root_cause import find_hidden_cause
        from elastic_run.report.failure_documents import encode_root_cause

        root = self.root or find_hidden_cause(self.ends)
        if root is None:
            return None
        return encode_root_cause(root, failure or failure_of(root, self._round.uptime, self._find_rule(root)))

    def describe_ends(self) -> NodeEnds | None:
        """Return how the workers of the last round ended, for the other nodes."""
        if not self.ends:
            return None
        from elastic_run.report.failure_documents import describe_ends

        return describe_ends(self.ends)

    def add_verdict(self, end: End) -> None:
        """Take over the job's verdict: the same root cause and attempts on every node."""
        from elastic_run.core.failure.job_result import Attempt
        from elastic_run.report.failure_documents import decode_root_cause, read_places

        self._stuck, self._equal_errors = read_places(end.stuck) if end.stuck else {}, end.equal_errors
        root = decode_root_cause(end.root)
        # On the node that had it, it is one of the ends that are known here; but a hang is not told by the end.
        own = [
            end
            for end in self.ends
            if root is not None and (end.rank, end.pid, end.exitcode) == (root.rank, root.pid, root.exitcode)
        ]
        self.root = own[0] if own else root
        self._attempts = [
            Attempt(root.restart_count, root, started_at=root.ended_at - root.uptime, uptime=root.uptime)
            for root in map(decode_root_cause, end.attempts)
            if root is not None
        ]
        if self.root is not None and not own:
            self.ends = (self.root, *(end for end in self.ends if end.rank != self.root.rank))

    def tell(self, before: machine.Agent, after: machine.Agent, commands: tuple[Command, ...]) -> None:
        """Tell the user of a change in one line while the job goes on; the closing report tells its end."""
        from elastic_run.report import lines

        size, options = self._context.group.spec.local_world_size, self._context.options
        is_own_restart = after.restart_count > before.restart_count and not after.follows_job
        if is_own_restart and self.root is not None:
            self._remember_attempt(self.root)
            pause = next((command.delay for command in commands if isinstance(command, messages.Pause)), 0.0)
            most, window = options.job_config.max_restarts, options.job_config.restart_window
            allowed = "" if window is None else f"{window.count} in {window.seconds:g} s"
            self._context.say(lines.restarting(self.root, size, after.restart_count, most, pause, window=allowed))
        elif after.signal is not None and before.signal is None and after.state == machine.STOPPING:
            sender, reason = self._context.senders.find(after.signal), self._context.senders.find_reason(after.signal)
            self._context.say(
                lines.stopping(after.signal, size, options.shutdown_timeout, sender=sender, reason=reason)
            )
        elif after.is_hurried and not before.is_hurried:
            self._context.say(lines.hurrying())

    def _remember_attempt(self, root: WorkerEnd) -> None:
        from elastic_run.core.failure.job_result import Attempt

        if (ended := self._round) is not None:
            label = self._context.kept_label()
            self._attempts.append(Attempt(ended.restart_count, root, ended.started_at, ended.uptime, label))
            # Of a job that restarts for months the first attempt and the last ones.
            del self._attempts[1:-_LAST_ATTEMPTS]

    def conclude(self, finish: messages.Finish, agent: machine.Agent) -> JobResult:
        """Return how the job ended, with its causes and what helps."""
        from elastic_run.core.failure.job_result import OF_NODE, JobResult, exit_code_of
        from elastic_run.store.worker_store import is_served_by_agent

        context, spec, own = self._context, self._context.group.spec, finish.exit_code
        is_store_ours = is_served_by_agent(context.options.agent_config.worker_store, os.environ)
        result = JobResult(
            verdict=finish.verdict,
            exit_code=exit_code_of(finish.verdict, finish.signal, self.root) if own is None else own,
            entrypoint=program_name(spec.entrypoint, spec.args),
            role=spec.role,
            run_id=context.run_id,
            root=self.root,
            ends=self.ends,
            stuck=self._stuck,
            equal_errors=self._equal_errors,
            attempts=tuple(self._attempts),
            restarts_used=agent.restart_count,
            max_restarts=context.options.job_config.max_restarts,
            log_dir=context.make_log_directory() if finish.verdict in OF_NODE else context.log_directory,
            detail=finish.detail or self._stop_detail(finish.signal) or self._hang_detail(finish.verdict),
            signal=finish.signal,
            rule=None if finish.verdict == "success" else self._find_rule(self.root),
            store_port=context.group.master_port if is_store_ours else None,
            versions=self.versions,
            recorder=None if finish.verdict == "success" else self._read_recorders(),
            world_size=context.group.workers[0].world_size,
            nnodes=context.group.group_world_size or 1,
            survivors=self._survivors,
            ended_at=time.time(),
            is_log_disk_full=self._is_log_disk_full(),
            is_brief=self._is_brief(finish.signal),
        )
        if finish.verdict != "success":
            from elastic_run.core.failure.diagnose import explain
            from elastic_run.report.failure_rules import built_in_rules

            explain(result, built_in_rules())
        return result

    def _is_log_disk_full(self) -> bool:
        """Whether the worker that failed first writes into log files itself, under no --tee, and their disk is full."""
        root, ended = self.root, self._round
        if root is None or ended is None or not ended.output_files(root.local_rank):
            return False
        try:
            return os.statvfs(self._context.log_directory).f_bavail == 0
        except OSError:
            return False

    def _is_brief(self, number: int | None) -> bool:
        """Whether this node shows a line in place of the whole report.

        All agents of a Slurm job write to one file. In a large job only the node of the failure and that with rank 0
        show the whole report, and after `scancel` the nodes whose workers did not stop by themselves.
        """
        group, root = self._context.group, self.root
        if (group.group_world_size or 1) <= FEW_NODES or group.group_rank == 0 or self._survivors:
            return False
        if root is None:
            return number is not None and all(end.exitcode != -SIGKILL for end in self.ends)
        return root.host != self._context.hostname

    def _find_rule(self, root: WorkerEnd | None) -> Rule | None:
        """Return the user's rule that fits a failure, or None."""
        path = self._context.options.agent_config.failure_rules
        if not path or root is None:
            return None
        if self._rule is None or self._rule[0] is not root:
            from elastic_run.core.failure.diagnose import last_words
            from elastic_run.report.failure_rules import read_rules
            from elastic_run.report.text import printable

            try:
                self._rule = root, _search(read_rules(path), last_words(root), path)
            except (OSError, ValueError) as error:  # a bad expression, or the file has changed since its check
                self._context.say(printable(f"--failure-rules: {error}"))
                self._rule = root, None
        return self._rule[1]

    def _read_recorders(self) -> RecorderFinding | None:
        recorder, workers = self._context.flight_recorder, self._context.group.workers
        return None if recorder is None else recorder.explain(is_whole_job=workers[0].world_size == len(workers))

    def _stop_detail(self, number: int | None) -> str:
        from elastic_run.report import lines

        sender = "" if number is None else self._context.senders.find(number)
        if number is None or not sender:
            return ""
        return self._context.senders.find_reason(number) or lines.sent_by(number, sender)

    def _hang_detail(self, verdict: str) -> str:
        """Say that a hang found no restart left; other ends by a hang have a detail or another verdict."""
        if verdict != "worker_failed" or self.root is None:
            return ""
        from elastic_run.report import text

        most = self._context.options.job_config.max_restarts
        return text.no_restart_left(most) if text.is_hang(self.root) else ""

    def _count_oom_kills(self) -> OomKills | None:
        """Return the kills since this was last called; None the first time."""
        from elastic_run.cluster.limits import read_oom_kills

        before, self._oom_kills = self._oom_kills, read_oom_kills()
        return None if before is None else self._oom_kills.since(before)


def _search(rules: Sequence[Rule], said: str, path: str) -> Rule | None:
    """Return the first of the user's rules that fits, or None; ValueError names one whose search takes too long."""
    import json
    import subprocess

    from elastic_run.core.failure.diagnose import find_rule

    interpreter = own_interpreter()
    if not interpreter:
        return find_rule(rules, said)
    text = json.dumps([[rule.match for rule in rules], said])
    words = [interpreter, "-ISc", _SEARCHER]
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=_SEARCH, check=False)
    except subprocess.TimeoutExpired as error:
        number = len((error.stdout or b"").splitlines())
        message = f"{path}, rule {number}: the search took more than {_SEARCH:g} s, so no rule is used"
        raise ValueError(message) from None
    if done.returncode:
        message = f"{path}: no rule is used, as the process that searches failed: {done.stderr.strip()[-200:]}"
        raise ValueError(message)
    place = int(done.stdout.split()[-1])
    return rules[place] if place >= 0 else None


def _add_kernel_lines(ends: Sequence[WorkerEnd], seconds: float) -> None:
    """Note at each worker that failed what the kernel's log of the last seconds says of it."""
    from elastic_run.cluster.limits import has_first_pids, read_kernel_log
    from elastic_run.core.failure.diagnose import find_line, last_words, may_tell

    failed = [(end, last_words(end)) for end in ends if end.exitcode != 0 and not end.was_stopped]
    asked = [(end, words) for end, words in failed if may_tell(end, words)]
    if asked:
        lines, has_own_pids = read_kernel_log(seconds), has_first_pids()
        for end, words in asked:
            end.kernel_line = find_line(end, words, lines, has_own_pids=has_own_pids)


def failure_of(root: WorkerEnd, uptime: float, rule: Rule | None) -> Failure:
    """Return a failure for the restart policy; the user's rule that fits it may decide on a restart."""
    from elastic_run.core.failure.root_cause import failure_signature, is_deterministic, is_unguarded_launch

    return Failure(
        exit_code=root.job_exit_code,
        signature=repr(failure_signature(root)),
        is_deterministic=is_deterministic(root),
        uptime=uptime,
        decision=(rule and rule.decision) or (STOP_JOB if is_unguarded_launch(root) else ""),
        rule=rule.match if rule is not None and rule.decision else "",
    )

"""The rules of --failure-rules, and the search of them in what a failed worker said.

A user's expression may take for ever (`(a+)+$`). So a child process searches, and gives up each rule that takes too
long. (Rejected: a thread, since a search holds the GIL; a timer of this process, whose signals may be the program's.)
"""

from __future__ import annotations

from elastic_run.multiprocessing.process.interpreter import own_interpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_run.core.failure.diagnose import Rule
    from elastic_run.core.failure.root_cause import WorkerEnd

#: Seconds of CPU time for the search of one rule; rules that may take longer; seconds for all, on a busy machine.
_SEARCH_TIME, _MOST_SLOW, _SEARCH_WAIT = 0.25, 4, 10
#: Says of each rule whether it fits, up to the first that does. Blocked signals are inherited. The alarm ends the child
#: also where the parent is gone.
_CHILD = """
import json, re, signal, sys
def stop(*_):
    raise TimeoutError
signal.signal(signal.SIGVTALRM, stop)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
limit, most, wait, said, rules = json.load(sys.stdin)
signal.alarm(wait)
for match in rules:
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, limit)
        found = re.search(match, said) is not None
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except (TimeoutError, MemoryError, RecursionError):
        found = None
        most -= 1
    print(json.dumps(found), flush=True)
    if found or not most:
        break
"""
#: The answer on a rule whose search was given up.
_SLOW = b"null"
_MOST_SHOWN = 60


class UserRules:
    """The rules of one job.

    Args:
        path: The file, which was checked before the job began.
        say: Tells the user one line.
    """

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._slow: frozenset[str] = frozenset()
        self._last: tuple[str, Rule | None] = ("", None)

    def find(self, root: WorkerEnd) -> Rule | None:
        """Return the first rule that fits a failure; none if the file has changed for the worse since its check."""
        from elastic_run.core.failure.diagnose import last_words
        from elastic_run.report.job_result import read_rules
        from elastic_run.report.text import printable

        said = last_words(root)
        if self._last[0] == said:
            return self._last[1]
        try:
            rules = [rule for rule in read_rules(self._path) if rule.match not in self._slow]
            found, slow = search_rules(rules, said, own_interpreter())
        except (OSError, ValueError) as error:
            self._say(printable(f"--failure-rules: {error}"))
            return None
        if slow:
            self._slow |= {rule.match for rule in slow}
            self._tell_slow(slow)
        self._last = said, found
        return found

    def _tell_slow(self, rules: Sequence[Rule]) -> None:
        from elastic_run.report.text import elide, printable

        shown = elide(printable(repr(rules[0].match)), _MOST_SHOWN)
        more = f" and {len(rules) - 1} more are" if len(rules) > 1 else " is"
        self._say(f"--failure-rules: {shown}{more} left out: the search takes too long")


def search_rules(rules: Sequence[Rule], said: str, python: str) -> tuple[Rule | None, list[Rule]]:
    """Find the rule that fits, within bounds of time; an OSError if there can be no child.

    Args:
        rules: The user's rules, in their order.
        said: The text in which they are searched for.
        python: The interpreter of the child; a program without one (a frozen one) searches itself.

    Returns:
        The first rule that fits, or None; and the rules that took too long, which count as rules that don't fit.
    """
    if not rules:
        return None, []
    if not python:
        from elastic_run.core.failure.diagnose import find_rule

        return find_rule(rules, said), []
    answers = _ask_child([python, "-I", "-S", "-c", _CHILD], rules, said)
    found = rules[len(answers) - 1] if answers[-1:] == [b"true"] else None
    answers += [] if found else [_SLOW] * (len(rules) - len(answers))
    return found, [rule for rule, answer in zip(rules, answers, strict=False) if answer == _SLOW]


def _ask_child(command: list[str], rules: Sequence[Rule], said: str) -> list[bytes]:
    """Return the child's answer on each rule, as far as it came."""
    import json
    import subprocess

    question = json.dumps([_SEARCH_TIME, _MOST_SLOW, _SEARCH_WAIT, said, [rule.match for rule in rules]]).encode()
    try:
        # A session of its own: Ctrl-C is for the workers and their agent.
        done = subprocess.run(
            command, input=question, capture_output=True, timeout=2 * _SEARCH_WAIT, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").split()
    return done.stdout.split()

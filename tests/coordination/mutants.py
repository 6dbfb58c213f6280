"""Broken rules, each of which the search has to find.

Two rules of `membership` are not here, since a right coordinator never needs them: they guard a node against a defect
of a coordinator.

- A node obeys no lower coordinator. Orders come on the node's one connection alone, and a coordinator gives none before
  it has read there what the node has promised; then it takes a higher term, or steps down.
- A node accepts nothing while its workers run. A coordinator starts a proposal only if the newest state of each member
  says that it has accepted the proposal, and that nothing runs there.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import TYPE_CHECKING, NamedTuple

from elastic_run.core.job import coordination, coordinator_search, founding, membership, node_changes, round_forming
from elastic_run.core.job.founding import LEASE, MAJORITY

if TYPE_CHECKING:
    from types import ModuleType


class Mutant(NamedTuple):
    """A change of the source of one function.

    Args:
        module: Where the function is.
        function: Its name.
        before: A text in its source.
        after: What stands there in the broken rule.
        choice: How the coordinator is chosen in the jobs that need the rule most, or None for all.
        needs_walk: Whether only jobs without a clock need it often enough.
    """

    module: ModuleType
    function: str
    before: str
    after: str
    choice: str | None = None
    needs_walk: bool = False


MUTANTS = {
    "the last round is forgotten when those that know of it are away": Mutant(
        founding, "_list_started", "if job.round is not None:", "if False:", MAJORITY
    ),
    "proposals that may have started are forgotten": Mutant(
        founding, "find_possible", "return tuple(sorted(", "return ()\n    return tuple(sorted("
    ),
    "half of the seats are enough": Mutant(founding, "_has_majority", "2 * count > seats", "2 * count >= seats"),
    "each dead seat is void": Mutant(
        founding,
        "_count_seats",
        "return one.size - is_void",
        "return one.size - is_void - (one.size - sum(state.has_seat(one) for state in _list_heard(job))) // 2",
    ),
    "a state from before the start says that the workers have stopped": Mutant(
        node_changes,
        "NodeChanges._read_round",
        "# What a member that has yet to read its `start` says of its workers is of a round before.",
        "if node.is_member and not has_started:\n        node = replace(node, outcome=outcomes.STOPPED)",
    ),
    "a round starts before all have accepted it": Mutant(
        round_forming, "_gather", "is_accepted = all(", "is_accepted = any("
    ),
    "any proposal may have started": Mutant(
        founding, "_may_have_started", "members = frozenset(proposal.members)", "members = frozenset()"
    ),
    "no proof of a dead coordinator counts": Mutant(
        founding, "_count_seats", "return one.size - is_void", "return one.size"
    ),
    "a coordinator starts rounds after its lease": Mutant(
        round_forming, "_gather", "if is_accepted and now < job.lease_until:", "if is_accepted:"
    ),
    "a coordinator goes on when another node holds the lease": Mutant(
        coordination, "decide", "after = replace(after, is_over=True, successor=event.to)", "pass"
    ),
    "a lease that was over keeps its term": Mutant(
        coordination, "decide", "if event.term <= after.promise.term", "if True"
    ),
    "a holder of a lease founds at once": Mutant(
        coordinator_search, "_may_found", "is_sure = is_first and not knows", "is_sure = is_first", LEASE
    ),
    "a candidate founds beside a job that another endpoint knows": Mutant(
        coordinator_search, "_may_found", "if knows not in ([], [LEASE_STORE]):", "if False:", MAJORITY
    ),
    "the end of a connection alone proves death": Mutant(
        coordinator_search,
        "_read",
        'is_gone = answer.role == REFUSES or answer.node not in ("", node)',
        "is_gone = True",
    ),
    "a node keeps no older proposal": Mutant(membership, "_accept", "[*kept, proposal]", "[proposal]"),
    "a start that nobody has received is none": Mutant(
        founding, "_list_started", "yield from job.started_by", "yield from ()", MAJORITY, needs_walk=True
    ),
    "the newest proposal alone needs its majority": Mutant(
        founding,
        "list_needed",
        "*find_possible(job, base))",
        "*find_possible(job, base)[-1:])",
        MAJORITY,
        needs_walk=True,
    ),
    "a round is proposed before all have promised": Mutant(
        round_forming,
        "_may_propose",
        "if any(state.promise != job.promise for state in job.here.values()):",
        "if False:",
        MAJORITY,
        needs_walk=True,
    ),
    "two coordinators count a node that leaves": Mutant(
        membership, "_promise", "is_kept = bool(member.leaving)", "is_kept = False", MAJORITY, needs_walk=True
    ),
    "nodes that ended before a round was known live on": Mutant(
        coordination, "_change_nodes", "[*job.ended.values(), *closed,", "[*job.ended.values(),"
    ),
}


def break_rule(name: str) -> None:
    """Put a broken rule in the place of the right one, in this process."""
    mutant = MUTANTS[name]
    owner, _, method = mutant.function.partition(".")
    place = getattr(mutant.module, owner) if method else mutant.module
    rule = getattr(place, method or owner)
    rule = rule.fget if isinstance(rule, property) else rule
    source = textwrap.dedent(inspect.getsource(rule))  # type: ignore[arg-type] # all have a getter
    if source.count(mutant.before) != 1:
        message = f"{mutant.before!r} stands {source.count(mutant.before)} times in {mutant.function}"
        raise ValueError(message)
    made: dict[str, object] = {}
    changed = "from __future__ import annotations\n" + source.replace(mutant.before, mutant.after)
    exec(changed, mutant.module.__dict__, made)  # noqa: S102 - our own source
    setattr(place, method or owner, made[method or owner])

"""Broken rules, each of which the search has to find."""

from __future__ import annotations

import inspect
import textwrap
from typing import TYPE_CHECKING, NamedTuple

from elastic_run.core.job import coordination, membership, node_changes, round_steps, succession

if TYPE_CHECKING:
    from types import ModuleType


class Mutant(NamedTuple):
    """A change of the source of one function.

    Args:
        module: Where the function is.
        function: Its name.
        before: A text in its source.
        after: What stands there in the broken rule.
    """

    module: ModuleType
    function: str
    before: str
    after: str


MUTANTS = {
    "a start that nobody has received is forgotten": Mutant(
        succession, "_list_started", "yield from known.started_by", "pass"
    ),
    "proposals that may have started are forgotten": Mutant(
        succession, "find_possible", "return tuple(sorted(", "return ()\n    return tuple(sorted("
    ),
    "half of the seats are enough": Mutant(succession, "_has_majority", "2 * count > seats", "2 * count >= seats"),
    "each dead seat is void": Mutant(
        succession,
        "_count_seats",
        "return one.size - is_void",
        "return one.size - is_void - (one.size - sum(state.has_seat(one) for state in known.heard())) // 2",
    ),
    "a node that ended counts without its promise": Mutant(
        coordination,
        "_take_end",
        "state is not None and state.promise == coordination.promise",
        "state is not None",
    ),
    "a state from before the start says that the workers have stopped": Mutant(
        node_changes,
        "NodeChanges._read_round",
        "if self._round is None or state.started != self._round:",
        "if node.is_member and state.started != self._round:\n"
        "        self._nodes[state.node] = replace(node, outcome=STOPPED)\n"
        "        return\n"
        "    if self._round is None or state.started != self._round:",
    ),
    "a round starts before all have accepted it": Mutant(
        round_steps, "_gather", "is_accepted = all(", "is_accepted = any("
    ),
    "a round forms before all have promised": Mutant(
        round_steps,
        "_may_propose",
        "if any(state.promise != coordination.promise for state in coordination.here.values()):",
        "if False:",
    ),
    "a node obeys a lower coordinator": Mutant(
        membership, "_obey", "if order.promise.rank < member.promise.rank:", "if False:"
    ),
    "a node accepts while its workers run": Mutant(
        membership, "_accept", "place is None or member.phase != IDLE", "place is None"
    ),
    "any proposal may have started": Mutant(
        succession, "_may_have_started", "members = frozenset(proposal.members)", "members = frozenset()"
    ),
    "a coordinator that saw a higher term goes on with its round": Mutant(
        coordination, "_raise_term", "return _stop_round(", "return coordination\n    return _stop_round("
    ),
}


def break_rule(name: str) -> None:
    """Put a broken rule in the place of the right one, in this process."""
    mutant = MUTANTS[name]
    owner, _, method = mutant.function.partition(".")
    place = getattr(mutant.module, owner) if method else mutant.module
    source = textwrap.dedent(inspect.getsource(getattr(place, method or owner)))
    if source.count(mutant.before) != 1:
        message = f"{mutant.before!r} stands {source.count(mutant.before)} times in {mutant.function}"
        raise ValueError(message)
    made: dict[str, object] = {}
    changed = "from __future__ import annotations\n" + source.replace(mutant.before, mutant.after)
    exec(changed, mutant.module.__dict__, made)  # noqa: S102 - our own source
    setattr(place, method or owner, made[method or owner])

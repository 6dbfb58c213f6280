"""What a node says of a round that is over on it, and why it leaves: the words of facts and of the agent's machine."""

from __future__ import annotations

# Outcomes of a round on one node.
DONE = "done"
FAILED = "failed"
STOPPED = "stopped"
CANNOT_START = "cannot_start"
UNREACHABLE = "unreachable"
OUTCOMES = frozenset((DONE, FAILED, STOPPED, CANNOT_START, UNREACHABLE))

# Reasons to leave.
BY_SIGNAL = "signal"
DIED = "died"
UNKILLABLE = "unkillable"
UNHEALTHY = "unhealthy"
EXCLUDED = "excluded"
#: Reasons that are known before the node goes: the round ends for a departure, and not for a loss.
ANNOUNCED = frozenset((BY_SIGNAL, UNKILLABLE, UNHEALTHY, EXCLUDED))

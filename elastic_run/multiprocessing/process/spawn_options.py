"""The options with which the process of one worker is started, be it a command's or a function's."""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class SpawnOptions:
    """The options with which one process is started.

    Args:
        env: Variables in addition to the inherited ones.
        stdout: Its descriptor 1.
        stderr: Its descriptor 2.
        replaced: 1 or 2 or both, if they go to a file or a prefix, so that Python's own stream has to go there too.
        affinity: Logical CPUs to run on, or None to inherit.
        closed: Descriptors that it must not inherit, from `inheritable_descriptors`; a fork inherits them.
        stacks: Descriptor to which it writes its stacks, or -1.
    """

    env: Mapping[str, str]
    stdout: int = 1
    stderr: int = 2
    replaced: Sequence[int] = ()
    affinity: frozenset[int] | None = None
    closed: Sequence[int] = ()
    stacks: int = -1

"""The options of one worker's process: the same record for `start_processes`, `spawn` and the agent's functions."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


class SpawnOptions:
    """The options with which one process is started.

    Args:
        env: Variables of its own.
        stdout: Descriptor that it gets as 1.
        stderr: Descriptor that it gets as 2.
        replaced: Those of 1 and 2 that go to a file or a prefix, so that Python's own stream has to go there too.
        affinity: Logical CPUs to run on, or None to inherit.
        closed: Descriptors that it must not inherit, from `inheritable_descriptors`; a fork inherits them.
    """

    __slots__ = ("affinity", "closed", "env", "replaced", "stderr", "stdout")

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        stdout: int = 1,
        stderr: int = 2,
        replaced: Collection[int] = (),
        affinity: frozenset[int] | None = None,
        closed: Sequence[int] = (),
    ) -> None:
        self.env = dict(env)
        self.stdout = stdout
        self.stderr = stderr
        self.replaced = tuple(replaced)
        self.affinity = affinity
        self.closed = closed

"""The pipe by which the agent gets a worker's stacks; the signals that ask for them are in `signals`.

Rules
- `worker_start` has the worker's side. Only workers get a pipe, and only they are signalled.
- The descriptor's number in a worker is high: no program that opens some files, or closes the first few hundred, comes
  near it.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.records import dataclass
from elastic_run.signals import STACK_SIGNAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

#: The pipe's number in a worker is this one or higher, where the limit of descriptors allows it.
LOWEST_DESCRIPTOR = 900


@dataclass(frozen=True, slots=True)
class StackPipe:
    """The agent's end of the pipe for one worker's stacks, which does not block, and the worker's descriptor."""

    reading: int
    number: int


def is_possible() -> bool:
    """Whether this system has such a signal, and the user wants it."""
    return STACK_SIGNAL > 0 and os.environ.get(contract.ENV_STACKS) != "0"


def variables(fd: int) -> dict[str, str]:
    """Return the variables for a worker that gets a descriptor; none for -1."""
    return {} if fd < 0 else {contract.ENV_STACK_PIPE: f"{fd}:{os.fstat(fd).st_ino}:{STACK_SIGNAL}"}


def place_descriptor(received: int, env: Mapping[bytes, bytes]) -> None:
    """Give a descriptor that came in a message the number of which the environment tells."""
    move(received, int(env[contract.ENV_STACK_PIPE.encode()].partition(b":")[0]))


def move(received: int, number: int) -> bool:
    """Give a descriptor that came in a message a number, unless another file has it; return whether it has it now."""
    try:
        os.fstat(number)
    except OSError:
        os.dup2(received, number)
        is_free = True
    else:
        is_free = False
    os.close(received)
    return is_free

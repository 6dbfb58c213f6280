"""How a worker writes its stacks: on a signal, to a pipe of the agent's, by Python's faulthandler.

Rules
- The handler is C: it needs no lock of the interpreter, so it also answers while a C function holds that lock, and it
  changes nothing that the program can see but the system call that it interrupts, which goes on.
- The handler reads the frames of all threads without a lock. Those of a thread that runs may be gone in that moment,
  and the process would end by SIGSEGV (Python 3.11: one dump of some 100, if C code calls Python functions there). So
  there are two signals: for all threads, and for the main thread alone, which runs the handler itself.
- When Python ends, faulthandler restores what was there before. So the signal is ignored before the handler is
  registered: else a signal that comes just then would kill a worker that has ended well.
- A process that is executed registers it in the line of our .pth file, which repeats `register_by_environment` without
  an import of ours. A fork does it here.
- Only the worker itself registers: it leads its session, and has the pipe of which its environment tells. A fork of the
  worker has the handler as well, but the agent signals nobody but workers. What the worker executes has neither handler
  nor pipe.
- The descriptor's number is high: no program that opens some files, or closes the first few hundred, comes near it.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.records import dataclass
from elastic_run.signals import MAIN_STACK_SIGNAL, STACK_SIGNAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

#: The pipe's number in a worker is this one or higher, where the limit of descriptors allows it.
LOWEST_DESCRIPTOR = 900


@dataclass(frozen=True, slots=True)
class StackPipe:
    """The agent's end of the pipe for one worker's stacks.

    Args:
        reading: The reading end, which does not block.
        number: The descriptor that the worker has.
        inode: The pipe's inode: what tells whether the worker's descriptor is still the same.
    """

    reading: int
    number: int
    inode: int


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


def register_by_environment(env: MutableMapping[bytes, bytes]) -> bool:
    """Let this process write its stacks from now on, and remove the variable that says how; return whether it does."""
    value = env.pop(contract.ENV_STACK_PIPE.encode(), b"")
    if not value:
        return False
    fd, inode, _ = map(int, value.split(b":"))
    is_ours = os.fstat(fd).st_ino == inode
    if is_ours:
        register(fd)
    return is_ours


def register(fd: int) -> None:
    """Let this process write its stacks to a descriptor from now on."""
    import _signal  # type: ignore[import-not-found]  # noqa: PLC0415 - see `signals`; C modules, for workers only
    import faulthandler  # noqa: PLC0415

    os.set_inheritable(fd, False)  # noqa: FBT003 - the function's own signature
    for number in (STACK_SIGNAL, MAIN_STACK_SIGNAL):
        _signal.signal(number, _signal.SIG_IGN)
        faulthandler.register(number, fd, all_threads=number == STACK_SIGNAL)

"""Starts a worker process: a session of its own, exactly the descriptors that it should have, exec in one system call.

Rules
- posix_spawn (a vfork in C) and no Python between fork and exec: safe with threads, cheap in a large process.
  Rejected: os.fork (a copy of page tables per worker, Python code in the child of a threaded process), subprocess
  (slow to import).
- Descriptors that this process opens are close-on-exec. Inheritable descriptors that it inherited are closed in the
  child, as torchrun does. The C library refuses to close a number beyond the limit, so such a descriptor is set to
  close-on-exec instead.
- Some settings can only be inherited. They are set here before the start and restored after it, so that they hold
  before the child's first instruction. CPU affinity is set for this thread (libraries freeze their thread counts at
  import). The limit of descriptors is set for the process: lowering it closes no open descriptor, and prlimit() after
  the start would come too late for a quick child.
"""

from __future__ import annotations

import os
import sys

from elastic_run import contract
from elastic_run.records import dataclass
from elastic_run.signals import IGNORED_BY_PYTHON, SIGCHLD, STACK_SIGNAL, block_signals, call_libc, has_usual_handler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: A worker that inherited SIGCHLD as ignored could not learn how its own children end.
_DEFAULT_SIGNALS = (*IGNORED_BY_PYTHON, SIGCHLD)
_STDERR = 2
#: Of linux/memfd.h.
_MFD_CLOEXEC = 1


@dataclass(frozen=True, slots=True)
class SpawnOptions:
    """The options with which the process of one worker is started, be it a command's or a function's."""

    #: Variables in addition to the inherited ones.
    env: Mapping[str, str]
    stdout: int = 1
    stderr: int = 2
    #: 1 or 2 or both, if they go to a file or a prefix, so that Python's own stream has to go there too.
    replaced: Sequence[int] = ()
    #: Logical CPUs to run on, or None to inherit.
    affinity: frozenset[int] | None = None
    #: Descriptors that it must not inherit, from `inheritable_descriptors`; a fork inherits them.
    closed: Sequence[int] = ()
    #: Descriptor to which it writes its stacks, or -1.
    stacks: int = -1


def start_process(  # noqa: PLR0913 - what a process can be given
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    stdout: int = 1,
    stderr: int = 2,
    affinity: frozenset[int] | None = None,
    descriptor_limit: int | None = None,
    stdin: int = 0,
    closed: Sequence[int] = (),
    kept: Sequence[int] = (),
    mask: Iterable[int] | None = None,
) -> int:
    """Start a program as the leader of a new session, and return its pid, which is the session's and the group's too.

    The program is looked up in PATH unless it has a slash, and `env` is its whole environment. It does not inherit the
    descriptors `closed`, from `inheritable_descriptors`. It inherits `kept` under their own numbers, though they are
    close-on-exec here. Without a `descriptor_limit`, or if a descriptor is beyond it, which the C library refuses, it
    inherits this process's limit; without a `mask` the signals that this thread blocks.
    """
    # From a copy: a descriptor that is duplicated onto itself stays close-on-exec under a C library below 2.29.
    copies = _copy(kept)
    duplicates = [*((copy, fd) for fd, copy in copies.items()), (stdin, 0), (stdout, 1), (stderr, 2)]
    actions: list[tuple[int, ...]] = [(os.POSIX_SPAWN_DUP2, *pair) for pair in duplicates if pair[0] != pair[1]]
    blocked = block_signals(()) if mask is None else mask
    is_limited = descriptor_limit is not None and max(stdin, stdout, stderr, *kept, *copies.values()) < descriptor_limit
    saved = own_limit = None
    try:
        saved = _bind(affinity)
        own_limit = _limit_descriptors(descriptor_limit if is_limited else None)
        limit = allowed_descriptors()
        for fd in closed:
            if fd < limit:
                actions.append((os.POSIX_SPAWN_CLOSE, fd))
            else:
                os.set_inheritable(fd, False)
        return os.posix_spawnp(
            argv[0],
            list(argv),
            dict(env),
            file_actions=actions,
            setsid=True,
            setsigdef=_DEFAULT_SIGNALS,
            setsigmask=blocked,
        )
    finally:
        _bind(saved)
        _limit_descriptors(own_limit)
        for copy in copies.values():
            os.close(copy)


def inherited_environment() -> dict[str, str]:
    """Return the variables of this process that a worker inherits.

    The agents' secrets are left out, since the worker may print them, and so is the pipe for this process's own stacks.
    """
    own = (contract.ENV_RDZV_TOKEN, contract.ENV_STACK_PIPE, contract.ENV_HOSTS_MARK)
    return {name: value for name, value in os.environ.items() if name not in own}


def _copy(kept: Iterable[int]) -> dict[int, int]:
    """Return a copy of each descriptor, closed on exec."""
    copies: dict[int, int] = {}
    try:
        for fd in kept:
            copies[fd] = os.dup(fd)
    except OSError:
        for copy in copies.values():
            os.close(copy)
        raise
    return copies


def _bind(affinity: frozenset[int] | None) -> frozenset[int] | None:
    """Bind this thread; return its former CPUs, or None if nothing was changed."""
    if affinity is None:
        return None
    before = frozenset(os.sched_getaffinity(0))
    os.sched_setaffinity(0, affinity)
    return before


def _limit_descriptors(soft: int | None) -> int | None:
    """Set this process's soft limit of descriptors; return the former limit, or None if nothing was changed."""
    if soft is None:
        return None
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return before


def ensure_standard_descriptors() -> None:
    """Open /dev/null as descriptors 0, 1 and 2 where these are closed.

    Otherwise the next file that is opened gets that number, and the workers write into it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(opened, True)


def inheritable_descriptors() -> list[int]:
    """Return this process's descriptors above 2 that a child would inherit."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return []
    found = []
    for name in names:
        fd = int(name)
        try:
            if fd > _STDERR and os.get_inheritable(fd):
                found.append(fd)
        except OSError:
            pass  # the descriptor of the listing itself, closed by now
    return found


def allowed_descriptors() -> int:
    """Return this process's soft limit of descriptors, which takes no import; their numbers are below it."""
    return os.sysconf("SC_OPEN_MAX")


def open_unnamed(content: bytes) -> int:
    """Open a file in memory that has no name, at its beginning; it is gone when its last descriptor is."""
    if hasattr(os, "memfd_create"):
        opened = os.memfd_create("elastic-run")
    else:
        # A Python that was built for an old C library, as conda's.
        opened = call_libc("memfd_create", b"elastic-run", _MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(opened, view) :]
    os.lseek(opened, 0, os.SEEK_SET)
    return opened


# --- the pipe for stacks ---------------------------------------------------------------------------------------------
# The agent gets a worker's stacks through a pipe; the signals that ask for them are in `signals`, and the worker's side
# is in `worker_start`. Only workers get a pipe, and only they are signalled.

#: The pipe's number in a worker is this one or higher, where the limit of descriptors allows it: no program that opens
#: some files, or closes the first few hundred, comes near it.
LOWEST_STACK_DESCRIPTOR = 900


@dataclass(frozen=True, slots=True)
class StackPipe:
    """The agent's end of the pipe for one worker's stacks, which does not block, and the worker's descriptor."""

    reading: int
    number: int


def can_ask_for_stacks() -> bool:
    """Whether this system has a signal for that, and the user wants it."""
    return STACK_SIGNAL > 0 and os.environ.get(contract.ENV_STACKS) != "0"


def stack_variables(fd: int) -> dict[str, str]:
    """Return the variables for a worker that gets a descriptor for its stacks; none for -1."""
    return {} if fd < 0 else {contract.ENV_STACK_PIPE: f"{fd}:{os.fstat(fd).st_ino}:{STACK_SIGNAL}"}


def place_descriptor(received: int, number: int) -> bool:
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


# --- the interpreter --------------------------------------------------------------------------------------------------
# Code of ours in a process of its own needs an interpreter. `sys.executable` may be another program: where one embeds
# Python (uwsgi, a simulator, a C++ service) or was frozen (PyInstaller), it is that program. With an interpreter's
# arguments it would begin its own work a second time, so trying is no option. The name decides.

#: Beginnings of an interpreter's name, and what may follow: a version, and a build's letters.
_NAMES = ("python", "pypy", "graalpy")
_BUILDS = ("", "t", "d", "td", "w", "m", "dm")

#: Begin of the code that a worker runs under --run-path. torch calls runpy in a process that multiprocessing has made
#: with the launcher's `sys.path`, on which stubs that start a program (Bazel, PEX) put their directories. Our workers
#: are executed, so this is a command. With -m and a module of ours, the workers' interpreter would have to find ours.
_RUN_PATH = "import runpy, sys; del sys.argv[0]; sys.path[:] = "


def make_run_path_code() -> str:
    """Return the code that runs the script of its first argument, with the `sys.path` of this process."""
    entries: list[object] = [*sys.path]
    path = [entry for entry in entries if isinstance(entry, str)]  # Python, too, passes over a pathlib.Path
    return f"{_RUN_PATH}{path!a}; runpy.run_path(sys.argv[0], run_name='__main__')"


def is_run_path_code(word: str) -> bool:
    """Whether a word of a command is such code."""
    return word.startswith(_RUN_PATH)


def own_interpreter() -> str:
    """Return `sys.executable`; if that is no interpreter, this Python's interpreter, or ""."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    prefixes = () if getattr(sys, "frozen", False) else (sys.exec_prefix, sys.base_exec_prefix)
    candidates = (sys.executable, *(os.path.join(prefix, "bin", f"python{version}") for prefix in prefixes))
    return next((path for path in candidates if path and is_interpreter(path)), "")


def running_interpreter() -> str:
    """Return the interpreter that runs now, or "" if the system does not tell; profilers replace `sys.executable`."""
    path = os.path.realpath("/proc/self/exe")
    return path if is_interpreter(path) else ""


def find_interpreter() -> str:
    """Return the interpreter that the program has given to `multiprocessing.set_executable`, or its own, or ""."""
    spawn = sys.modules.get("multiprocessing.spawn")
    chosen = os.fsdecode((spawn and spawn.get_executable()) or "")
    return chosen if chosen not in ("", sys.executable) else own_interpreter()


def is_interpreter(path: str) -> bool:
    """Whether a program is an interpreter, as its name, or the name of the file behind a link, tells.

    The executable of a frozen program is the program itself, under any name.
    """
    if getattr(sys, "frozen", False) and path == sys.executable:
        return False
    names = (os.path.basename(path), os.path.basename(os.path.realpath(path)))
    return any(map(is_interpreters_name, names)) and os.access(path, os.X_OK)


def is_interpreters_name(name: str) -> bool:
    """Whether a file's name is an interpreter's."""
    beginning = next((each for each in _NAMES if name.startswith(each)), None)
    rest = "?" if beginning is None else name[len(beginning) :].lstrip("0123456789.")
    return rest in _BUILDS or rest.startswith("-")


# --- what /proc tells before the first worker; `process_table` has the rest -------------------------------------------
def read_proc(name: str) -> bytes:
    """Return a file of /proc, or nothing."""
    try:
        fd = os.open(f"/proc/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    content = b""
    try:
        while chunk := os.read(fd, 1 << 16):
            content += chunk
    except OSError:
        return b""
    finally:
        os.close(fd)
    return content


def start_time(pid: int | str) -> int:
    """Return when a process began, in clock ticks since boot; 0 if unknown."""
    # The name in parentheses may hold spaces and parentheses itself: fields count from the last one.
    fields = read_proc(f"{pid}/stat").rpartition(b")")[2].split()
    return int(fields[19]) if fields else 0


def has_child(pid: int = 0) -> bool:
    """Whether this process has a certain child, or any; children that have ended and were not collected count."""
    try:
        os.waitid(os.P_PID if pid else os.P_ALL, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def list_handled(pid: int | str) -> frozenset[int]:
    """Return the signals for which a process has a handler now, in C too; none where the system doesn't tell."""
    caught = next(
        (line for line in read_proc(f"{pid}/status").splitlines() if line.startswith(b"SigCgt:")), b"SigCgt: 0"
    )
    bits = int(caught.split()[1], 16)
    return frozenset(number for number in range(1, bits.bit_length() + 1) if bits >> (number - 1) & 1)


def list_foreign_handled() -> frozenset[int]:
    """Return the signals that the program around the launcher, such as a profiler, handles in this process.

    Python does not know of a handler that code in C has installed since Python began; the kernel does.
    """
    return frozenset(number for number in list_handled("self") if not has_usual_handler(number))


def read_name(pid: int) -> str:
    """Return the short name of a process, or an empty string."""
    return read_proc(f"{pid}/comm").strip().decode(errors="replace")

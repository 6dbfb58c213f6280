"""What a worker sees of its world, written down as JSON, and how it then ends.

Every program of this directory calls `observe_and_end`. Environment:

- PARITY_OUT: directory for `<rank>.<restart count>.json`.
- PARITY_END: words such as ``1.0=exit:3``: rank 1 ends so in the first attempt. While one rank is to end, the others
  wait for SIGTERM and note that it came; it ends only when all have got that far. `*` stands for every rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import stat
import sys
from pathlib import Path
from typing import Any

#: Seconds after which a worker that waits for the others, or for SIGTERM, gives up with an error.
_DEADLINE = 60
_KINDS = {
    stat.S_IFCHR: "character device",
    stat.S_IFIFO: "pipe",
    stat.S_IFREG: "file",
    stat.S_IFSOCK: "socket",
}


def observe_and_end() -> None:
    """Write down what this worker sees, say a line on both streams, and end as asked for."""
    seen = _look_around()
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    # Not LOCAL_RANK, which is 0 everywhere under --virtual-local-rank.
    rank = os.environ["RANK"]
    write_atomically(Path(os.environ["PARITY_OUT"], f"{rank}.{attempt}.json"), json.dumps(seen))
    sys.stdout.write(f"probe: out of {rank}.{attempt}\n")
    sys.stderr.write(f"probe: err of {rank}.{attempt}\n")
    sys.stdout.flush()
    _end(rank, attempt)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(path)


def _look_around() -> dict[str, Any]:
    descriptors = _open_descriptors()  # first: what follows opens files
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return {
        "descriptors above 2": len([fd for fd in descriptors if fd > 2]),
        "env": dict(os.environ),
        "argv": sys.argv,
        "original argv": sys.orig_argv,
        "cwd": str(Path.cwd()),
        "main file": getattr(main, "__file__", None),
        "main name": main.__name__,
        "main spec": spec.name if spec else None,
        "main package": main.__package__,
        "sys.path[0]": sys.path[0] or str(Path.cwd()),
        "executable": sys.executable,
        "unbuffered": getattr(sys.stdout, "write_through", None),
        **_look_at_process(),
        **_look_at_streams(),
    }


def _open_descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - its own descriptor must be closed again by now
        try:
            os.fstat(int(name))
        except OSError:
            continue
        found.append(int(name))
    return found


def _look_at_process() -> dict[str, Any]:
    old_mask = os.umask(0)
    os.umask(old_mask)
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return {
        "umask": oct(old_mask),
        "nice": os.nice(0),
        "leads session": os.getsid(0) == os.getpid(),
        "leads group": os.getpgid(0) == os.getpid(),
        "parent": os.getppid(),
        "ignored signals": signal_names(status["SigIgn"]),
        "blocked signals": signal_names(status["SigBlk"]),
        "caught signals": signal_names(status["SigCgt"]),
        "CPUs": status["Cpus_allowed_list"],
        "OOM score": Path("/proc/self/oom_score_adj").read_text(encoding="ascii").strip(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name},
    }


def signal_names(mask: str) -> list[str]:
    """Return the names of the signals in a mask of /proc/PID/status."""
    bits = int(mask, 16)
    return [signal.Signals(n).name for n in sorted(signal.valid_signals()) if n < signal.SIGRTMIN and bits >> n - 1 & 1]


def _look_at_streams() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        status = os.fstat(fd)
        seen[f"{name} kind"] = _KINDS[stat.S_IFMT(status.st_mode)]
        seen[f"{name} is a terminal"] = os.isatty(fd)
        seen[f"{name} blocks"] = os.get_blocking(fd)
        seen[f"{name} is the launcher's"] = os.path.samestat(status, os.stat(f"/proc/{os.getppid()}/fd/{fd}"))  # noqa: PTH116 - a descriptor's file, not a path
    seen["stderr is stdout"] = os.path.sameopenfile(1, 2)
    seen["window"] = list(os.get_terminal_size(2)) if os.isatty(2) else None
    seen["stdin text"] = sys.stdin.read() if os.environ.get("PARITY_READS_STDIN") else None
    return seen


def _end(rank: str, attempt: str) -> None:
    ends = dict(word.split("=") for word in os.environ.get("PARITY_END", "").split())
    ends = {who.partition(".")[0]: how for who, how in ends.items() if who.partition(".")[2] in {attempt, "*"}}
    if not ends:
        return
    how = ends.get(rank, ends.get("*", "wait"))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    gate = _open_gate(attempt)
    if how == "wait":
        os.write(gate, b".")
        _wait_for_termination(rank, attempt)
    for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
        os.read(gate, 1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _end_as(how)


def _open_gate(attempt: str) -> int:
    """Open the named pipe of an attempt for both reading and writing, so that nobody waits for the other end."""
    path = Path(os.environ["PARITY_OUT"], f"gate.{attempt}")
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path)
    signal.alarm(_DEADLINE)
    return os.open(path, os.O_RDWR)


def _wait_for_termination(rank: str, attempt: str) -> None:
    sys.stdout.write("probe: waiting\n")
    sys.stdout.flush()
    number = signal.sigwait({signal.SIGTERM})
    text = json.dumps([signal.Signals(number).name])
    write_atomically(Path(os.environ["PARITY_OUT"], f"{rank}.{attempt}.signals.json"), text)
    os._exit(0)


def _end_as(how: str) -> None:
    kind, _, value = how.partition(":")
    if kind == "exit":
        sys.exit(int(value))
    if kind == "signal":
        os.kill(os.getpid(), signal.Signals[value])
    if not os.environ.get("PARITY_KEEPS_TRACEBACK"):
        sys.tracebacklimit = 0  # the console shows one line then, with our mark in it
    message = "probe: fails"
    raise RuntimeError(message)

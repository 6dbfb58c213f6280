"""Looks at its own process from all sides, and writes down what it sees as JSON; see tests/parity/test_preload.py.

Whole in one file, since it is run as a script, as a module, and as `__main__.py` of a directory and of a zip file.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import io
import json
import linecache
import locale
import logging
import multiprocessing
import multiprocessing.process
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random  # in some releases only there when it is asked for

_HOOKS = ("excepthook", "displayhook", "breakpointhook", "unraisablehook")
#: What the module's own namespace has before anything is defined in it.
NAMESPACE = {
    name: repr(globals()[name]) if name not in {"__builtins__", "__loader__"} else str(type(globals()[name]))
    for name in ("__name__", "__file__", "__package__", "__builtins__", "__loader__", "__cached__", "__annotations__")
    if name in globals()
}


class Defined:
    """A class of the main program, for pickle."""

    number = 7


def child(answer: Any) -> None:
    """Tell what a child process sees."""
    main = sys.modules["__main__"]
    answer.send([main.__name__, getattr(main, "__file__", None), Defined.__module__, sys.argv, Defined.number])


def ask_child(method: str) -> list[Any]:
    """Return what a child process sees; one that can't import its main program has an exit code alone."""
    context: Any = multiprocessing.get_context(method)
    answer, writing = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(writing,))
    process.start()
    writing.close()
    process.join()
    return [None if process.exitcode else answer.recv(), process.exitcode]


def look_at_python() -> dict[str, Any]:
    """Return what the interpreter says of itself."""
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": str(sys.flags),
        "warnoptions": sys.warnoptions,
        "xoptions": dict(sys._xoptions),
        "filters": str(warnings.filters),
        "executable": [sys.executable, sys.prefix, sys.exec_prefix],
        "hooks": [getattr(sys, name).__qualname__ for name in _HOOKS],
        "tracing": [str(sys.gettrace()), str(sys.getprofile())],
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval()],
        "meta_path": [str(type(finder)) + getattr(finder, "__name__", "") for finder in sys.meta_path],
        "namespace": NAMESPACE,
        "spec": main.__spec__ and [main.__spec__.name, main.__spec__.origin, main.__spec__.parent],
        "doc": main.__doc__,
        "is main": main.__dict__ is globals(),
        "stack": [[frame.filename, frame.function] for frame in inspect.stack()],
        "stack by traceback": len(traceback.extract_stack()),
        "source": inspect.getsource(Defined),
        "line": linecache.getline(__file__, 1),
        "collection": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
        "faulthandler": faulthandler.is_enabled(),
        "locale": [locale.getlocale(), sys.getfilesystemencoding(), sys.getdefaultencoding()],
        "time zone": time.tzname,
        "dont_write_bytecode": sys.dont_write_bytecode,
        "pickled": pickle.dumps(Defined()).hex(),
        "unpickled": pickle.loads(pickle.dumps(Defined())).number,  # noqa: S301 - our own
        "children": [ask_child(method) for method in os.environ.get("PROBE_CHILDREN", "").split()],
        "logging": [str(logging.getLogger().handlers), logging.getLogger().level, logging.root.manager.disable],
        "logged just now": 0 <= logging.LogRecord("", 0, "", 0, "", None, None).relativeCreated < 60_000,
    }


def look_at_threads() -> dict[str, Any]:
    """Return what is known of threads."""
    main = threading.main_thread()
    return {
        "threads": [thread.name for thread in threading.enumerate()],
        "is main thread": main is threading.current_thread(),
        "native id is pid": main.native_id == os.getpid() == threading.get_native_id(),
        "ident": main.ident == threading.get_ident(),
        "tasks": len(os.listdir("/proc/self/task")),  # noqa: PTH208
        "process": [multiprocessing.current_process().name, multiprocessing.parent_process()],
        "wakeup fd": signal.set_wakeup_fd(-1),
    }


def look_at_process() -> dict[str, Any]:
    """Return what the kernel says."""
    old_mask = os.umask(0)
    os.umask(old_mask)
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    kept = (
        "Umask",
        "Uid",
        "Gid",
        "Groups",
        "NoNewPrivs",
        "Seccomp",
        "CapEff",
        "CapInh",
        "CapBnd",
        "CapAmb",
        "THP_enabled",
    )
    signals = ("SigBlk", "SigIgn", "SigCgt", "ShdPnd", "SigPnd")
    return {
        "environment": [[name, value] for name, value in os.environ.items()],
        "C environment": subprocess.run(["/usr/bin/env"], capture_output=True, text=True, check=True).stdout,
        "cwd": str(Path.cwd()),
        "umask": old_mask,
        "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "parent is the launcher": os.getppid() == int(os.environ["ELASTIC_RUN_TOKEN"].partition("-")[0], 16),
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "scheduler": os.sched_getscheduler(0),
        "limits": [[name, resource.getrlimit(getattr(resource, name))] for name in dir(resource) if "RLIMIT_" in name],
        "status": {name: status.get(name) for name in (*kept, *signals)},
        "handlers": {number.name: str(signal.getsignal(number)) for number in signal.Signals},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "timers": [signal.getitimer(which) for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL)],
        "command line": Path("/proc/self/cmdline").read_text(encoding="utf-8"),
        "name": Path("/proc/self/comm").read_text(encoding="utf-8"),
        "program": str(Path("/proc/self/exe").readlink()),
        "OOM score": Path("/proc/self/oom_score_adj").read_text(encoding="ascii"),
        "cgroup": Path("/proc/self/cgroup").read_text(encoding="ascii"),
        "seconds of processor": time.process_time() < 30,
    }


def look_at_streams() -> dict[str, Any]:
    """Return what is known of descriptors and streams."""
    seen: dict[str, Any] = {"descriptors": OPEN, "stdin text": sys.stdin.read() if READS_STDIN else None}
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream: Any = getattr(sys, name)
        status = os.fstat(fd)
        seen[name] = {
            "repr": repr(stream),
            "original": stream is getattr(sys, f"__{name}__"),
            "raw": repr(stream.buffer if isinstance(stream.buffer, io.RawIOBase) else stream.buffer.raw),
            "buffer": str(type(stream.buffer)),
            "kind": status.st_mode,
            "file": [status.st_rdev, stream.isatty(), os.get_blocking(fd), os.get_inheritable(fd)],
            "buffering": [stream.line_buffering, stream.write_through, stream.newlines, stream.errors, stream.encoding],
            "able": [stream.readable(), stream.writable(), stream.seekable()],
        }
    return seen


def draw() -> dict[str, Any]:
    """Draw random numbers from all sources: they must differ from worker to worker."""
    return {
        "random": random.random(),  # noqa: S311
        "numpy": float(np.random.random()),  # noqa: NPY002 - the global one is what this is about
        "generator": float(np.random.default_rng().random()),
        "uuid": [str(uuid.uuid4()), str(uuid.uuid1())],
        "temporary": next(tempfile._get_candidate_names()),  # type: ignore[attr-defined]
        "authkey": bytes(multiprocessing.process.current_process().authkey).hex(),
    }


READS_STDIN = bool(os.environ.get("PROBE_READS_STDIN"))
OPEN = sorted(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208

if __name__ == "__main__":
    observed = {
        **look_at_streams(),
        **look_at_python(),
        **look_at_threads(),
        **look_at_process(),
        "drawn": draw(),
        "modules": sorted(sys.modules),
    }
    target = Path(os.environ["PROBE_OUT"], f"{os.environ['RANK']}.json")
    target.write_text(json.dumps(observed), encoding="utf-8")
    sys.stdout.write("observed\n")
    sys.stderr.write("observed\n")

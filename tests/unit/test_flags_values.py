"""Single values of the command line: what is taken, and the one line that says why the rest is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.cli.flags import FLAGS
from elastic_run.cli.parser import LauncherArgumentParser
from elastic_run.core.config import Window
from elastic_run.notices import UsageError

if TYPE_CHECKING:
    from typing import Any

    from elastic_run.cli.flags import Flag

BY_NAME = {flag.name: flag for flag in FLAGS}

GOOD: list[tuple[str, str, Any]] = [
    ("--nnodes", "1", "1"),
    ("--nnodes", "1:4", "1:4"),
    ("--nnodes", "4:4", "4:4"),
    ("--nproc-per-node", "1", "1"),
    ("--nproc-per-node", "512", "512"),
    ("--nproc-per-node", "auto", "auto"),
    ("--nproc-per-node", "cpu", "cpu"),
    ("--nproc-per-node", "gpu", "gpu"),
    ("--nproc-per-node", "xpu", "xpu"),
    ("--max-restarts", "0", 0),
    ("--max-restarts", "7", 7),
    ("--monitor-interval", "0.5", 0.5),
    ("--monitor-interval", "5", 5.0),
    ("--shutdown-timeout", "0", 0),
    ("--shutdown-timeout", "90", 90),
    ("--master-port", "0", 0),
    ("--master-port", "65535", 65535),
    ("--redirects", "3", "3"),
    ("--redirects", "0:1,1:2", "0:1,1:2"),
    ("--tee", "12:3", "12:3"),
    ("--local-ranks-filter", "", ""),
    ("--local-ranks-filter", "0, 10", "0, 10"),
    ("--rdzv-conf", "", ""),
    ("--rdzv-conf", "timeout=5,a=b=c", "timeout=5,a=b=c"),
    ("--signals-to-handle", "SIGTERM", "SIGTERM"),
    ("--signals-to-handle", "SIGTERM, SIGUSR1", "SIGTERM, SIGUSR1"),
    ("--forward-signals", "", ""),
    ("--forward-signals", "SIGUSR1,SIGUSR2", "SIGUSR1,SIGUSR2"),
    ("--scale-up-signal", "", ""),
    ("--scale-up-signal", "SIGUSR2", "SIGUSR2"),
    ("--local-addr", "node-1.cluster", "node-1.cluster"),
    ("--local-addr", "10.0.0.1", "10.0.0.1"),
    ("--local-addr", "", ""),
    ("--local-addr", "123456789012", "123456789012"),
    ("--local-addr", "fe80::1%eth0", "fe80::1%eth0"),
    ("--master-addr", "[fd00::1]", "[fd00::1]"),
    ("--duplicate-stdout-filters", "a,b", ["a", "b"]),
    ("--duplicate-stdout-filters", "a,,b,c", ["a,b", "c"]),
    ("--start-method", "forkserver", "forkserver"),
    ("--numa-binding", "core-complex", "core-complex"),
    ("--worker-store", "rank0", "rank0"),
    ("--preload", "torch,torch.distributed", "torch,torch.distributed"),
    ("--preload", "", ""),
    ("--omp-threads", "4", 4),
    ("--health-check", "check 'all of it'", "check 'all of it'"),
    ("--health-check", "", ""),
    ("--health-check-timeout", "1m", 60.0),
    ("--omp-threads", "auto", "auto"),
    ("--restart-window", "5/1h", Window(5, 3600.0)),
    ("--hang-timeout", "10m", 600.0),
    ("--hang-timeout", "auto", 0.0),
    ("--restart-window", "5/h", Window(5, 3600.0)),
    ("--restart-window", "3/600", Window(3, 600.0)),
    ("--restart-window", "1/1.5m", Window(1, 90.0)),
    ("--min-uptime", "90", 90.0),
    ("--min-uptime", "2m", 120.0),
    ("--max-backoff", "0", 0.0),
    ("--max-backoff", "1d", 86400.0),
    ("--no-restart-exit-codes", "3", (3,)),
    ("--no-restart-exit-codes", "3, 64-66", (3, 64, 65, 66)),
    ("--requeue", "2", 2),
    ("--standalone", "1", True),
    ("--standalone", "0", False),
]

BAD = [
    ("--nnodes", "0", "MIN[:MAX] with 1 <= MIN <= MAX"),
    ("--nnodes", "3:1", "MIN[:MAX] with 1 <= MIN <= MAX"),
    ("--health-check", "sh -c 'x", "is not a command: no closing quotation"),
    ("--health-check", " ", "names no program"),
    ("--health-check-timeout", "0", "is not a time above 0"),
    ("--omp-threads", "0", "is not a whole number from 1 up, nor auto"),
    ("--omp-threads", "Auto", "is not a whole number from 1 up, nor auto"),
    ("--nnodes", "a", "MIN[:MAX]"),
    ("--nnodes", "1:2:3", "MIN[:MAX]"),
    ("--nnodes", "", "MIN[:MAX]"),
    ("--nnodes", "1:", "MIN[:MAX]"),
    ("--nproc-per-node", "0", "a number from 1 up, nor auto, cpu, gpu or xpu"),
    ("--nproc-per-node", "-1", "a number from 1 up"),
    ("--nproc-per-node", "65537", "is above the limit of 65536 workers on a node"),
    ("--nproc-per-node", "8x", "a number from 1 up"),
    ("--nproc-per-node", "GPU", "auto, cpu, gpu or xpu"),
    ("--max-restarts", "-1", "a whole number from 0 up"),
    ("--max-restarts", "1.5", "a whole number from 0 up"),
    ("--max-restarts", "9007199254740993", "is above 9007199254740992"),
    ("--nnodes", "1:9007199254740993", "MIN[:MAX]"),
    ("--exclude-after", "9007199254740993/1h", "N/PERIOD"),
    ("--node-rank", "-2", "a whole number from 0 up, nor -1 for none"),
    ("--monitor-interval", "-0.1", "seconds above 0"),
    ("--monitor-interval", "nan", "seconds above 0"),
    ("--hang-timeout", "soon", "neither auto nor a time of at least 1 second"),
    ("--hang-timeout", "0.5", "neither auto nor a time of at least 1 second"),
    ("--hang-action", "kill", "report, restart"),
    ("--monitor-interval", "inf", "seconds above 0"),
    ("--shutdown-timeout", "-5", "a whole number of seconds from 0 up"),
    ("--shutdown-timeout", "1.5", "a whole number of seconds"),
    ("--shutdown-timeout", "soon", "a whole number of seconds"),
    ("--master-port", "65536", "a port from 0 to 65535"),
    ("--master-port", "http", "a port"),
    ("--redirects", "7", "0, 1, 2 or 3 (none, stdout, stderr, both)"),
    ("--redirects", "0:9", "a map of local ranks"),
    ("--redirects", "", "0, 1, 2 or 3"),
    ("--tee", "0:1,", "a map of local ranks"),
    ("--tee", "-1:1", "a map of local ranks"),
    ("--local-ranks-filter", "0,x", "a list of local ranks (0,1,2)"),
    ("--local-ranks-filter", "-1", "a list of local ranks"),
    ("--rdzv-conf", "timeout", "no '='"),
    ("--signals-to-handle", "SIGTERN", "did you mean 'SIGTERM'?"),
    ("--signals-to-handle", "TERM", "which is not a signal"),
    ("--signals-to-handle", "15", "which is not a signal"),
    ("--signals-to-handle", "SIG_IGN", "which is not a signal"),
    ("--signals-to-handle", "", "which is not a signal"),
    ("--signals-to-handle", "SIGTERM,", "which is not a signal"),
    ("--scale-up-signal", "SIGUSR2,SIGUSR1", "is not one signal"),
    ("--scale-up-signal", "SIGUSR2,", "is not one signal"),
    ("--local-addr", "bad host", "a host name"),
    ("--local-addr", "999.1.1.1", "a host name, an IPv4 or an IPv6 address"),
    ("--local-addr", "10.0.0.1.2", "an IPv4"),
    ("--local-addr", "a/b", "a host name"),
    ("--local-addr", "node:29500", "a host name"),
    ("--local-addr", "[]", "a host name"),
    ("--master-addr", "bad host", "a host name, an IPv4 or an IPv6 address"),
    ("--master-addr", "[node]", "a host name, an IPv4 or an IPv6 address"),
    ("--master-addr", "::x", "an IPv6 address"),
    ("--signals-to-handle", "SIGTERM,SIGKILL", "SIGKILL, which no process can handle"),
    ("--forward-signals", "SIGSTOP", "SIGSTOP, which no process can handle"),
    ("--forward-signals", "SIGCHLD", "SIGCHLD, which the launcher itself needs"),
    ("--start-method", "thread", "spawn, fork, forkserver"),
    ("--numa-binding", "nodes", "is none of node, socket, exclusive, core-complex"),
    ("--worker-store", "file", "auto, agent, rank0, torch"),
    ("--preload", "torch,", "a list of modules (torch,numpy)"),
    ("--preload", "train.py,2", "a list of modules (torch,numpy)"),
    ("--restart-window", "5", "N/PERIOD, as in 5/1h"),
    ("--restart-window", "0/1h", "a number N from 1 up"),
    ("--restart-window", "5/0", "N/PERIOD"),
    ("--restart-window", "5/1w", "s, m, h or d"),
    ("--restart-window", "/h", "N/PERIOD"),
    ("--min-uptime", "-1", "seconds from 0 up"),
    ("--min-uptime", "m", "s, m, h or d"),
    ("--max-backoff", "nan", "seconds from 0 up"),
    ("--no-restart-exit-codes", "0", "exit codes from 1 to 255"),
    ("--no-restart-exit-codes", "256", "exit codes from 1 to 255"),
    ("--no-restart-exit-codes", "9-3", "exit codes"),
    ("--no-restart-exit-codes", "a", "exit codes"),
    ("--requeue", "", "is not a whole number from 0 up"),
    ("--standalone", "yes", "1 or 0"),
    ("--standalone", "", "1 or 0"),
]


def convert(flag: Flag, text: str) -> object:
    """Give a text to a flag, or to its variable where the flag takes no value, and return what it becomes."""
    with pytest.MonkeyPatch.context() as patch:
        if flag.is_switch:
            patch.setenv(flag.variable, text)
        words = [] if flag.is_switch else [f"{flag.name}={text}"]
        return getattr(LauncherArgumentParser([flag], raises_values=True).parse_args([*words, "s"]), flag.dest)


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_a_good_value_is_taken(name: str, text: str, value: object) -> None:
    """A value that is allowed becomes what later code expects, of the same type as torch's."""
    taken = convert(BY_NAME[name], text)
    assert (type(taken), taken) == (type(value), value)


@pytest.mark.parametrize(("name", "text", "allowed"), BAD)
def test_a_bad_value_is_answered_in_one_line(name: str, text: str, allowed: str) -> None:
    """The line for a bad value begins with the flag and the value and says what is allowed."""
    with pytest.raises(UsageError) as raised:
        convert(BY_NAME[name], text)
    message = str(raised.value)
    source = BY_NAME[name].variable if BY_NAME[name].is_switch else name
    assert message.startswith(f"{source}: {text!r} ")
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_default_is_a_value_that_would_be_taken(flag: Flag) -> None:
    """Whatever a flag has by default may also be given on the command line."""
    if isinstance(flag.default, (str, int)) and not flag.is_switch:
        assert flag.parse(str(flag.default)) == flag.default

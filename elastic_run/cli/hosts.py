"""Plans the job of --hosts: for each host the ssh command, the launcher's command line, and the variables it gets.

A host's launcher gets the flags that the user has given here, by a flag, a variable or a file, and those that follow
from the list of hosts. The token and the variables of this machine's environment go to the host as an order.
"""

from __future__ import annotations

import os
import shlex
from fnmatch import fnmatchcase

import elastic_run
from elastic_run import contract
from elastic_run.cli.flags import CONFIGURATION, HOSTS
from elastic_run.cli.request import get_use_env, read_token, write_given
from elastic_run.cli.values import node_range
from elastic_run.files import find_program
from elastic_run.hosts.protocol import MOST_ENDPOINTS, VERSION, HostsJob
from elastic_run.hosts.remote import CODE
from elastic_run.multiprocessing.fork_exec import own_interpreter
from elastic_run.notices import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

    from elastic_run.cli.flags import Flag
    from elastic_run.cli.request import Origins

#: Variables that the hosts get: where programs and modules are, and settings of libraries of training programs. Not
#: those that describe this machine or this job, such as CUDA_VISIBLE_DEVICES, HOME, SLURM_* and RANK.
PASSED = (
    *("PATH", "PYTHON*", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_*", "LANG", "LC_*", "TZ", "LOGLEVEL"),
    *("OMP_*", "KMP_*", "GOMP_*", "MKL_*", "OPENBLAS_*", "NCCL_*", "RCCL_*", "GLOO_*", "UCX_*", "FI_*", "TORCH*"),
    *("PYTORCH_*", "TRITON_*", "CUDA_*", "XLA_*", "HF_*", "WANDB_*"),
)
_NOT_PASSED = frozenset(("CUDA_VISIBLE_DEVICES",))
#: Flags of which each host would have to have another value, or that mean another way to start.
_CONTRADICTING = ("standalone", "node_rank", "local_addr", "requeue")
#: Seconds that a launcher may take to end when its workers have.
_END_TIME = 5
#: Before the user's options, which can't change the first: nobody answers a question of ssh here.
_SSH = ("ssh", "-T", "-o", "BatchMode=yes")
#: Behind them, as ssh uses the first value that it gets. A host that does not answer for so many seconds is lost.
_SSH_DEFAULTS = ("-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3", "--")


def plan_job(args: Namespace, origins: Origins, flags: Sequence[Flag], environ: Mapping[str, str]) -> HostsJob:
    """Return what each host is to do; UsageError if the flags do not go together."""
    hosts, count, problem = args.hosts, len(args.hosts), ""
    least, most = node_range(args.nnodes) if "nnodes" in origins else (count, count)
    contradicting = [dest for dest in _CONTRADICTING if dest in origins and getattr(args, dest) is not False]
    if contradicting:
        name = contradicting[0].replace("_", "-")
        problem = f"--{name}: cannot be combined with --hosts, which starts a launcher on each host"
    elif most > count:
        problem = f"--nnodes: {args.nnodes} asks for more nodes than the {count} of --hosts"
    elif find_program("ssh", environ) is None:
        problem = "--hosts: ssh is not on PATH"
    elif not get_use_env(args):
        problem = "--hosts: needs --use-env with this command, or elastic-run"
    if problem:
        raise UsageError(problem)
    names_place = args.rdzv_endpoint or args.master_port or "master_addr" in origins
    has_own_place = count > 1 and args.rdzv_backend in ("static", "c10d") and not names_place
    given = [flag for flag in flags if flag.group not in (CONFIGURATION, HOSTS) and flag.dest != "rdzv_token_file"]
    common = [*filter(None, (write_given(flag, args, origins) for flag in given)), f"--nnodes={least}:{most}"]
    if has_own_place:
        # Each launcher learns their addresses and ports when all hosts are ready.
        common += ["--rdzv-backend=c10d", f"--rdzv-endpoint={','.join(host.name for host in hosts[:MOST_ENDPOINTS])}"]
        common += [] if "rdzv_id" in origins else [f"--rdzv-id={os.urandom(4).hex()}"]
    slots = [[] if host.slots is None else [f"--nproc-per-node={host.slots}"] for host in hosts]
    ranks = [[f"--node-rank={rank}"] if count > 1 else [] for rank in range(count)]
    program = ("--", args.training_script, *args.training_script_args)
    root = os.path.dirname(os.path.dirname(os.path.abspath(elastic_run.__file__)))
    remote = shlex.join(("exec", own_interpreter() or "python3", "-I", "-S", "-c", CODE, root))
    ssh = (*_SSH, *shlex.split(args.ssh_options), *_SSH_DEFAULTS)
    token, patterns = read_token(args.rdzv_token_file, environ), (*PASSED, *args.hosts_env.split(","))
    passed = [name for name in environ if any(fnmatchcase(name, pattern) for pattern in patterns)]
    timeout = environ.get(contract.ENV_SHUTDOWN_TIMEOUT, "")
    default = int(timeout) if timeout.isdecimal() else contract.DEFAULT_SHUTDOWN_TIMEOUT
    stop_time = (default if args.shutdown_timeout is None else args.shutdown_timeout) + _END_TIME
    order = {
        "version": VERSION,
        "directory": os.getcwd(),
        "environment": {name: environ[name] for name in passed if name not in _NOT_PASSED},
        "token": os.urandom(16).hex() if token is None else os.fsdecode(token),
        "stop_time": stop_time,
    }
    return HostsJob(
        names=tuple(host.name for host in hosts),
        commands=tuple((*ssh, host.target, remote) for host in hosts),
        words=tuple((*common, *own, *rank, *program) for own, rank in zip(slots, ranks, strict=True)),
        order=order,
        least=least,
        has_own_place=has_own_place,
        stop_time=stop_time,
    )


def describe_job(job: HostsJob) -> str:
    """Return the text of --explain."""
    head = f"Nothing was started. Without --explain, elastic-run would start on each host, in {job.order['directory']}:"
    launchers = [f"  {name}: elastic-run {shlex.join(words)}" for name, words in zip(job.names, job.words, strict=True)]
    ssh = f"through: {shlex.join(job.commands[0][:-2])} HOST"
    return "\n".join(
        [head, "", *launchers, "", ssh, f"with the variables {', '.join(sorted(job.order['environment']))}\n"]
    )

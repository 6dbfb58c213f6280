"""The command lines that are run under torchrun and under elastic-run, as data.

In arguments and variables `{port}` stands for a free port, `{logs}` for a log directory, `{out}` for the run's own
directory and `{python}` for the interpreter. Programs are those of the directory `programs`, which is copied to a place
with a blank in its name and is the working directory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Arguments that shells, argparse or a careless launcher could spoil.
_AWKWARD = ("", "a b", "*", "$HOME", "ünï", "line\nbreak", "--lr=1e-3", "-x", "--", "-h", "--tee", "3", "-m")


@dataclass(frozen=True)
class Case:
    """One command line.

    Args:
        name: Of the test.
        arguments: The launcher's arguments, the program and its own.
        env: Variables set for the launcher; None takes one away.
        front_door: Which of the launcher's commands: run, launch, or script (the one on PATH).
        surroundings: What the shell that starts the launcher does before.
        exit_code: elastic-run's, where it is the failed worker's and torchrun's is 1.
        stdin: What comes on the launcher's stdin; None is /dev/null.
        is_merged: Whether stderr goes where stdout goes.
        on_terminal: Whether stdin, stdout and stderr are a terminal.
        stops: Whether the launcher gets SIGTERM when all workers wait for it.
        workers: How many workers wait then.
    """

    name: str
    arguments: tuple[str, ...]
    env: dict[str, str | None] = field(default_factory=dict)
    front_door: str = "run"
    surroundings: str = ""
    exit_code: int | None = None
    stdin: str | None = None
    is_merged: bool = False
    on_terminal: bool = False
    stops: bool = False
    workers: int = 1


def _case(name: str, line: str, *more: str, **options: object) -> Case:
    """Make a case whose arguments have no blanks in them but for those in `more`."""
    return Case(name, (*line.split(), *more), **options)  # type: ignore[arg-type] # passed through as they are


_SIZE = (
    _case("plain", "probe.py"),
    _case("three workers, underscores", "--nproc_per_node 3 --max_restarts=0 probe.py"),
    _case("flags cut short", "--nproc-per 2 --standal --max-r 1 --ro cut probe.py"),
    _case(
        "one node, said",
        "--nnodes=1:1 --node-rank=0 --local-addr=127.0.0.1 --start-method=fork --monitor-interval=0.05 probe.py",
    ),
    _case("old front door", "--nproc-per-node=2 probe.py --x", front_door="launch"),
    _case("old front door, --use-env", "--use-env --nproc_per_node=2 probe.py --x", front_door="launch"),
    _case("old front door, module", "--nproc_per_node=2 -m packaged.worker --x", front_door="launch"),
    _case("old front door, program", "--use_env --no_python --nproc_per_node=2 ./probe.sh --x", front_door="launch"),
    _case("old front door, program without --use-env", "--no_python ./probe.sh", front_door="launch", exit_code=2),
    _case(
        "old front door, old flags",
        "--nnodes=1 --node_rank=0 --nproc_per_node=2 --master_addr=127.0.0.1 --master_port={port} probe.py --x",
        front_door="launch",
    ),
    _case("command on PATH", "--nproc-per-node=2 probe.py --x", front_door="script"),
)

_RENDEZVOUS = (
    _case(
        "standalone",
        "--standalone --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=nowhere:1 --rdzv-id=mine probe.py",
    ),
    _case("static, named host", "--master-addr=localhost --master-port={port} --rdzv-id=job7 probe.py"),
    _case("static, endpoint", "--rdzv-backend=static --rdzv-endpoint=127.0.0.1:{port} --rdzv-conf=timeout=60 probe.py"),
    _case("c10d, any port", "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --rdzv-id=job7 probe.py"),
    _case(
        "c10d, settings",
        "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=job7 --nproc-per-node=2 "
        "--rdzv-conf=join_timeout=60,last_call_timeout=1,is_host=1 probe.py",
    ),
    _case("rank 0 serves", "--nproc-per-node=2 probe.py", env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
)

_PROGRAM = (
    _case("module", "-m packaged.worker --flag"),
    _case("directory", "folder --flag"),
    _case("script of elsewhere", "../probe.py", surroundings="cd folder;"),
    _case("no Python", "--no-python ./probe.sh --flag ${local_rank}"),
    _case("run path", "--run-path probe.py --flag"),
    _case("interpreter", "probe.py", env={"PYTHON_EXEC": "{out}/python"}),
    _case(
        "local rank in arguments",
        "--nproc-per-node=2 probe.py --at=${local_rank} $local_rank $$ ${rank} ${local_rank}x",
    ),
    _case("awkward arguments", "probe.py", *_AWKWARD),
    _case("dashes in front", "--nproc-per-node=2 -- probe.py -- --x --"),
    _case("dashes behind", "--nproc-per-node=2 probe.py -- --x -- y"),
    _case("launcher's flags behind the script", "probe.py --nproc-per-node=3 --help --standalone -t 3 --nnodes=x"),
)

_ENVIRONMENT = (
    _case("variables for flags", "probe.py", env={"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "4", "PET_ROLE": "r"}),
    _case(
        "flags heartbeat variables",
        "--nproc-per-node=1 --role=mine --tee=0 probe.py",
        env={"PET_NPROC_PER_NODE": "2", "PET_ROLE": "theirs", "PET_TEE": "3"},
    ),
    _case("variables for switches", "packaged", env={"PET_MODULE": "1", "PET_STANDALONE": "1", "PET_RUN_PATH": "0"}),
    _case(
        "threads chosen, devices for all",
        "--nproc-per-node=2 probe.py",
        env={"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "1,0"},
    ),
    _case(
        "devices, none named", "--nproc-per-node=2 --virtual-local-rank probe.py", env={"CUDA_VISIBLE_DEVICES": None}
    ),
    _case("devices, named", "--nproc-per-node=2 --virtual-local-rank probe.py", env={"CUDA_VISIBLE_DEVICES": "5, 3,1"}),
    _case(
        "within a worker",
        "--nproc-per-node=2 probe.py",
        env={
            "RANK": "7",
            "LOCAL_RANK": "3",
            "WORLD_SIZE": "9",
            "MASTER_ADDR": "elsewhere",
            "MASTER_PORT": "1",
            "TORCHELASTIC_RUN_ID": "outer",
            "TORCHELASTIC_RESTART_COUNT": "5",
            "TORCHELASTIC_TIMER_FILE": "outer.timer",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        },
    ),
)

_PROCESS = (
    _case(
        "surroundings",
        "--nproc-per-node=2 probe.py",
        surroundings="umask 027; ulimit -S -n 200; ulimit -S -s 4096; ulimit -c 0; renice -n 5 $$ >/dev/null; "
        "taskset -pc 0 $$ >/dev/null; exec 5</dev/null 9>/dev/null; trap '' USR1 ALRM;",
    ),
    _case("nohup", "probe.py", surroundings='trap "" HUP;'),
    _case("stdin", "probe.py", env={"PARITY_READS_STDIN": "1"}, stdin="one\ntwo"),
    _case("streams merged", "--nproc-per-node=2 probe.py", is_merged=True),
    _case("terminal", "probe.py", on_terminal=True),
)

_OUTPUT = (
    _case("redirects, map", "--nproc-per-node=2 -r 0:1,1:2 --log-dir={logs} probe.py"),
    _case(
        "tee", "--nproc-per-node=2 --tee=3 --role=trainer --log-dir={logs} --rdzv-id=job7 --master-port={port} probe.py"
    ),
    _case("tee, map", "--nproc-per-node=2 -t 0:3,1:1 --log_dir={logs} probe.py"),
    _case("tee and redirects", "--nproc-per-node=2 -t1 -r2 --log-dir={logs} probe.py"),
    _case("some ranks, tee", "--nproc-per-node=2 --tee=3 --local-ranks-filter=1 --log-dir={logs} probe.py"),
    _case("some ranks", "--nproc-per-node=2 --local-ranks-filter=0 --log-dir={logs} probe.py"),
    _case("some ranks, redirects", "--nproc-per-node=2 -r 2 --local_ranks_filter=0 --log-dir={logs} probe.py"),
    _case(
        "prefix",
        "--nproc-per-node=2 --tee=3 --role=r probe.py",
        env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}/$local_rank ${other} $$>"},
    ),
    _case(
        "filters",
        "--nproc-per-node=2 --tee=3 --log-dir={logs} --duplicate-stdout-filters=0.0,nothing "
        "--duplicate_stderr_filters=1.0 probe.py",
    ),
    _case("no log directory", "--nproc-per-node=2 --log-dir=/dev/null probe.py"),
)

_FAILURE = (
    _case("fails with 1", "probe.py", env={"PARITY_END": "0.0=exit:1"}),
    _case(
        "fails with 7", "--nproc-per-node=2 --log-dir={logs} probe.py", env={"PARITY_END": "1.0=exit:7"}, exit_code=7
    ),
    _case("killed", "--nproc-per-node=2 probe.py", env={"PARITY_END": "0.0=signal:SIGKILL"}, exit_code=137),
    _case("raises", "--nproc-per-node=2 -r2 --log-dir={logs} probe.py", env={"PARITY_END": "1.0=raise"}),
    _case("no Python fails", "--no-python sh -c", "exit 9", exit_code=9),
    _case("restarted", "--nproc-per-node=2 --max-restarts=2 probe.py", env={"PARITY_END": "1.0=exit:7"}),
    _case(
        "restarted in vain",
        "--nproc-per-node=2 --max-restarts=1 -t 3 --log-dir={logs} probe.py",
        env={"PARITY_END": "1.0=exit:7 0.1=exit:8"},
        exit_code=8,
    ),
    _case(
        "stopped", "--nproc-per-node=2 probe.py", env={"PARITY_END": "*.0=wait"}, stops=True, workers=2, exit_code=143
    ),
    _case(
        "recorded by torch",
        "--log-dir={logs} recorded_by_torch.py",
        env={"PARITY_END": "0.0=raise", "PARITY_KEEPS_TRACEBACK": "1", "TORCHELASTIC_ERROR_FILE": "{out}/parent.json"},
    ),
    _case(
        "recorded by elastic-run",
        "--log-dir={logs} recorded_by_elastic_run.py",
        env={"PARITY_END": "0.0=raise", "PARITY_KEEPS_TRACEBACK": "1", "TORCHELASTIC_ERROR_FILE": "{out}/parent.json"},
    ),
    _case(
        "parent's error file without a record",
        "probe.py",
        env={"PARITY_END": "0.0=exit:7", "TORCHELASTIC_ERROR_FILE": "{out}/parent.json"},
        exit_code=7,
    ),
)

_USAGE = (
    _case("unknown flag", "--nprocs-of-node=2 probe.py"),
    _case("wrong size", "--nnodes=3:1 probe.py", exit_code=2),
    _case("no such script", "absent.py", exit_code=2),
)

CASES = (*_SIZE, *_RENDEZVOUS, *_PROGRAM, *_ENVIRONMENT, *_PROCESS, *_OUTPUT, *_FAILURE, *_USAGE)

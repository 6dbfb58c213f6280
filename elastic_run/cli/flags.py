"""The command line as data: every flag with its values, its default, its environment form and its help.

The parser, the help and the reference in the docs are made from these tables, so that they can't disagree. The order is
that of the help. To add a flag: see CONTRIBUTING.md. A setting of jobs of several nodes is a row here, and a field of
`JobConfig` or `NodeConfig` of the same name, where its default stands.
"""

from __future__ import annotations

from elastic_run import contract
from elastic_run.cli import values as read
from elastic_run.core.config import JobConfig, NodeConfig
from elastic_run.records import fields
from elastic_run.rendezvous.api import BACKENDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PROGRAM, CONFIGURATION, HOSTS = "Program to run", "Configuration", "Start on several hosts"
#: The group of the flags that print a text and start no job.
ABOUT = "About"
#: Defaults of the settings of several nodes, which stand in these two records.
_CONFIGURED = {field.name: field.default for config in (JobConfig, NodeConfig) for field in fields(config)}
_BACKENDS = [name for name, backend in BACKENDS.items() if backend.has_store]


class Flag:
    """One flag.

    Args:
        names: Its spellings with hyphens, the long one last; the one with underscores is added.
        values: Form of its value in the help; empty for a switch. TIME is a number of seconds, or a number with
            one of the units s, m, h and d. Without `parse`, words between bars are the only values.
        parse: From the text to the value; raises ValueError.
        default: Its value when neither flag nor variable is given; not for a field of `JobConfig` or `NodeConfig`.
        has_variable: Whether the variable PET_<NAME> sets it too.
        is_ours: Whether torchrun does not have it; then it never makes an abbreviation of torchrun's flags ambiguous.
    """

    def __init__(
        self,
        names: str,
        values: str = "",
        parse: Callable[[str], Any] | None = None,
        *,
        default: object = None,
        has_variable: bool = True,
        is_ours: bool = False,
    ) -> None:
        *short, name = names.split(", ")
        self.name = name
        self.dest = name[2:].replace("-", "_")
        self.spellings = tuple(dict.fromkeys((*short, name, f"--{self.dest}")))
        self.group = ""  # set by `_group`
        self.text = _TEXTS[name]
        self.values = values
        self.is_switch = not values
        self.default = False if self.is_switch else _CONFIGURED.get(self.dest, default)
        self.default_text = _DEFAULT_TEXTS.get(name, "")
        words = read.one_of(*values.split("|")) if "|" in values else str
        self.parse = read.switch if self.is_switch else parse or words
        self.variable = contract.ENV_FLAG_PREFIX + self.dest.upper() if has_variable else ""
        self.is_ours = is_ours

    @property
    def heading(self) -> str:
        """Its spellings with hyphens, and the form of its value."""
        return f"{', '.join(name for name in self.spellings if '_' not in name)} {self.values}".rstrip()

    @property
    def prints_text(self) -> bool:
        """Whether it prints a text and starts no job."""
        return self.group == ABOUT


def _group(title: str, *flags: Flag) -> tuple[Flag, ...]:
    for flag in flags:
        flag.group = title
    return flags


def _faults(text: str) -> str:
    if text:
        from elastic_run.cli.faults import read_faults

        read_faults(text)
    return text


_TEXTS = {
    "--nnodes": "Number of nodes, or the minimum and the maximum number of nodes of an elastic job.",
    "--nproc-per-node": "Number of workers on this node. gpu, xpu and the name of a device type that a package adds "
    "to torch (npu) start one worker per visible device. cpu starts one worker per CPU that this process may use "
    "(affinity and cgroup limit). auto starts one worker per device, or one per CPU if there is no device.",
    "--node-rank": "Rank of this node, from 0. With --rdzv-backend=static the rank is fixed. With other backends it "
    "is a preference; 0 and -1 mean no preference.",
    "--hosts": "Start the job on these hosts, each through ssh: a list (node1,node2:8), or a file with a host in each "
    "line. SLOTS is the number of workers there, by default that of --nproc-per-node. Directory and interpreter are "
    "those of this command (docs/several-nodes.md).",
    "--ssh-options": "With --hosts: options for each ssh, such as '-p 2222 -J gateway'.",
    "--hosts-env": "With --hosts: more variables that go along to the hosts; NAME* stands for all that begin so.",
    "--module": "SCRIPT is the name of a module, which each worker runs as python -m does.",
    "--no-python": "SCRIPT is a program, which each worker executes without Python. The program is looked up on PATH.",
    "--run-path": "Run SCRIPT with runpy.run_path, in workers that use the same Python as elastic-run. PYTHON_EXEC, "
    "-m and --no-python then have no effect.",
    "--start-method": "Start method of workers that are Python functions. It has no effect on the command line, "
    "where workers are commands.",
    "--use-env": "Do not add --local-rank=N to the arguments of the script; the script reads LOCAL_RANK.",
    "--local-rank-underscore": "Add --local_rank=N in place of --local-rank=N, for scripts written before torch 2.",
    "--role": "Name of the workers' role. It appears in the variable ROLE_NAME, in line prefixes and in reports.",
    "--virtual-local-rank": "Each worker sees only its own GPU, as device 0, and gets LOCAL_RANK=0.",
    "--numa-binding": "Bind each worker to CPUs near its GPU or other accelerator. node: all CPUs of the device's "
    "NUMA node. socket: all CPUs of its socket. exclusive: an equal share of the NUMA node's cores. core-complex: "
    "the cores of one last-level cache.",
    "--omp-threads": "OpenMP threads of each worker (OMP_NUM_THREADS). auto: an equal share of the cores that this "
    "process may use (affinity and cgroup limit). The variable OMP_NUM_THREADS, if set, overrides this flag.",
    "--worker-store": "Process that serves the workers' store (MASTER_ADDR:MASTER_PORT). agent: elastic-run itself. "
    "rank0 or torch: torch's own server, in the worker with rank 0. auto: agent, or rank0 if "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.",
    "--preload": "Import these modules (torch) in one process on this node, and fork each worker from it, so that "
    "workers start and restart without the import. auto: the large modules that the script imports.",
    "--standalone": "Run a job on this node only, on a free port. The other flags of this group, except --rdzv-id, "
    "then have no effect. A job of one node without any flag of this group runs in the same way.",
    "--rdzv-backend": f"Rendezvous backend: {', '.join(_BACKENDS)}, or the name of an installed plug-in "
    "(entry-point group torchrun.handlers). etcd and etcd-v2 need pip install 'elastic-run[etcd]'.",
    "--rdzv-endpoint": "Address where the nodes meet. c10d: the node at the first endpoint coordinates the job; if "
    "this node is lost, the node at the next endpoint takes over. etcd: the members of the etcd cluster.",
    "--rdzv-id": "Id of the job, the same on all its nodes. Jobs that use the same etcd at the same time need "
    "different ids.",
    "--rdzv-conf": "Settings of the backend, such as join_timeout=600; docs/several-nodes.md lists them.",
    "--rdzv-token-file": "File with a secret that all nodes of the job share. A node without the secret is refused.",
    "--on-split": "Only for c10d with several endpoints and two nodes: action of a node that cannot reach the other "
    "node, and does not know whether the other node still runs. stop: stop the workers and wait for the other node, "
    "up to join_timeout. continue: run on this node alone.",
    "--fence-after": "Time at which a node that cannot reach its job stops its workers. lease: after one lease (6 s "
    "by default), so that the workers write no checkpoints while the other nodes go on without this node. never: "
    "only when the node gives up, or learns that the job went on without it.",
    "--master-addr": "Address of node 0; only for --rdzv-backend=static.",
    "--master-port": "Port of the workers' store on node 0; only for --rdzv-backend=static.",
    "--local-addr": "Address of this node, by which other nodes reach it.",
    "--max-restarts": "Maximum number of restarts. After the failure of a worker, all workers of the job are "
    "restarted.",
    "--restart-window": "Maximum number of restarts in any PERIOD (5/1h). The total number of restarts then has no "
    "limit, unless --max-restarts is given as well.",
    "--min-uptime": "End the job if the same failure happens twice in a row, both times within TIME after the start "
    "of the workers. Without this flag, only errors that a restart cannot cure, such as ImportError and SyntaxError, "
    "end the job in this way.",
    "--no-restart-exit-codes": "Exit codes of a worker that end the job without a restart (3,64-78). 128+n stands "
    "for signal n.",
    "--max-backoff": "Maximum pause before a restart. The first restart is immediate. Pauses grow while workers fail "
    "early.",
    "--membership-window": "Maximum number of lost or added nodes in any PERIOD. These changes do not count as "
    "restarts. Above the maximum, a lost node ends the job, and a new node has to wait.",
    "--scale-up-delay": "Time that a running job waits for more nodes after the first new node, so that all of them "
    "join in one round.",
    "--scale-up-signal": "Signal that tells the workers to save their state before they are stopped for new nodes.",
    "--scale-up-grace": "Time between --scale-up-signal and the stop of the workers.",
    "--health-check": "Command that must succeed (exit code 0) before this node takes part in a round: before the "
    "first one, and again after each failure or change of nodes. If it fails, this node leaves the job, which goes "
    f"on without it; the exit code is {contract.EXIT_UNHEALTHY}. No shell interprets the command, unless it is sh -c "
    "'...'.",
    "--health-check-timeout": "Time after which --health-check and its processes are killed, and the check counts as "
    "failed.",
    "--exclude-after": "Exclude a node on which N failures of the job have begun in any PERIOD (2/6h), unless fewer "
    "nodes than the minimum of --nnodes would be left. Equal failures (exit code, exception, place) do not count if "
    "more than half of them began on other nodes, or if every node had one. The node leaves with exit code "
    f"{contract.EXIT_EXCLUDED}.",
    "--exclude-exit-codes": "Exit codes of a worker that exclude its node at once; the failure uses no restart. "
    "128+n stands for signal n.",
    "--exit-barrier-timeout": "Maximum time that a node waits at the end of the job until the other nodes know the "
    "result; at least 2s.",
    "--signals-to-handle": "Signals that stop the job. They are passed on to the workers, which get the time of "
    "--shutdown-timeout to end. While workers run, SIGQUIT stops the job only if it comes twice within 2 s; the "
    "first SIGQUIT shows where each rank is. A signal that was ignored when elastic-run started (nohup) stays "
    "ignored.",
    "--forward-signals": "Signals that are passed on to all workers without stopping the job (SIGUSR1,SIGUSR2). "
    "Without this flag, SIGUSR1 and SIGUSR2 are passed on only to the workers that handle them.",
    "--shutdown-timeout": "Time that workers get to end after a signal before they are killed, and after an "
    "exception that has ended their main thread before they count as failed.",
    "--kill-background-processes": "After a success, end the processes that workers left running in the background. "
    "Without this flag they keep running, as under torchrun. After a failure, a stop or a restart they are always "
    "ended.",
    "--keep-state": "Keep the state of the training in memory of the launcher, so that it goes on from the last step "
    "after a restart: 64GB for all workers of the node together, two generations each; auto: half of the memory that "
    "is left. The script uses KeptState or MemoryWriter of elastic_run.worker (docs/kept-state.md).",
    "--keep-state-copies": "With --keep-state and several nodes: 1 keeps a copy of each node's state on the next "
    "node, so that the state outlives a node too. Copies take half of --keep-state.",
    "--keep-state-bandwidth": "With --keep-state-copies: the most bytes a second at which copies come to this node "
    "(500MB); as fast as the network unless given.",
    "--keep-state-dir": "With --keep-state: if the job fails or is stopped, write the newest state to DIR/latest, a "
    "checkpoint of torch.distributed.checkpoint. It may take --shutdown-timeout.",
    "--requeue": "On Slurm: after SIGTERM has stopped the job (#SBATCH --signal=TERM@120), ask Slurm to run it "
    f"again, and end with exit code {contract.EXIT_REQUEUED}. The job is requeued at most N times; requeues that "
    "elastic-run did not ask for count as well. A cancelled job is not run again.",
    "--flight-recorder": "Switch on torch's flight recorder, which records the last collectives of each worker. "
    "After a failure or a stop the report says which rank did not join which collective; the records (dumps) are in "
    "the log directory of the attempt. While the job runs, a line names a rank for which the others wait again and "
    "again. elastic-run sets TORCH_FR_BUFFER_SIZE and TORCH_FR_DUMP_TEMP_FILE unless you "
    "have set them.",
    "--hang-timeout": "If no rank makes progress for this time (10m), the job counts as hanging. Output, heartbeats, "
    "collectives, changed stacks and computation are progress; docs/troubleshooting.md has all rules. auto: 10 times "
    "the longest time without progress in this round so far, at least 5 min. The flag also switches on the flight "
    "recorder.",
    "--hang-action": "Action after a hang. In each case, lines on the console say where each rank is. report: the "
    f"job goes on. restart: uses one of --max-restarts. fail: ends the job with exit code {contract.EXIT_HUNG}.",
    "--inject-fault": "Faults to inject, to test how the job reacts: kill@30s:rank=1 kills the worker with global "
    "rank 1 after 30 s. docs/fault-injection.md describes all faults, such as stop, signal=NAME, raise, exit=CODE, "
    "sleep, import=MODULE, oom, slow and freeze.",
    "--health-port": "Port at which this node answers health checks over HTTP, on all interfaces: /healthz says "
    "whether the agent is alive, /readyz whether its workers run. Both answer before the nodes have found each "
    "other. 0 takes a free port.",
    "--metrics-port": "Port at which this node serves metrics for Prometheus at /metrics, on all interfaces: "
    "restarts, failures by cause, durations, times without output, goodput. 0 takes a free port. The package "
    "prometheus-client is required.",
    "--monitor-interval": "Interval at which an agent of another package polls its workers. elastic-run's own agent "
    "does not poll, since the kernel reports each end of a worker.",
    "--failure-rules": "TOML file with your own hints for the closing report: each [[rule]] has match (a regular "
    "expression), help (the hint) and, optionally, decision (restart, stop or exclude this node). These rules come "
    "before those of elastic-run.",
    "--tee": "Write the workers' output to log files and to the console, where each line gets a prefix. 0: none, 1: "
    "stdout, 2: stderr, 3: both. LOCAL_RANK:VALUE,... sets the value for some workers only (0:3,1:2).",
    "--redirects": "Write the workers' output to log files and not to the console. The values are those of --tee.",
    "--log-dir": "Directory for log files. Without --tee and --redirects, the files have a copy of all output. Each "
    "launcher makes a new directory in DIR, so that all nodes of a job may share DIR.",
    "--local-ranks-filter": "On the console, show only the output of these local ranks. Log files have the output of "
    "all ranks.",
    "--log-line-prefix-template": "Prefix of the lines that --tee shows, with ${role_name}, ${local_rank}, ${rank}, "
    "${hostname} and ${restart_count}.",
    "--duplicate-stdout-filters": "Copy lines of stdout that contain one of these texts to one file for all ranks; "
    "only for ranks whose stdout has --tee. Two commas stand for a comma in a text.",
    "--duplicate-stderr-filters": "Copy lines of stderr that contain one of these texts to one file for all ranks; "
    "only for ranks whose stderr has --tee. Two commas stand for a comma in a text.",
    "--no-capture": "Do not pass the workers' stderr through elastic-run. Then the report shows the exception of a "
    "failed worker only if --tee or --redirects keeps its stderr in a file, or if the script uses @record.",
    "--no-fold": "Show lines of stderr that several workers of a node write as often as they are written, and not once "
    "behind their ranks.",
    "--logs-specs": "Installed plug-in that decides the destination of the workers' output (entry-point group "
    "torchrun.logs_specs).",
    "--event-log-handler": "Destination of the job's events: null, console, dynamic_rendezvous, or an installed "
    "plug-in (entry-point group elastic_run.event_handlers).",
    "--events-file": "File to which this node appends the events of the job, one JSON object per line. With "
    "--log-dir the same lines are in events.jsonl.",
    "--config": "TOML file with values of flags: a key is the name of a flag without the leading dashes "
    "(max-restarts = 3). A flag and its variable override the file; the file overrides the values that the scheduler "
    "sets.",
    "--explain": "Print each value that is not a default, its origin, and the command and the environment of the "
    "workers; then exit. Nothing is started.",
    "--explain-all": "As --explain, but print all values, also the defaults.",
    "--help": "Print the most used flags, and exit.",
    "--help-all": "Print all flags, their defaults and variables, and the exit codes, and exit.",
    "--print-completion": "Print a script with which this shell completes elastic-run's flags and commands, and "
    "exit. The package shtab is required; it may know more shells.",
    "--version": "Print the version, and exit.",
}

_DEFAULT_TEXTS = {
    "--omp-threads": "1 for several workers on this node, as with torchrun",
    "--rdzv-backend": "static; or c10d, coordinated by the first node, for a job of several nodes to which none of "
    "--rdzv-endpoint, --master-addr, --master-port and --node-rank is given",
    "--rdzv-token-file": f"the variable {contract.ENV_RDZV_TOKEN}; if it is not set, a job without --rdzv-endpoint "
    "makes a new secret, and other jobs have none",
    "--master-port": f"{contract.DEFAULT_MASTER_PORT}, or a free port for a job of one node",
    "--local-addr": "the address of the interface to the endpoint",
    "--exit-barrier-timeout": f"the variable {contract.ENV_EXIT_BARRIER_TIMEOUT}, or "
    f"{contract.DEFAULT_EXIT_BARRIER_TIMEOUT}s",
    "--shutdown-timeout": f"the variable {contract.ENV_SHUTDOWN_TIMEOUT}, or {contract.DEFAULT_SHUTDOWN_TIMEOUT}s",
    "--hang-timeout": "off",
    "--log-dir": "a temporary directory for --tee and --redirects, otherwise no log files",
    "--local-ranks-filter": "all ranks",
    "--log-line-prefix-template": f"the variable {contract.ENV_LOG_LINE_PREFIX_TEMPLATE}, or "
    f"{contract.DEFAULT_PREFIX_TEMPLATE}",
}

FLAGS: tuple[Flag, ...] = (
    *_group(
        "Size of the job",
        Flag("--nnodes", "MIN[:MAX]", read.nodes, default="1:1"),
        Flag("--nproc-per-node", "N|auto|cpu|gpu|xpu", read.worker_count, default="1"),
        Flag("--node-rank", "RANK", read.node_rank, default=0),
    ),
    *_group(
        HOSTS,
        Flag("--hosts", "HOST[:SLOTS],...|FILE", read.host_list, default=(), is_ours=True),
        Flag("--ssh-options", "OPTIONS", read.command, default="", is_ours=True),
        Flag("--hosts-env", "NAME,...", default="", is_ours=True),
    ),
    *_group(
        PROGRAM,
        Flag("-m, --module"),
        Flag("--no-python"),
        Flag("--run-path"),
        Flag("--start-method", "spawn|fork|forkserver", default="spawn"),
    ),
    *_group(
        "Workers",
        Flag("--role", "NAME", read.short_name, default="default"),
        Flag("--virtual-local-rank"),
        Flag("--numa-binding", "node|socket|exclusive|core-complex", has_variable=False),
        Flag("--omp-threads", "N|auto", read.threads, is_ours=True),
        Flag("--worker-store", "auto|agent|rank0|torch", default="auto", is_ours=True),
        Flag("--preload", "MODULE,...", read.preloaded, default="", is_ours=True),
    ),
    *_group(
        "Rendezvous of several nodes",
        Flag("--standalone"),
        Flag("--rdzv-backend", "NAME", default="static"),
        Flag("--rdzv-endpoint", "HOST[:PORT],...", default=""),
        Flag("--rdzv-id", "ID", read.job_id, default=contract.NO_RUN_ID),
        Flag("--rdzv-conf", "KEY=VALUE,...", read.key_values, default=""),
        Flag("--rdzv-token-file", "FILE", is_ours=True),
        Flag("--on-split", "stop|continue", is_ours=True),
        Flag("--fence-after", "lease|never", is_ours=True),
        Flag("--master-addr", "HOST", read.host_if_given, default="127.0.0.1"),
        Flag("--master-port", "PORT", read.port),
        Flag("--local-addr", "HOST", read.host_if_given),
    ),
    *_group(
        "Restarts",
        Flag("--max-restarts", "N", read.count),
        Flag("--restart-window", "N/PERIOD", read.window, is_ours=True),
        Flag("--min-uptime", "TIME", read.duration, is_ours=True),
        Flag("--no-restart-exit-codes", "CODE,CODE-CODE,...", read.exit_codes, is_ours=True),
        Flag("--max-backoff", "TIME", read.duration, is_ours=True),
        Flag("--membership-window", "N/PERIOD", read.window, is_ours=True),
        Flag("--scale-up-delay", "TIME", read.duration, is_ours=True),
        Flag("--scale-up-signal", "SIGNAL", read.one_signal, is_ours=True),
        Flag("--scale-up-grace", "TIME", read.duration, is_ours=True),
    ),
    *_group(
        "Health of nodes",
        Flag("--health-check", "COMMAND", read.command, is_ours=True),
        Flag("--health-check-timeout", "TIME", read.positive_duration, is_ours=True),
        Flag("--exclude-after", "N/PERIOD", read.window, is_ours=True),
        Flag("--exclude-exit-codes", "CODE,CODE-CODE,...", read.exit_codes, is_ours=True),
    ),
    *_group(
        "Signals and stopping",
        Flag("--exit-barrier-timeout", "TIME", read.duration, is_ours=True),
        Flag("--signals-to-handle", "SIGNAL,...", read.signal_names, default=contract.DEFAULT_SIGNALS_TO_HANDLE),
        Flag("--forward-signals", "SIGNAL,...", read.forwarded_signals, default="", is_ours=True),
        Flag("--shutdown-timeout", "SECONDS", read.whole_seconds),
        Flag("--kill-background-processes", is_ours=True),
        Flag("--keep-state", "SIZE", read.memory_size, default="", is_ours=True),
        Flag("--keep-state-copies", "0|1", read.zero_or_one, default=0, is_ours=True),
        Flag("--keep-state-bandwidth", "SIZE", read.memory_size, default="", is_ours=True),
        Flag("--keep-state-dir", "DIR", default="", is_ours=True),
        Flag("--requeue", "N", read.count, is_ours=True),
    ),
    *_group(
        "Monitoring and fault injection",
        Flag("--flight-recorder", is_ours=True),
        Flag("--hang-timeout", "TIME", read.hang_timeout, is_ours=True),
        Flag("--hang-action", "report|restart|fail", default="report", is_ours=True),
        Flag("--inject-fault", "FAULT,...", _faults, default="", is_ours=True),
        Flag("--health-port", "PORT", read.port, is_ours=True),
        Flag("--metrics-port", "PORT", read.port, is_ours=True),
        Flag("--monitor-interval", "SECONDS", read.positive_seconds, default=0.1),
    ),
    *_group(
        "Output and logs",
        Flag("--failure-rules", "FILE", default="", is_ours=True),
        Flag("-t, --tee", "WHICH", read.output_choice, default="0"),
        Flag("-r, --redirects", "WHICH", read.output_choice, default="0"),
        Flag("--log-dir", "DIR"),
        Flag("--local-ranks-filter", "RANK,...", read.rank_list, default=""),
        Flag("--log-line-prefix-template", "TEXT", default=""),
        Flag("--duplicate-stdout-filters", "TEXT,...", read.text_list, default=[]),
        Flag("--duplicate-stderr-filters", "TEXT,...", read.text_list, default=[]),
        Flag("--no-capture", is_ours=True),
        Flag("--no-fold", is_ours=True),
        Flag("--logs-specs", "NAME", has_variable=False),
        Flag("--event-log-handler", "NAME", default="null"),
        Flag("--events-file", "FILE", default="", is_ours=True),
    ),
    *_group(
        CONFIGURATION,
        Flag("--config", "FILE", is_ours=True),
        Flag("--explain", has_variable=False, is_ours=True),
        Flag("--explain-all", has_variable=False, is_ours=True),
    ),
    *_group(
        ABOUT,
        Flag("-h, --help", has_variable=False),
        Flag("--help-all", has_variable=False, is_ours=True),
        Flag("--print-completion", "bash|zsh|tcsh", has_variable=False),
        Flag("--version", has_variable=False, is_ours=True),
    ),
)

#: The flags of the legacy front door, `python -m elastic_run.launch`; torch's has only --use-env beside its others.
LEGACY_FLAGS = (
    *FLAGS,
    *_group(
        PROGRAM,
        Flag("--use-env", has_variable=False),
        Flag("--local-rank-underscore", has_variable=False, is_ours=True),
    ),
)

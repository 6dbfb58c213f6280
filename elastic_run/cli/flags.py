"""The command line as data: every flag with its values, its default, its environment form and its help.

The parser, the help text and the reference in the docs are made from this table, so that they can't disagree. The order
is that of the help. `is_ours` marks flags that torchrun does not have; they never make an abbreviation of one of
torchrun's flags ambiguous. The file is longer than others because a table is easiest to read in one piece.

To add a flag: see CONTRIBUTING.md. A setting of jobs of several nodes is a row here and a field of `JobConfig` or
`NodeConfig` with the same name, where its default stands.
"""

from __future__ import annotations

from elastic_run import contract
from elastic_run.cli import values as _values
from elastic_run.core.job.config import JobConfig
from elastic_run.core.job.node_config import NodeConfig
from elastic_run.records import fields
from elastic_run.rendezvous.backend_table import BACKENDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NODES = "Size of the job"
RENDEZVOUS = "Rendezvous of several nodes"
PROGRAM = "Program to run"
RESTARTS = "Restarts"
HEALTH = "Health of nodes"
STOPPING = "Signals and stopping"
MONITORING = "Monitoring and fault injection"
OUTPUT = "Output and logs"
WORKERS = "Workers"
CONFIGURATION = "Configuration"
ABOUT = "About"
_NAMES_OF_BACKENDS = [name for name, backend in BACKENDS.items() if backend.has_store]


#: Defaults of the settings of several nodes, which stand in these two records.
_CONFIGURED = {field.name: field.default for config in (JobConfig, NodeConfig) for field in fields(config)}


def _check_faults(text: str) -> str:
    if text:
        from elastic_run.cli.faults import read_faults

        read_faults(text)
    return text


class Flag:
    """One flag.

    Args:
        names: Its spellings with hyphens, the long one last; the one with underscores is added.
        group: Heading under which the help shows it.
        text: Its meaning.
        values: Form of its value in the help; empty for a switch. TIME is a number of seconds, or a number with
            one of the units s, m, h and d.
        default: Its value when neither flag nor variable is given; not for a field of `JobConfig` or `NodeConfig`.
        default_text: Description of the default, if it depends on something else.
        parse: From the text to the value; raises ValueError.
        has_variable: Whether the variable PET_<NAME> sets it too.
        is_ours: Whether torchrun does not have it.
        other_variable: A variable without that prefix whose value is taken if neither flag nor PET_ variable is given.
        implied: Text of its value if none is given. The next word is its value only if it has digits alone.
    """

    def __init__(  # noqa: PLR0913 - the columns of a table
        self,
        *names: str,
        group: str,
        text: str,
        values: str = "",
        default: object = None,
        default_text: str = "",
        parse: Callable[[str], Any] = str,
        has_variable: bool = True,
        is_ours: bool = False,
        other_variable: str = "",
        implied: str = "",
    ) -> None:
        self.name = name = names[-1]
        self.dest = name[2:].replace("-", "_")
        underscored = "--" + self.dest
        self.spellings = names if underscored == name else (*names, underscored)
        self.group = group
        self.text = text
        self.values = values
        self.is_switch = not values
        self.default = False if self.is_switch else _CONFIGURED.get(self.dest, default)
        self.default_text = default_text
        self.parse = _values.switch if self.is_switch else parse
        self.variable = contract.ENV_FLAG_PREFIX + self.dest.upper() if has_variable else ""
        self.is_ours = is_ours
        self.other_variable = other_variable
        self.implied = implied
        #: Whether it prints a text and starts no job.
        self.prints_text = group == ABOUT


FLAGS: tuple[Flag, ...] = (
    Flag(
        "--nnodes",
        group=NODES,
        values="MIN[:MAX]",
        default="1:1",
        parse=_values.nodes,
        text="Number of nodes, or the minimum and the maximum number of nodes of an elastic job.",
    ),
    Flag(
        "--nproc-per-node",
        group=NODES,
        values="N|auto|cpu|gpu|xpu",
        default="1",
        parse=_values.worker_count,
        text="Number of workers on this node. gpu, xpu and the name of a device type that a package adds to torch "
        "(npu) start one worker per visible device. cpu starts one worker per CPU that this process may use (affinity "
        "and cgroup limit). auto starts one worker per device, or one per CPU if there is no device.",
    ),
    Flag(
        "--node-rank",
        group=NODES,
        values="RANK",
        default=0,
        parse=_values.node_rank,
        text="Rank of this node, from 0. With --rdzv-backend=static the rank is fixed. With other backends it is a "
        "preference; 0 and -1 mean no preference.",
    ),
    Flag(
        "-m",
        "--module",
        group=PROGRAM,
        text="SCRIPT is the name of a module, which each worker runs as python -m does.",
    ),
    Flag(
        "--no-python",
        group=PROGRAM,
        text="SCRIPT is a program, which each worker executes without Python. The program is looked up on PATH.",
    ),
    Flag(
        "--run-path",
        group=PROGRAM,
        text="Run SCRIPT with runpy.run_path, in workers that use the same Python as elastic-run. PYTHON_EXEC, -m and "
        "--no-python then have no effect.",
    ),
    Flag(
        "--start-method",
        group=PROGRAM,
        values="spawn|fork|forkserver",
        default="spawn",
        parse=_values.one_of("spawn", "fork", "forkserver"),
        text="Start method of workers that are Python functions. It has no effect on the command line, where workers "
        "are commands.",
    ),
    Flag(
        "--role",
        group=WORKERS,
        values="NAME",
        default="default",
        text="Name of the workers' role. It appears in the variable ROLE_NAME, in line prefixes and in reports.",
    ),
    Flag(
        "--virtual-local-rank",
        group=WORKERS,
        text="Each worker sees only its own GPU, as device 0, and gets LOCAL_RANK=0.",
    ),
    Flag(
        "--numa-binding",
        group=WORKERS,
        values="node|socket|exclusive|core-complex",
        parse=_values.one_of("node", "socket", "exclusive", "core-complex"),
        has_variable=False,
        text="Bind each worker to CPUs near its GPU or other accelerator. node: all CPUs of the device's NUMA node. "
        "socket: all CPUs of its socket. exclusive: an equal share of the NUMA node's cores. core-complex: the cores "
        "of one last-level cache.",
    ),
    Flag(
        "--omp-threads",
        group=WORKERS,
        values="N|auto",
        parse=_values.threads,
        is_ours=True,
        default_text="1 for several workers on this node, as with torchrun",
        text="OpenMP threads of each worker (OMP_NUM_THREADS). auto: an equal share of the cores that this process "
        "may use (affinity and cgroup limit). The variable OMP_NUM_THREADS, if set, overrides this flag.",
    ),
    Flag(
        "--worker-store",
        group=WORKERS,
        values="auto|agent|rank0|torch",
        default="auto",
        parse=_values.one_of("auto", "agent", "rank0", "torch"),
        is_ours=True,
        text="Process that serves the workers' store (MASTER_ADDR:MASTER_PORT). agent: elastic-run itself. rank0 or "
        "torch: torch's own server, in the worker with rank 0. auto: agent, or rank0 if "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.",
    ),
    Flag(
        "--preload",
        group=WORKERS,
        values="MODULE,...|auto",
        default="",
        parse=_values.preloaded,
        is_ours=True,
        text="Import these modules (torch) in one process on this node, and fork each worker from it, so that workers "
        "start and restart without the import. auto: the large modules that the script imports.",
    ),
    Flag(
        "--standalone",
        group=RENDEZVOUS,
        text="Run a job on this node only, on a free port. The other flags of this group, except --rdzv-id, then have "
        "no effect. A job of one node without any flag of this group runs in the same way.",
    ),
    Flag(
        "--rdzv-backend",
        group=RENDEZVOUS,
        values="NAME",
        default="static",
        default_text="static; or c10d, coordinated by the first node, for a job of several nodes to which none of "
        "--rdzv-endpoint, --master-addr, --master-port and --node-rank is given",
        text=f"Rendezvous backend: {', '.join(_NAMES_OF_BACKENDS)}, or the name of an installed plug-in "
        "(entry-point group torchrun.handlers). etcd and etcd-v2 need pip install 'elastic-run[etcd]'.",
    ),
    Flag(
        "--rdzv-endpoint",
        group=RENDEZVOUS,
        values="HOST[:PORT],...",
        default="",
        text="Address where the nodes meet. c10d: the node at the first endpoint coordinates the job; if this node is "
        "lost, the node at the next endpoint takes over. etcd: the members of the etcd cluster.",
    ),
    Flag(
        "--rdzv-id",
        group=RENDEZVOUS,
        values="ID",
        default=contract.NO_RUN_ID,
        text="Id of the job, the same on all its nodes. Jobs that use the same etcd at the same time need different "
        "ids.",
    ),
    Flag(
        "--rdzv-conf",
        group=RENDEZVOUS,
        values="KEY=VALUE,...",
        default="",
        parse=_values.key_values,
        text="Settings of the backend, such as join_timeout=600; docs/several-nodes.md lists them.",
    ),
    Flag(
        "--rdzv-token-file",
        group=RENDEZVOUS,
        values="FILE",
        is_ours=True,
        default_text=f"the variable {contract.ENV_RDZV_TOKEN}; if it is not set, a job without --rdzv-endpoint makes a "
        "new secret, and other jobs have none",
        text="File with a secret that all nodes of the job share. A node without the secret is refused.",
    ),
    Flag(
        "--on-split",
        group=RENDEZVOUS,
        values="stop|continue",
        parse=_values.one_of("stop", "continue"),
        is_ours=True,
        text="Only for c10d with several endpoints and two nodes: action of a node that cannot reach the other node, "
        "and does not know whether the other node still runs. stop: stop the workers and wait for the other node, up "
        "to join_timeout. continue: run on this node alone.",
    ),
    Flag(
        "--fence-after",
        group=RENDEZVOUS,
        values="lease|never",
        parse=_values.one_of("lease", "never"),
        is_ours=True,
        text="Time at which a node that cannot reach its job stops its workers. lease: after one lease (6 s by "
        "default), so that the workers write no checkpoints while the other nodes go on without this node. never: only "
        "when the node gives up, or learns that the job went on without it.",
    ),
    Flag(
        "--master-addr",
        group=RENDEZVOUS,
        values="HOST",
        default="127.0.0.1",
        parse=_values.host_if_given,
        text="Address of node 0; only for --rdzv-backend=static.",
    ),
    Flag(
        "--master-port",
        group=RENDEZVOUS,
        values="PORT",
        parse=_values.port,
        default_text=f"{contract.DEFAULT_MASTER_PORT}, or a free port for a job of one node",
        text="Port of the workers' store on node 0; only for --rdzv-backend=static.",
    ),
    Flag(
        "--local-addr",
        group=RENDEZVOUS,
        values="HOST",
        parse=_values.host_if_given,
        default_text="the address of the interface to the endpoint",
        text="Address of this node, by which other nodes reach it.",
    ),
    Flag(
        "--max-restarts",
        group=RESTARTS,
        values="N",
        parse=_values.count,
        text="Maximum number of restarts. After the failure of a worker, all workers of the job are restarted.",
    ),
    Flag(
        "--restart-window",
        group=RESTARTS,
        values="N/PERIOD",
        parse=_values.window,
        is_ours=True,
        text="Maximum number of restarts in any PERIOD (5/1h). The total number of restarts then has no limit, unless "
        "--max-restarts is given as well.",
    ),
    Flag(
        "--min-uptime",
        group=RESTARTS,
        values="TIME",
        parse=_values.duration,
        is_ours=True,
        text="End the job if the same failure happens twice in a row, both times within TIME after the start of the "
        "workers. Without this flag, only errors that a restart cannot cure, such as ImportError and SyntaxError, "
        "end the job in this way.",
    ),
    Flag(
        "--no-restart-exit-codes",
        group=RESTARTS,
        values="CODE,CODE-CODE,...",
        parse=_values.exit_codes,
        is_ours=True,
        text="Exit codes of a worker that end the job without a restart (3,64-78). 128+n stands for signal n.",
    ),
    Flag(
        "--max-backoff",
        group=RESTARTS,
        values="TIME",
        parse=_values.duration,
        is_ours=True,
        text="Maximum pause before a restart. The first restart is immediate. Pauses grow while workers fail early.",
    ),
    Flag(
        "--membership-window",
        group=RESTARTS,
        values="N/PERIOD",
        parse=_values.window,
        is_ours=True,
        text="Maximum number of lost or added nodes in any PERIOD. These changes do not count as restarts. Above the "
        "maximum, a lost node ends the job, and a new node has to wait.",
    ),
    Flag(
        "--scale-up-delay",
        group=RESTARTS,
        values="TIME",
        parse=_values.duration,
        is_ours=True,
        text="Time that a running job waits for more nodes after the first new node, so that all of them join in one "
        "round.",
    ),
    Flag(
        "--scale-up-signal",
        group=RESTARTS,
        values="SIGNAL",
        parse=_values.one_signal,
        is_ours=True,
        text="Signal that tells the workers to save their state before they are stopped for new nodes.",
    ),
    Flag(
        "--scale-up-grace",
        group=RESTARTS,
        values="TIME",
        parse=_values.duration,
        is_ours=True,
        text="Time between --scale-up-signal and the stop of the workers.",
    ),
    Flag(
        "--health-check",
        group=HEALTH,
        values="COMMAND",
        parse=_values.command,
        is_ours=True,
        text="Command that must succeed (exit code 0) before this node takes part in a round: before the first one, "
        "and again after each failure or change of nodes. If it fails, this node leaves the job, which goes on "
        f"without it; the exit code is {contract.EXIT_UNHEALTHY}. No shell interprets the command, unless it is "
        "sh -c '...'.",
    ),
    Flag(
        "--health-check-timeout",
        group=HEALTH,
        values="TIME",
        parse=_values.positive_duration,
        is_ours=True,
        text="Time after which --health-check and its processes are killed, and the check counts as failed.",
    ),
    Flag(
        "--exclude-after",
        group=HEALTH,
        values="N/PERIOD",
        parse=_values.window,
        is_ours=True,
        text="Exclude a node on which N failures of the job have begun in any PERIOD (2/6h), unless fewer nodes than "
        "the minimum of --nnodes would be left. Equal failures (exit code, exception, place) do not count if more than "
        "half of them began on other nodes, or if every node had one. The node leaves with exit code "
        f"{contract.EXIT_EXCLUDED}.",
    ),
    Flag(
        "--exclude-exit-codes",
        group=HEALTH,
        values="CODE,CODE-CODE,...",
        parse=_values.exit_codes,
        is_ours=True,
        text="Exit codes of a worker that exclude its node at once; the failure uses no restart. 128+n stands for "
        "signal n.",
    ),
    Flag(
        "--exit-barrier-timeout",
        group=STOPPING,
        values="TIME",
        parse=_values.duration,
        is_ours=True,
        other_variable=contract.ENV_EXIT_BARRIER_TIMEOUT,
        default_text=f"the variable {contract.ENV_EXIT_BARRIER_TIMEOUT}, or {contract.DEFAULT_EXIT_BARRIER_TIMEOUT}s",
        text="Maximum time that a node waits at the end of the job until the other nodes know the result; at least 2s.",
    ),
    Flag(
        "--signals-to-handle",
        group=STOPPING,
        values="SIGNAL,...",
        default=contract.DEFAULT_SIGNALS_TO_HANDLE,
        parse=_values.signal_names,
        text="Signals that stop the job. They are passed on to the workers, which get the time of --shutdown-timeout "
        "to end. While workers run, SIGQUIT stops the job only if it comes twice within 2 s; the first SIGQUIT shows "
        "where each rank is. A signal that was ignored when elastic-run started (nohup) stays ignored.",
    ),
    Flag(
        "--forward-signals",
        group=STOPPING,
        values="SIGNAL,...",
        default="",
        parse=_values.forwarded_signals,
        is_ours=True,
        text="Signals that are passed on to all workers without stopping the job (SIGUSR1,SIGUSR2). Without this "
        "flag, SIGUSR1 and SIGUSR2 are passed on only to the workers that handle them.",
    ),
    Flag(
        "--shutdown-timeout",
        group=STOPPING,
        values="SECONDS",
        parse=_values.whole_seconds,
        other_variable=contract.ENV_SHUTDOWN_TIMEOUT,
        default_text=f"the variable {contract.ENV_SHUTDOWN_TIMEOUT}, or {contract.DEFAULT_SHUTDOWN_TIMEOUT}s",
        text="Time that workers get to end after a signal before they are killed, and after an exception that has "
        "ended their main thread before they count as failed.",
    ),
    Flag(
        "--kill-background-processes",
        group=STOPPING,
        is_ours=True,
        text="After a success, end the processes that workers left running in the background. Without this flag they "
        "keep running, as under torchrun. After a failure, a stop or a restart they are always ended.",
    ),
    Flag(
        "--flight-recorder",
        group=MONITORING,
        is_ours=True,
        text="Switch on torch's flight recorder, which records the last collectives of each worker. After a failure or "
        "a stop the report says which rank did not join which collective; the records (dumps) are in the log "
        "directory of the attempt. elastic-run sets TORCH_FR_BUFFER_SIZE and TORCH_FR_DUMP_TEMP_FILE unless you have "
        "set them.",
    ),
    Flag(
        "--hang-timeout",
        group=MONITORING,
        values="TIME",
        default_text="off",
        parse=_values.hang_timeout,
        is_ours=True,
        text="If no rank makes progress for this time (10m), the job counts as hanging. Output, heartbeats, "
        "collectives, changed stacks and computation are progress; docs/troubleshooting.md has all rules. auto: 10 "
        "times the longest time without progress in this round so far, at least 5 min. The flag also switches on the "
        "flight recorder.",
    ),
    Flag(
        "--hang-action",
        group=MONITORING,
        values="report|restart|fail",
        default="report",
        parse=_values.one_of("report", "restart", "fail"),
        is_ours=True,
        text="Action after a hang. In each case, lines on the console say where each rank is. report: the job goes on. "
        f"restart: uses one of --max-restarts. fail: ends the job with exit code {contract.EXIT_HUNG}.",
    ),
    Flag(
        "--inject-fault",
        group=MONITORING,
        values="FAULT,...",
        default="",
        parse=_check_faults,
        is_ours=True,
        text="Faults to inject, to test how the job reacts: kill@30s:rank=1 kills the worker with global rank 1 after "
        "30 s. docs/fault-injection.md describes all faults, such as stop, signal=NAME, raise, exit=CODE, sleep, "
        "import=MODULE, oom, slow and freeze.",
    ),
    Flag(
        "--failure-rules",
        group=OUTPUT,
        values="FILE",
        default="",
        is_ours=True,
        text="TOML file with your own hints for the closing report: each [[rule]] has match (a regular expression), "
        "help (the hint) and, optionally, decision (restart, stop or exclude this node). These rules come before "
        "those of elastic-run.",
    ),
    Flag(
        "--requeue",
        group=STOPPING,
        values="[N]",
        parse=_values.requeues,
        implied=str(_values.REQUEUES),
        is_ours=True,
        text="On Slurm: after SIGTERM has stopped the job (#SBATCH --signal=TERM@120), ask Slurm to run it again, and "
        f"end with exit code {contract.EXIT_REQUEUED}. The job is requeued at most N times ({_values.REQUEUES} without "
        "a number); requeues that elastic-run did not ask for count as well. A cancelled job is not run again.",
    ),
    Flag(
        "--health-port",
        group=MONITORING,
        values="PORT",
        parse=_values.port,
        is_ours=True,
        text="Port at which this node answers health checks over HTTP, on all interfaces: /healthz says whether the "
        "agent is alive, /readyz whether its workers run. Both answer before the nodes have found each other. 0 takes "
        "a free port.",
    ),
    Flag(
        "--metrics-port",
        group=MONITORING,
        values="PORT",
        parse=_values.port,
        is_ours=True,
        text="Port at which this node serves metrics for Prometheus at /metrics, on all interfaces: restarts, failures "
        "by cause, durations, times without output, goodput. 0 takes a free port. The package "
        "prometheus-client is required.",
    ),
    Flag(
        "--monitor-interval",
        group=MONITORING,
        values="SECONDS",
        default=0.1,
        parse=_values.positive_seconds,
        text="Interval at which an agent of another package polls its workers. elastic-run's own agent does not poll, "
        "since the kernel reports each end of a worker.",
    ),
    Flag(
        "-t",
        "--tee",
        group=OUTPUT,
        values="WHICH",
        default="0",
        parse=_values.output_choice,
        text="Write the workers' output to log files and to the console, where each line gets a prefix. 0: none, 1: "
        "stdout, 2: stderr, 3: both. LOCAL_RANK:VALUE,... sets the value for some workers only (0:3,1:2).",
    ),
    Flag(
        "-r",
        "--redirects",
        group=OUTPUT,
        values="WHICH",
        default="0",
        parse=_values.output_choice,
        text="Write the workers' output to log files and not to the console. The values are those of --tee.",
    ),
    Flag(
        "--log-dir",
        group=OUTPUT,
        values="DIR",
        default_text="a temporary directory for --tee and --redirects, otherwise no log files",
        text="Directory for log files. Without --tee and --redirects, the files have a copy of all output. Each "
        "launcher makes a new directory in DIR, so that all nodes of a job may share DIR.",
    ),
    Flag(
        "--local-ranks-filter",
        group=OUTPUT,
        values="RANK,...",
        default="",
        parse=_values.rank_list,
        default_text="all ranks",
        text="On the console, show only the output of these local ranks. Log files have the output of all ranks.",
    ),
    Flag(
        "--log-line-prefix-template",
        group=OUTPUT,
        values="TEXT",
        default="",
        other_variable=contract.ENV_LOG_LINE_PREFIX_TEMPLATE,
        default_text=f"the variable {contract.ENV_LOG_LINE_PREFIX_TEMPLATE}, or {contract.DEFAULT_PREFIX_TEMPLATE}",
        text="Prefix of the lines that --tee shows, with ${role_name}, ${local_rank}, ${rank}, ${hostname} and "
        "${restart_count}.",
    ),
    Flag(
        "--duplicate-stdout-filters",
        group=OUTPUT,
        values="TEXT,...",
        default=[],
        parse=_values.text_list,
        text="Copy lines of stdout that contain one of these texts to one file for all ranks; only for ranks whose "
        "stdout has --tee. Two commas stand for a comma in a text.",
    ),
    Flag(
        "--duplicate-stderr-filters",
        group=OUTPUT,
        values="TEXT,...",
        default=[],
        parse=_values.text_list,
        text="Copy lines of stderr that contain one of these texts to one file for all ranks; only for ranks whose "
        "stderr has --tee. Two commas stand for a comma in a text.",
    ),
    Flag(
        "--no-capture",
        group=OUTPUT,
        is_ours=True,
        text="Do not pass the workers' stderr through elastic-run. Then the report shows the exception of a failed "
        "worker only if --tee or --redirects keeps its stderr in a file, or if the script uses @record.",
    ),
    Flag(
        "--logs-specs",
        group=OUTPUT,
        values="NAME",
        has_variable=False,
        text="Installed plug-in that decides the destination of the workers' output (entry-point group "
        "torchrun.logs_specs).",
    ),
    Flag(
        "--event-log-handler",
        group=OUTPUT,
        values="NAME",
        default="null",
        text="Destination of the job's events: null, console, dynamic_rendezvous, or an installed plug-in "
        "(entry-point group elastic_run.event_handlers).",
    ),
    Flag(
        "--events-file",
        group=OUTPUT,
        values="FILE",
        default="",
        is_ours=True,
        text="File to which this node appends the events of the job, one JSON object per line. With --log-dir the same "
        "lines are in events.jsonl.",
    ),
    Flag(
        "--config",
        group=CONFIGURATION,
        values="FILE",
        is_ours=True,
        text="TOML file with values of flags: a key is the name of a flag without the leading dashes (max-restarts = "
        "3). A flag and its variable override the file; the file overrides the values that the scheduler sets.",
    ),
    Flag(
        "--explain",
        group=CONFIGURATION,
        has_variable=False,
        is_ours=True,
        text="Print each value that is not a default, its origin, and the command and the environment of the workers; "
        "then exit. Nothing is started.",
    ),
    Flag(
        "--explain-all",
        group=CONFIGURATION,
        has_variable=False,
        is_ours=True,
        text="As --explain, but print all values, also the defaults.",
    ),
    Flag("-h", "--help", group=ABOUT, has_variable=False, text="Print the most used flags, and exit."),
    Flag(
        "--help-all",
        group=ABOUT,
        has_variable=False,
        is_ours=True,
        text="Print all flags, their defaults and variables, and the exit codes, and exit.",
    ),
    Flag(
        "--print-completion",
        group=ABOUT,
        values="bash|zsh|tcsh",
        has_variable=False,
        text="Print a script with which this shell completes elastic-run's flags and commands, and exit. The package "
        "shtab is required; it may know more shells.",
    ),
    Flag(
        "--version",
        group=ABOUT,
        has_variable=False,
        is_ours=True,
        text="Print the version, and exit.",
    ),
)

#: Only at the legacy front door, `python -m elastic_run.launch`; torch's is --use-env alone.
USE_ENV = Flag(
    "--use-env",
    group=PROGRAM,
    has_variable=False,
    text="Do not add --local-rank=N to the arguments of the script; the script reads LOCAL_RANK.",
)
LOCAL_RANK_UNDERSCORE = Flag(
    "--local-rank-underscore",
    group=PROGRAM,
    has_variable=False,
    is_ours=True,
    text="Add --local_rank=N in place of --local-rank=N, for scripts written before torch 2.",
)

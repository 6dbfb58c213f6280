"""The command line as data: every flag with its values, its default, its environment form and its help.

To add a flag: see CONTRIBUTING.md. A setting of jobs of several nodes is a row here or in `job_flags`, and a field of
`JobConfig` or `NodeConfig` with the same name, where its default stands.
"""

from __future__ import annotations

from elastic_run import contract
from elastic_run.cli import values as _values
from elastic_run.cli.job_flags import JOB_FLAGS, PROGRAM
from elastic_run.cli.values import ABOUT, Flag

STOPPING = "Signals and stopping"
MONITORING = "Monitoring and fault injection"
OUTPUT = "Output and logs"
CONFIGURATION = "Configuration"


def _check_faults(text: str) -> str:
    if text:
        from elastic_run.cli.faults import read_faults

        read_faults(text)
    return text


FLAGS: tuple[Flag, ...] = (
    *JOB_FLAGS,
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
        "--keep-state",
        group=STOPPING,
        values="SIZE",
        default="",
        parse=_values.memory_size,
        is_ours=True,
        text="Keep the state of the training in memory of the launcher, so that it goes on from the last step after a "
        "restart: 64GB for all workers of the node together, two generations each; auto: half of the memory that is "
        "left. The script uses KeptState or MemoryWriter of elastic_run.worker (docs/kept-state.md).",
    ),
    Flag(
        "--keep-state-copies",
        group=STOPPING,
        values="0|1",
        default=0,
        parse=lambda text: _values.whole_number(text, least=0, allowed="0 or 1", most=1),
        is_ours=True,
        text="With --keep-state and several nodes: 1 keeps a copy of each node's state on the next node, so that the "
        "state outlives a node too. Copies take half of --keep-state.",
    ),
    Flag(
        "--keep-state-dir",
        group=STOPPING,
        values="DIR",
        default="",
        is_ours=True,
        text="With --keep-state: if the job fails or is stopped, write the newest state to DIR/latest, a checkpoint of "
        "torch.distributed.checkpoint. It may take --shutdown-timeout.",
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

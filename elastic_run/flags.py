"""The command line as data: every flag with its values, its default, its environment form and its help.

The parser, the help text and the reference in the docs are made from this table, so that they can't disagree. The order
is that of the help. `is_ours` marks what torchrun hasn't got; those flags never make an abbreviation of one of
torchrun's ambiguous. The file is longer than others because a table is easiest to read in one piece.
"""

from __future__ import annotations

from elastic_run import contract, validation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NODES = "Size of the job"
RENDEZVOUS = "Where the nodes meet"
PROGRAM = "What to run"
RESTARTS = "Restarts"
STOPPING = "Signals and stopping"
OUTPUT = "Output and logs"
WORKERS = "Workers"
ABOUT = "About"


class Flag:
    """One flag.

    Args:
        names: Its spellings with hyphens, the long one last; the one with underscores is added.
        values: What its value looks like in the help; empty for a switch.
        default: Its value when neither flag nor variable is given.
        parse: From the text to the value; raises ValueError.
        group: Heading under which the help shows it.
        text: What it is for.
        has_variable: Whether PET_<NAME> stands in for it.
        is_ours: Whether torchrun hasn't got it.
    """

    __slots__ = (
        "default",
        "dest",
        "group",
        "is_ours",
        "is_switch",
        "name",
        "parse",
        "spellings",
        "text",
        "values",
        "variable",
    )

    def __init__(
        self,
        *names: str,
        group: str,
        text: str,
        values: str = "",
        default: object = None,
        parse: Callable[[str], Any] = str,
        has_variable: bool = True,
        is_ours: bool = False,
    ) -> None:
        self.name = name = names[-1]
        self.dest = name[2:].replace("-", "_")
        underscored = "--" + self.dest
        self.spellings = names if underscored == name else (*names, underscored)
        self.group = group
        self.text = text
        self.values = values
        self.is_switch = not values
        self.default = False if self.is_switch else default
        self.parse = validation.switch if self.is_switch else parse
        self.variable = contract.ENV_FLAG_PREFIX + self.dest.upper() if has_variable else ""
        self.is_ours = is_ours


FLAGS: tuple[Flag, ...] = (
    Flag(
        "--nnodes",
        group=NODES,
        values="MIN[:MAX]",
        default="1:1",
        parse=validation.nodes,
        text="Number of nodes, or the fewest and the most that the job may have.",
    ),
    Flag(
        "--nproc-per-node",
        group=NODES,
        values="N|auto|cpu|gpu|xpu",
        default="1",
        parse=validation.worker_count,
        text="Workers on this node. gpu and xpu: one per device that is visible; so is a device that a package adds to "
        "torch (npu). cpu: one per CPU that this process may use (affinity and cgroup limit). auto: one per device, or "
        "per CPU where there is none.",
    ),
    Flag(
        "--node-rank",
        group=NODES,
        values="RANK",
        default=0,
        parse=validation.node_rank,
        text="Rank of this node, from 0. With --rdzv-backend static it is that, else a wish (0 and -1 are none).",
    ),
    Flag(
        "-m",
        "--module",
        group=PROGRAM,
        text="SCRIPT is the name of a module, run as by python -m.",
    ),
    Flag(
        "--no-python",
        group=PROGRAM,
        text="SCRIPT is a program of any kind, run as it is. It is looked for on PATH.",
    ),
    Flag(
        "--run-path",
        group=PROGRAM,
        text="Run SCRIPT through runpy.run_path in the interpreter that runs elastic-run; PYTHON_EXEC, -m and "
        "--no-python don't count then.",
    ),
    Flag(
        "--start-method",
        group=PROGRAM,
        values="spawn|fork|forkserver",
        default="spawn",
        parse=validation.one_of("spawn", "fork", "forkserver"),
        text="How functions are started as workers, from Python programs. Commands, and so everything on this command "
        "line, are always executed.",
    ),
    Flag(
        "--role",
        group=WORKERS,
        values="NAME",
        default="default",
        text="Name of the workers' role: in ROLE_NAME, in line prefixes and in reports.",
    ),
    Flag(
        "--virtual-local-rank",
        group=WORKERS,
        text="Every worker sees its own GPU as device 0 and has LOCAL_RANK=0.",
    ),
    Flag(
        "--numa-binding",
        group=WORKERS,
        values="node|socket|exclusive|core-complex",
        parse=validation.one_of("node", "socket", "exclusive", "core-complex"),
        has_variable=False,
        text="Bind each worker to CPUs near its GPU: all of the NUMA node, all of the socket, an equal share of the "
        "node's cores, or the cores of one last-level cache.",
    ),
    Flag(
        "--worker-store",
        group=WORKERS,
        values="auto|agent|torch|rank0",
        default="auto",
        parse=validation.one_of("auto", "agent", "torch", "rank0"),
        is_ours=True,
        text="Who serves the store at MASTER_ADDR:MASTER_PORT: elastic-run itself (agent), torch's server in a process "
        "of its own, or the worker with rank 0. auto: agent, for many hundred workers torch.",
    ),
    Flag(
        "--preload",
        group=WORKERS,
        values="MODULE,...|auto",
        default="",
        parse=validation.preloaded,
        is_ours=True,
        text="Import these modules once, in a process from which each worker is forked, so that start and restart take "
        "no import of them (torch). auto: the large ones that the script imports.",
    ),
    Flag(
        "--standalone",
        group=RENDEZVOUS,
        text="A job of this node alone, on a free port and with an id of its own; the other flags of this group don't "
        "count then. It is the default when none of them is given.",
    ),
    Flag(
        "--rdzv-backend",
        group=RENDEZVOUS,
        values="NAME",
        default="static",
        text="How the nodes find each other: static, c10d, etcd, etcd-v2, etcd-v3, or the name of an installed plug-in "
        "(entry-point group torchrun.handlers). Several nodes without a flag of this group: c10d, served by this one.",
    ),
    Flag(
        "--rdzv-endpoint",
        group=RENDEZVOUS,
        values="HOST[:PORT],...",
        default="",
        text="Where the backend is. With c10d the first of several serves the store, and the next takes over when it "
        "is gone; with etcd they are the members of its cluster.",
    ),
    Flag(
        "--rdzv-id",
        group=RENDEZVOUS,
        values="ID",
        default="none",
        text="Name of the job, the same on all its nodes and unique among the jobs of the backend.",
    ),
    Flag(
        "--rdzv-conf",
        group=RENDEZVOUS,
        values="KEY=VALUE,...",
        default="",
        parse=validation.key_values,
        text="Settings of the backend.",
    ),
    Flag(
        "--rdzv-token-file",
        group=RENDEZVOUS,
        values="FILE",
        is_ours=True,
        text="File with a secret that all nodes of the job share; what others say is refused. Default: the variable "
        f"{contract.ENV_RDZV_TOKEN}, or none; a job without an endpoint makes one.",
    ),
    Flag(
        "--on-split",
        group=RENDEZVOUS,
        values="stop|continue",
        default="stop",
        parse=validation.one_of("stop", "continue"),
        is_ours=True,
        text="Several c10d endpoints and two nodes: what the one that is left does, which can't know whether the other "
        "goes on as well.",
    ),
    Flag(
        "--master-addr",
        group=RENDEZVOUS,
        values="HOST",
        default="127.0.0.1",
        parse=validation.host_if_given,
        text="Address of node 0; only with --rdzv-backend static.",
    ),
    Flag(
        "--master-port",
        group=RENDEZVOUS,
        values="PORT",
        parse=validation.port,
        text="Port of the workers' store on node 0; only with --rdzv-backend static. Without it a job of one node "
        f"takes a free port, others {contract.DEFAULT_MASTER_PORT}.",
    ),
    Flag(
        "--local-addr",
        group=RENDEZVOUS,
        values="HOST",
        parse=validation.host_if_given,
        text="Address of this node, if the one that is found doesn't suit.",
    ),
    Flag(
        "--max-restarts",
        group=RESTARTS,
        values="N",
        default=0,
        parse=validation.count,
        text="How often all workers are started again after one has failed.",
    ),
    Flag(
        "--restart-window",
        group=RESTARTS,
        values="N/PERIOD",
        parse=validation.restart_window,
        is_ours=True,
        text="At most N restarts in any PERIOD (5/1h). Without --max-restarts the job may go on for ever in that way.",
    ),
    Flag(
        "--min-uptime",
        group=RESTARTS,
        values="SECONDS",
        parse=validation.duration,
        is_ours=True,
        text="The same failure twice, each before this time, ends the job: a third try can't help. Without it, that "
        "holds for errors such as ImportError and SyntaxError only.",
    ),
    Flag(
        "--no-restart-exit-codes",
        group=RESTARTS,
        values="CODE,CODE-CODE,...",
        default=frozenset(),
        parse=validation.exit_codes,
        is_ours=True,
        text="Exit codes of a worker that end the job at once (3,64-78); 128+n is signal n.",
    ),
    Flag(
        "--max-backoff",
        group=RESTARTS,
        values="SECONDS",
        default=30.0,
        parse=validation.duration,
        is_ours=True,
        text="Longest pause before a restart. The first is at once; pauses grow while workers fail early.",
    ),
    Flag(
        "--membership-window",
        group=RESTARTS,
        values="N/PERIOD",
        default=(100, 3600.0),
        parse=validation.restart_window,
        is_ours=True,
        text="Nodes may be lost or added N times in any PERIOD. These are no restarts. One loss "
        "more ends the job; one node more has to wait.",
    ),
    Flag(
        "--scale-up-delay",
        group=RESTARTS,
        values="SECONDS",
        default=2.0,
        parse=validation.duration,
        is_ours=True,
        text="How long a running job waits for more new nodes after the first, so that they come in one round.",
    ),
    Flag(
        "--scale-up-signal",
        group=RESTARTS,
        values="SIGNAL",
        default="",
        parse=validation.one_signal,
        is_ours=True,
        text="Signal that tells workers to save what they have before they are stopped for new nodes.",
    ),
    Flag(
        "--scale-up-grace",
        group=RESTARTS,
        values="SECONDS",
        default=30.0,
        parse=validation.duration,
        is_ours=True,
        text="Time that workers get after --scale-up-signal, before they are stopped.",
    ),
    Flag(
        "--exit-barrier-timeout",
        group=STOPPING,
        values="SECONDS",
        parse=validation.duration,
        is_ours=True,
        text="How long a node of several stays at the end, at most, for the others to learn how the job ended. "
        f"Default: the variable {contract.ENV_EXIT_BARRIER_TIMEOUT}, or {contract.DEFAULT_EXIT_BARRIER_TIMEOUT}.",
    ),
    Flag(
        "--signals-to-handle",
        group=STOPPING,
        values="SIGNAL,...",
        default=contract.DEFAULT_SIGNALS_TO_HANDLE,
        parse=validation.signal_names,
        text="Signals that stop the job: they are passed to the workers, which get time to end. One that was ignored "
        "when elastic-run began (nohup) stays ignored.",
    ),
    Flag(
        "--forward-signals",
        group=STOPPING,
        values="SIGNAL,...",
        default="",
        parse=validation.forwarded_signals,
        is_ours=True,
        text="Signals that are passed on to all workers without stopping the job (SIGUSR1,SIGUSR2). A SIGUSR1 or "
        "SIGUSR2 that isn't named goes to the workers that handle it.",
    ),
    Flag(
        "--shutdown-timeout",
        group=STOPPING,
        values="SECONDS",
        parse=validation.whole_seconds,
        text="Time that workers get to end before they are killed. Default: the variable "
        f"{contract.ENV_SHUTDOWN_TIMEOUT}, or {contract.DEFAULT_SHUTDOWN_TIMEOUT}.",
    ),
    Flag(
        "--kill-background-processes",
        group=STOPPING,
        is_ours=True,
        text="End what the workers left running in the background also after a success. By default it lives on then, "
        "as under torchrun; after failures, stops and restarts nothing does.",
    ),
    Flag(
        "--monitor-interval",
        group=STOPPING,
        values="SECONDS",
        default=0.1,
        parse=validation.positive_seconds,
        text="How often an agent from another package looks after its workers. Ours is told by the kernel and never "
        "polls.",
    ),
    Flag(
        "-t",
        "--tee",
        group=OUTPUT,
        values="WHICH",
        default="0",
        parse=validation.output_choice,
        text="Write output to log files and to the console, whole lines with a prefix: 1 stdout, 2 stderr, 3 both, or "
        "a map of local ranks (0:3,1:2).",
    ),
    Flag(
        "-r",
        "--redirects",
        group=OUTPUT,
        values="WHICH",
        default="0",
        parse=validation.output_choice,
        text="Write output to log files only; values as for --tee.",
    ),
    Flag(
        "--log-dir",
        group=OUTPUT,
        values="DIR",
        text="Where log files go; each job makes a directory of its own in it. Without it they are temporary.",
    ),
    Flag(
        "--local-ranks-filter",
        group=OUTPUT,
        values="RANK,...",
        default="",
        parse=validation.rank_list,
        text="Show only these local ranks on the console. Log files have all.",
    ),
    Flag(
        "--log-line-prefix-template",
        group=OUTPUT,
        values="TEXT",
        is_ours=True,
        text="Prefix of lines shown by --tee, with ${role_name}, ${local_rank}, ${rank}, ${hostname} and "
        f"${{restart_count}}. Default: the variable {contract.ENV_LOG_LINE_PREFIX_TEMPLATE}, or "
        f"{contract.DEFAULT_PREFIX_TEMPLATE}",
    ),
    Flag(
        "--duplicate-stdout-filters",
        group=OUTPUT,
        values="TEXT,...",
        default=[],
        parse=validation.text_list,
        text="Copy lines of stdout that hold one of these texts to one file of all ranks; ,, is a comma in a text.",
    ),
    Flag(
        "--duplicate-stderr-filters",
        group=OUTPUT,
        values="TEXT,...",
        default=[],
        parse=validation.text_list,
        text="The same for stderr.",
    ),
    Flag(
        "--no-capture",
        group=OUTPUT,
        is_ours=True,
        text="Don't pass the workers' stderr through elastic-run. The report can't show its last lines then.",
    ),
    Flag(
        "--logs-specs",
        group=OUTPUT,
        values="NAME",
        has_variable=False,
        text="Installed plug-in that decides where output goes (entry-point group torchrun.logs_specs).",
    ),
    Flag(
        "--event-log-handler",
        group=OUTPUT,
        values="NAME",
        default="null",
        text=(
            "Where events of the job are written: null, console, dynamic_rendezvous, or an installed plug-in "
            "(entry-point group elastic_run.event_handlers)."
        ),
    ),
    Flag("-h", "--help", group=ABOUT, has_variable=False, text="Show this and exit."),
    Flag("--version", group=ABOUT, has_variable=False, is_ours=True, text="Show the version and exit."),
)

#: Only at the legacy front door, `python -m elastic_run.launch`; torch's is --use-env alone.
USE_ENV = Flag(
    "--use-env",
    group=PROGRAM,
    has_variable=False,
    text="Don't add --local-rank=N to the script's arguments; the script reads LOCAL_RANK instead.",
)
LOCAL_RANK_UNDERSCORE = Flag(
    "--local-rank-underscore",
    group=PROGRAM,
    has_variable=False,
    is_ours=True,
    text="Add --local_rank=N rather than --local-rank=N, for scripts written before torch 2.",
)


def flags_markdown() -> str:
    """Return the reference of the command line for the docs, in Markdown."""
    from elastic_run.help_text import render_markdown  # noqa: PLC0415 - only when asked for

    return render_markdown(FLAGS)


if __name__ == "__main__":
    import sys

    sys.stdout.write(flags_markdown())

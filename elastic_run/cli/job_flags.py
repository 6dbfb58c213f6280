"""The first half of the table of flags: the job and its nodes, the program, restarts. `flags` has the rest, and both.

The parser, the help text and the reference in the docs are made from this table, so that they can't disagree. The order
is that of the help. `is_ours` marks flags that torchrun does not have; they never make an abbreviation of one of
torchrun's flags ambiguous.
"""

from __future__ import annotations

from elastic_run import contract
from elastic_run.cli import values as _values
from elastic_run.cli.values import Flag
from elastic_run.rendezvous.backend_table import BACKENDS

NODES = "Size of the job"
RENDEZVOUS = "Rendezvous of several nodes"
PROGRAM = "Program to run"
RESTARTS = "Restarts"
HEALTH = "Health of nodes"
WORKERS = "Workers"
_NAMES_OF_BACKENDS = [name for name, backend in BACKENDS.items() if backend.has_store]

JOB_FLAGS: tuple[Flag, ...] = (
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
        parse=_values.short_name,
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
        parse=_values.job_id,
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
)

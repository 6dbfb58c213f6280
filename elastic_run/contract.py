"""Every name and default that somebody outside depends on: environment variables, exit codes, file names, ports.

Rules: constants only, standard library only, no behaviour. A name that torch 2.13 uses keeps torch's spelling; a
name of our own starts with ``ELASTIC_RUN_``. A scheduler may decide by the exit codes, so a code is never reused.
"""

from __future__ import annotations

# --- exit codes ------------------------------------------------------------------------------------------------
# 0, 2, 1..127 and 128+n mean what they mean to a shell. Our own verdicts lie above 128 + 64, the highest signal, so
# that they can't be mistaken for a signal. A worker may return any of them too: `failure.json` says whose it was.
EXIT_SUCCESS = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
EXIT_SIGNAL_BASE = 128
EXIT_RENDEZVOUS = 201
EXIT_REPEATED_FAILURE = 202
EXIT_UNKILLABLE_WORKER = 203
EXIT_CANNOT_START = 204
EXIT_INTERNAL_ERROR = 205
EXIT_NODES_LOST = 206
EXIT_STORE_LOST = 207
EXIT_REFUSED = 208
EXIT_REQUEUED = 209
EXIT_UNHEALTHY = 210
EXIT_EXCLUDED = 211
EXIT_HUNG = 212

#: Code, name in `failure.json`, and what it tells a scheduler. The table in docs/exit-codes.md is made from it.
EXIT_CODES: tuple[tuple[int | str, str, str], ...] = (
    (EXIT_SUCCESS, "success", "Every worker ended with 0."),
    ("1-255", "worker_failed", "The exit code of the worker that failed first, when no restart follows."),
    (EXIT_USAGE, "usage", "The command line is wrong. Nothing was started; running it again can't help."),
    (EXIT_NOT_EXECUTABLE, "not_executable", "The program could not be executed when a worker started."),
    (EXIT_NOT_FOUND, "not_found", "The program or its interpreter did not exist when a worker started."),
    ("128+n", "signal", "Signal n ended the first failing worker, or the launcher itself (143: SIGTERM)."),
    (EXIT_RENDEZVOUS, "rendezvous", "The nodes did not find each other: the rendezvous failed or took too long."),
    (
        EXIT_REPEATED_FAILURE,
        "repeated_failure",
        "The same failure occurred twice soon after the start: a restart can't help.",
    ),
    (EXIT_UNKILLABLE_WORKER, "unkillable_worker", "SIGKILL did not end a worker: check this node."),
    (EXIT_CANNOT_START, "cannot_start", "The system refused to start a worker (memory, processes, descriptors)."),
    (EXIT_INTERNAL_ERROR, "internal_error", "A defect of elastic-run, or of a plug-in: the last line says which."),
    (EXIT_NODES_LOST, "nodes_lost", "Too few nodes were left, or nodes came and went too often."),
    (
        EXIT_STORE_LOST,
        "store_lost",
        "The coordinator of a job of several nodes was lost, or it or etcd was out of reach for too long.",
    ),
    (
        EXIT_REFUSED,
        "refused",
        "The job refused this node: its settings, script, token or release differ from the job's.",
    ),
    (EXIT_REQUEUED, "requeued", "SIGTERM stopped a job with --requeue; the last line says whether it runs again."),
    (EXIT_UNHEALTHY, "unhealthy", "This node failed its --health-check and has left; the job goes on without it."),
    (
        EXIT_EXCLUDED,
        "excluded",
        "--exclude-after or --exclude-exit-codes excluded this node; the job goes on without it.",
    ),
    (
        EXIT_HUNG,
        "hung",
        "No rank made progress for --hang-timeout; --hang-action=fail ended the job, or no restart was left.",
    ),
)

#: The run id of a job to which the user gave none, as under torchrun.
NO_RUN_ID = "none"

# --- environment: set for workers ------------------------------------------------------------------------------
ENV_LOCAL_RANK = "LOCAL_RANK"
ENV_RANK = "RANK"
ENV_GROUP_RANK = "GROUP_RANK"
ENV_ROLE_RANK = "ROLE_RANK"
ENV_ROLE_NAME = "ROLE_NAME"
ENV_LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
ENV_WORLD_SIZE = "WORLD_SIZE"
ENV_GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
ENV_ROLE_WORLD_SIZE = "ROLE_WORLD_SIZE"
ENV_MASTER_ADDR = "MASTER_ADDR"
ENV_MASTER_PORT = "MASTER_PORT"
ENV_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
ENV_MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
ENV_RUN_ID = "TORCHELASTIC_RUN_ID"
ENV_USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ENV_NCCL_ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ENV_OMP_NUM_THREADS = "OMP_NUM_THREADS"
ENV_CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
ENV_HIP_VISIBLE_DEVICES = "HIP_VISIBLE_DEVICES"
#: One token per launcher that this process descends from, joined by colons: a descendant that left its session is
#: found by it, and a launcher nested in a worker keeps the outer launcher's token in front of its own.
ENV_TOKEN = "ELASTIC_RUN_TOKEN"  # noqa: S105 - a name, not a secret
#: What a worker reads through `elastic_run.worker`: the name of the signal before workers start again with new nodes,
#: the time (seconds since 1970) at which it has to begin to save, and the file for its signs of life.
ENV_SCALE_UP_SIGNAL = "ELASTIC_RUN_SCALE_UP_SIGNAL"
ENV_STOP_TIME = "ELASTIC_RUN_STOP_TIME"
ENV_HEARTBEAT_FILE = "ELASTIC_RUN_HEARTBEAT_FILE"
#: Where a worker keeps its state: the number of its memory, and the paths of all memories of the node (`1:PATH:PATH`).
ENV_KEPT_STATE = "ELASTIC_RUN_KEPT_STATE"
#: Makes a process the template of warm workers; says which descriptor its orders come from. No worker has it.
ENV_TEMPLATE = "ELASTIC_RUN_TEMPLATE"
#: For a Python worker until its start is over: descriptor, inode and signal with which the agent gets its stacks. Only
#: our .pth file reads it, and removes it: no program sees it.
ENV_STACK_PIPE = "ELASTIC_RUN_STACK_PIPE"
#: The file that the code of a worker's handler for stacks names. torch.compile passes over all files whose names begin
#: so, and would compile it otherwise.
STACK_HANDLER_FILE = "<frozen importlib elastic_run>"
#: Name of the socket on which a worker is asked for the dump of its flight recorder. No child of the worker has it.
ENV_FLIGHT_RECORDER = "ELASTIC_RUN_FLIGHT_RECORDER"
#: What it is asked for there by one byte: to write its dump, for the number of its collectives, or for their times.
RECORDER_DUMP = b"d"
RECORDER_COUNT = b"c"
RECORDER_CALLS = b"t"
#: Name of the thread that answers.
RECORDER_THREAD = "flight-recorder"
#: Name of the socket on which a worker is asked for a fault of --inject-fault. No child of the worker has it.
ENV_FAULTS = "ELASTIC_RUN_FAULTS"
#: torch's variables of the flight recorder, the older name last: number of entries, beginning of a dump's path.
ENV_RECORDER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
ENV_RECORDER_PREFIX = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
#: Those of the workers' variables that are known when the nodes have met.
ENV_OF_ROUND = (
    *(ENV_RANK, ENV_WORLD_SIZE, ENV_GROUP_RANK, ENV_GROUP_WORLD_SIZE, ENV_ROLE_RANK, ENV_ROLE_WORLD_SIZE),
    *(ENV_MASTER_ADDR, ENV_MASTER_PORT, ENV_USE_AGENT_STORE),
)

# --- environment: read by the launcher -------------------------------------------------------------------------
ENV_FLAG_PREFIX = "PET_"
ENV_PYTHON_EXEC = "PYTHON_EXEC"
ENV_LOG_LINE_PREFIX_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
ENV_SIGNALS_TO_HANDLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
ENV_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
ENV_EXIT_BARRIER_TIMEOUT = "TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT"
ENV_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
ENV_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
ENV_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
#: The named pipe for timers; the launcher sets it for workers.
ENV_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
#: The secret that the nodes of a job share; --rdzv-token-file is safer, since `ps e` shows an environment.
ENV_RDZV_TOKEN = "ELASTIC_RUN_RDZV_TOKEN"  # noqa: S105 - a name, not a secret
#: In a launcher that --hosts has started on a host: marks its messages to the command. No worker has it.
ENV_HOSTS_MARK = "ELASTIC_RUN_HOSTS_MARK"
#: 1 lets torch's module paths mean ours, in a process and its children.
ENV_COMPAT = "ELASTIC_RUN_COMPAT"
#: Where the control sockets of this user's agents are, instead of /tmp: a directory of this machine.
ENV_CONTROL_DIR = "ELASTIC_RUN_CONTROL_DIR"
#: 0: no worker gets a pipe for its stacks, and SIGQUIT stops the job at once.
ENV_STACKS = "ELASTIC_RUN_STACKS"
#: 1: each Python worker lets other processes of its user read it, also under Yama: py-spy, gdb, strace.
ENV_PTRACE = "ELASTIC_RUN_PTRACE"
#: 0: `ps`, `top` and `nvidia-smi` show workers as torchrun's, without their rank.
ENV_TITLE = "ELASTIC_RUN_TITLE"
ENV_DISABLE_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

#: The type of a root cause that is a timer which expired, in `failure.json`; no exception of that name is raised.
TIMER_EXPIRED = "TimerExpired"
#: The same of a root cause that is a rank which all others waited for.
HANG = "Hang"

# --- files and plug-ins ----------------------------------------------------------------------------------------
STDOUT_LOG = "stdout.log"
STDERR_LOG = "stderr.log"
FILTERED_STDOUT_LOG = "filtered_stdout.log"
FILTERED_STDERR_LOG = "filtered_stderr.log"
ERROR_FILE = "error.json"
FAILURE_FILE = "failure.json"
EVENTS_FILE = "events.jsonl"
#: The schema of the events, which `report.event_log` describes.
EVENTS_VERSION = 1
STACKS_FILE = "stacks.txt"
ATTEMPT_DIR_PREFIX = "attempt_"
RENDEZVOUS_ENTRY_POINTS = "torchrun.handlers"
LOGS_SPECS_ENTRY_POINTS = "torchrun.logs_specs"
EVENT_HANDLERS_ENTRY_POINTS = "elastic_run.event_handlers"

# --- defaults --------------------------------------------------------------------------------------------------
#: Words that --nproc-per-node takes in place of a number; any other is the name of a device.
WORKER_COUNT_WORDS = ("auto", "cpu", "gpu", "xpu")
DEFAULT_MASTER_PORT = 29500
DEFAULT_C10D_PORT = 29400
DEFAULT_SIGNALS_TO_HANDLE = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
DEFAULT_SHUTDOWN_TIMEOUT = 30
DEFAULT_EXIT_BARRIER_TIMEOUT = 300
#: The largest whole number of a setting or a message. Many languages read a number of JSON as a float, and a larger
#: number is not exact there.
LARGEST_NUMBER = 1 << 53
#: Longest name, in bytes, that is a part of the nodes' messages and of the keys of their store.
LONGEST_NAME = 4096
#: Seconds that stand for ever: some thirty years. Threads and clocks can't take much more.
LONGEST_TIME = 1e9
#: Seconds that one wait of a socket or of poll may last: the kernel counts milliseconds in 32 bits.
LONGEST_WAIT = 1e6
DEFAULT_PREFIX_TEMPLATE = "[${role_name}${rank}]:"
#: Bytes of each rank's stderr that are kept for the report.
CAPTURE_BYTES = 64 * 1024
#: Stands in that end for lines between an exception and the last ones; indented as no message of another program is.
LOST_LINES = " [... lines that were not kept ...]"

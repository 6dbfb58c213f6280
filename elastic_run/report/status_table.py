"""The text of ``elastic-run status``: the job, a row for each worker, and a line for each worker that stands out.

Pure: documents of nodes in (`agent.control_requests` makes them), lines out. A worker stands out in four ways:
- stopped: SIGSTOP holds it, and not all of the others; what it lacks then says nothing about it or them;
- silent: it has written nothing for 10 s, and for 4 times as long as the median of the other workers. In many jobs only
  rank 0 writes, or one rank of each node, so half of the workers and more are never marked, and of two workers none;
- idle alone: it takes no CPU, while the other workers compute;
- busy alone: it computes, while the other workers wait. In a job that waits in a collective this is the slow worker.
"""

from __future__ import annotations

from statistics import median

from elastic_run.records import dataclass
from elastic_run.report.text import columns, count, elide, printable, ranks, signal_name, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    Document = dict[str, Any]

#: Seconds without output, and how many times the median of the others, that make a worker silent.
_SILENCE = 10.0
_TIMES_MEDIAN = 4.0
#: Percent of a processor: a worker below the first waits, a worker above the second computes.
_IDLE = 10.0
_BUSY = 50.0
#: A number from here up is garbage.
_BEYOND = 1e15
_MEBIBYTE = 1 << 20
_GIBIBYTE = 1 << 30
_HEADINGS = (
    *("NODE", "RANK", "LOCAL", "PID", "STATE", "CPU", "MEMORY", "GPU", "GPU MEM", "BEHIND", "SILENT", "LAST LINE"),
)
_TEXT_COLUMNS = frozenset((0, 4, 11))
_NODE_COLUMN = 0
_GPU_COLUMNS = (7, 8)
_BEHIND_COLUMN = 9
_LEAST_LINE = 20
#: The state of a worker that does not run until it gets SIGCONT.
_STOPPED = "stopped"
_BOLD = "\x1b[1m"
_NORMAL = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Mark:
    """The reason why a worker stands out."""

    rank: int  # The worker
    word: str  # `stopped`, `silent`, `idle alone` or `busy alone`
    text: str  # One line that explains it


def find_marks(workers: Sequence[Document]) -> list[Mark]:
    """Find the workers that stand out among all workers of a job."""
    living = [worker for worker in workers if worker.get("exit_code") is None]
    going = [worker for worker in living if worker["state"] != _STOPPED]
    marks = [
        mark for worker in living for mark in _mark_worker(worker, [other for other in going if other is not worker])
    ]
    has_few_silent = 2 * sum(mark.word == "silent" for mark in marks) < len(going)
    return [mark for mark in marks if has_few_silent or mark.word != "silent"]


def _mark_worker(worker: Document, others: Sequence[Document]) -> list[Mark]:
    if worker["state"] == _STOPPED:
        reason = f"rank {worker['rank']} is stopped (SIGSTOP, or a shell's job control)"
        mend = f"`kill -CONT {worker.get('pid')}` on its node lets it go on"
        return [Mark(int(worker["rank"]), "stopped", f"{reason}: {mend}")] if others else []
    marks = []
    rank, silence, cpu = int(worker["rank"]), worker.get("silence"), worker.get("cpu")
    usual = _find_median(others, "silence")
    if silence is not None and usual is not None and silence >= max(_SILENCE, _TIMES_MEDIAN * usual):
        text = f"rank {rank} is silent: no output for {span(silence)}; the median of the other workers is {span(usual)}"
        marks.append(Mark(rank, "silent", text))
    usual = _find_median(others, "cpu")
    if cpu is None or usual is None:
        return marks
    if cpu < _IDLE and usual >= _BUSY:
        text = f"rank {rank} takes no CPU ({cpu:.0f} %) while the other workers compute (median {usual:.0f} %)"
        marks.append(Mark(rank, "idle alone", text))
    elif cpu >= _BUSY and usual < _IDLE:
        text = f"rank {rank} computes ({cpu:.0f} % CPU) while the other workers wait (median {usual:.0f} %)"
        marks.append(Mark(rank, "busy alone", text))
    return marks


def _find_median(workers: Sequence[Document], field: str) -> float | None:
    values = [worker[field] for worker in workers if worker.get(field) is not None]
    return median(values) if values else None


def add_behind(nodes: Sequence[Document]) -> None:
    """Give each worker its share of the last minute in which the others waited for it; one node knows those of all."""
    shares: dict[float, float] = {}
    for told in (told for node in nodes if isinstance(told := node.pop("behind", None), list)):
        shares |= {
            pair[0]: pair[1] for pair in told if isinstance(pair, list) and [*map(_is_number, pair)] == [True] * 2
        }
    for worker in (worker for node in nodes for worker in node["workers"]):
        worker["behind"] = shares.get(worker["rank"])


def render_status(nodes: Sequence[Document], *, label: str, width: int, color: bool = False) -> list[str]:
    """Return the lines of a job's state."""
    workers = [worker for node in nodes for worker in node["workers"]]
    marks = find_marks(workers)
    marked = {mark.rank for mark in marks}
    rows = [_make_row(node, worker, marked) for node in nodes for worker in node["workers"]]
    lines = [_describe_job(nodes, label, len(workers)), *_describe_waiting(nodes)]
    if nodes[0].get("news"):
        lines.append(f"last change: {printable(nodes[0]['news'])}")
    lines += map(_describe_left_out, find_left_out(nodes))
    lines += [_describe_kept(node["kept_state"]) for node in nodes if _has_kept_state(node)]
    if nodes[0].get("log_dir"):
        lines.append(f"logs: {printable(nodes[0]['log_dir'])}")
    if rows:
        has_gpus = any(worker.get("gpu_memory") is not None or worker.get("gpu") is not None for worker in workers)
        hidden = {*(() if len(nodes) > 1 else (_NODE_COLUMN,)), *(() if has_gpus else _GPU_COLUMNS)}
        hidden |= set() if any(worker.get("behind") is not None for worker in workers) else {_BEHIND_COLUMN}
        lines += ["", *_align(rows, width, hidden=hidden, bold=marked if color else set())]
    if marks:
        lines += ["", *(mark.text for mark in marks), *_advise(marks, label)]
    unseen = [int(worker["rank"]) for worker in workers if worker.get("silence") is None and worker.get("pid")]
    if unseen:
        told = f"the output of {ranks(unseen)} does not pass through elastic-run"
        lines += ["", f"{told}: --log-dir, --tee=3 or --redirects=3 show it"]
    return lines


def _has_kept_state(node: Document) -> bool:
    kept = node.get("kept_state")
    if not isinstance(kept, dict) or not (_is_number(kept.get("used")) and _is_number(kept.get("size"))):
        return False
    return kept.get("label") is None or (isinstance(kept["label"], str) and _is_number(kept.get("age")))


def _describe_kept(kept: Document) -> str:
    used = f"{_describe_memory(kept['used'])} of {_describe_memory(kept['size'])}"
    if kept.get("label") is None:
        return f"kept state: none yet, {used}"
    return f"kept state: step {printable(kept['label'])}, {span(kept['age'])} old, {used}"


def _advise(marks: Sequence[Mark], label: str) -> list[str]:
    """Return the command that shows where the workers are; a process that is stopped is in no wrong place."""
    chosen = sorted({mark.rank for mark in marks if mark.word != "stopped"})
    if len(chosen) == 1:
        return [f"`elastic-run stacks {label} --rank {chosen[0]}` shows where it is"]
    return [f"`elastic-run stacks {label}` shows where they are"] if chosen else []


def find_left_out(nodes: Sequence[Document]) -> list[Document]:
    """Return the nodes that the job goes on without, from the answer of the coordinator's node."""
    found = [node["left_out"] for node in nodes if isinstance(node.get("left_out"), list)]
    return [node for node in (found and max(found, key=len)) or () if isinstance(node, dict) and _is_left_out(node)]


def _is_left_out(node: Document) -> bool:
    is_timed = all(node.get(name) is None or _is_number(node[name]) for name in ("seconds", "expires"))
    return is_timed and all(isinstance(node.get(name), str) for name in ("host", "kind", "reason"))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < _BEYOND  # type: ignore[arg-type]


def _describe_left_out(node: Document) -> str:
    since = "" if node["seconds"] is None else f" for {span(node['seconds'])}"
    what = f"left out: {printable(node['host'])} is {printable(node['kind'])}{since}"
    if node["kind"] != "excluded":
        end = "it may join again when its launcher is started"
    elif node["expires"] is None:
        end = "it may not join this job again"
    else:
        end = f"it may join again in {span(node['expires'])}"
    reason = printable(node["reason"])
    return f"{what}: {reason}; {end}" if reason else f"{what}; {end}"


def _describe_job(nodes: Sequence[Document], label: str, workers: int) -> str:
    first = nodes[0]
    size = first.get("world_size") or workers
    parts = [f"{printable(first['state'])} for {span(first['uptime'])}"]
    if size:
        parts.append(f"{count(size, 'worker')} on {count(first.get('nodes') or len(nodes), 'node')}")
    parts.append(f"round {first['round']}")
    if first.get("round_uptime") is not None and first["round"]:
        parts[-1] += f" for {span(first['round_uptime'])}"
    used, most = first["restart_count"], first["max_restarts"]
    parts.append(f"{used} of {most} restarts used" if most else count(used, "restart"))
    return f"job {printable(label)}: {printable(first['program'])}, {', '.join(parts)}"


def _describe_waiting(nodes: Sequence[Document]) -> list[str]:
    waiting = [node for node in nodes if not node["workers"]]
    # All nodes wait for the same nodes.
    told = next((str(node["waiting"]) for node in nodes if node.get("waiting")), "")
    lines = [printable(told)] if told else []
    return lines + [
        f"node {printable(node['host'])} (pid {node['pid']}) has no workers yet: {printable(node['state'])}"
        for node in waiting
    ]


def _make_row(node: Document, worker: Document, marked: set[int]) -> tuple[str, ...]:
    cpu, memory, silence = worker.get("cpu"), worker.get("memory"), worker.get("silence")
    mark = " !" if worker["rank"] in marked else ""
    return (
        printable(node["host"]),
        str(worker["rank"]),
        str(worker["local_rank"]),
        str(worker.get("pid") or "-"),
        _describe_state(worker),
        "-" if cpu is None else f"{cpu:.0f} %",
        "-" if memory is None else _describe_memory(memory),
        "-" if worker.get("gpu") is None else f"{worker['gpu']:.0f} %",
        "-" if worker.get("gpu_memory") is None else _describe_memory(worker["gpu_memory"]),
        "-" if worker.get("behind") is None else f"{100 * worker['behind']:.0f} %",
        ("?" if silence is None else _describe_silence(silence)) + mark,
        printable(worker.get("last_line") or "").strip() or "-",
    )


def _describe_state(worker: Document) -> str:
    code = worker.get("exit_code")
    if code is None:
        return printable(worker["state"])
    return signal_name(-code) if code < 0 else f"exit code {code}" if code else "done"


def _describe_memory(memory: float) -> str:
    return f"{memory / _GIBIBYTE:.1f} GiB" if memory >= _GIBIBYTE else f"{memory / _MEBIBYTE:.0f} MiB"


def _describe_silence(silence: float) -> str:
    return "0 s" if silence < 1 else span(int(silence)).replace(".0 s", " s")


def _align(rows: Sequence[tuple[str, ...]], width: int, *, hidden: set[int], bold: set[int]) -> list[str]:
    shown = [index for index in range(len(_HEADINGS)) if index not in hidden]
    table = [_HEADINGS, *rows]
    widths = [max(columns(row[index]) for row in table) for index in range(len(_HEADINGS))]
    used = sum(widths[index] + 2 for index in shown[:-1])
    widths[-1] = max(_LEAST_LINE, width - used)
    lines = []
    for row in table:
        cells = [_fit(row[index], widths[index], is_text=index in _TEXT_COLUMNS) for index in shown]
        line = "  ".join(cells).rstrip()
        lines.append(f"{_BOLD}{line}{_NORMAL}" if row is not _HEADINGS and int(row[1]) in bold else line)
    return lines


def _fit(text: str, width: int, *, is_text: bool) -> str:
    text = elide(text, width)
    room = " " * (width - columns(text))
    return text + room if is_text else room + text

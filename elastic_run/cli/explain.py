"""The text of `--explain`: the values with their origins, the job, and the command and environment of its workers.

The text fits one screen. First come values that were given or derived, since mistakes are among these. Values with
their defaults are one line; --explain-all lists them.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap

from elastic_run import contract
from elastic_run.cli.help import WIDTH, describe_default
from elastic_run.cli.make_config import choose_threads
from elastic_run.cli.request import DERIVED, FILE, FLAG, VARIABLE, Origin
from elastic_run.rendezvous.api import BACKENDS
from elastic_run.report.text import count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

    from elastic_run.cli.flags import Flag
    from elastic_run.cli.request import Request
    from elastic_run.launch_config import LaunchConfig

_OWN_FLAGS = ("--explain", "--explain-all")
_HEAD = "Nothing was started. Without --explain, elastic-run would use these values:"
_HEAD_OF_ENVIRONMENT = "Variables of the workers, in addition to those of this process:"
_FOLD = "The other flags have their defaults (--explain-all shows them)."
#: The column of the origins; a longer value has its origin in the next line.
_COLUMN = 44
_LABEL = 13
#: Variables beside PET_... that have an effect on the job, each with the flag that comes before it.
_VARIABLES = {
    contract.ENV_PYTHON_EXEC: "",
    contract.ENV_OMP_NUM_THREADS: "",
    contract.ENV_DISABLE_SHARED_STORE: "",
    contract.ENV_UNINTERRUPTIBLE_STATE_TIMEOUT: "",
    contract.ENV_SHUTDOWN_TIMEOUT: "shutdown_timeout",
    contract.ENV_EXIT_BARRIER_TIMEOUT: "exit_barrier_timeout",
    contract.ENV_LOG_LINE_PREFIX_TEMPLATE: "log_line_prefix_template",
    contract.ENV_RDZV_TOKEN: "rdzv_token_file",
}
_HIDDEN = "(not shown)"
_PASSWORD = re.compile(r"(?<=\bpassword=)[^,]*")


def render_explanation(
    request: Request,
    flags: Sequence[Flag],
    *,
    config: LaunchConfig,
    command: Sequence[str],
    environments: Mapping[int, Mapping[str, str]],
    environ: Mapping[str, str],
    notices: Sequence[str],
) -> str:
    """Return a description of the job that these values would start.

    `environments` are the variables of the workers by local rank, without those that only a round decides, and
    `environ` the variables of this process, without those that a start would add.
    """
    args, origins = request.args, request.origins
    shown = [flag for flag in flags if not flag.prints_text and flag.name not in _OWN_FLAGS]
    # A program may have changed a value in the namespace. The port does not count, which `choose_rendezvous` sets.
    changed = {flag.dest for flag in shown if getattr(args, flag.dest) != flag.default} - {"master_port"}
    decided = [flag for flag in shown if flag.dest in origins or flag.dest in changed]
    rows = [_row(_write(flag, args, origins), _describe(origins.get(flag.dest))) for flag in decided]
    rows += _variable_rows(args, environ, config.nproc_per_node)
    others = [flag for flag in shown if flag not in decided]
    if args.explain_all:
        rows += [_row(flag.name, f"default: {describe_default(flag)}") for flag in others]
    else:
        rows.append(f"  {_FOLD}")
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        directory = "(deleted)"
    facts = [
        ("Job", _describe_size(config)),
        ("Rendezvous", _describe_rendezvous(args, config, origins)),
        ("This node", _describe_node(args, config)),
        ("Command", shlex.join(command)),
        ("Directory", directory),
        *(("Notice", notice) for notice in notices),
    ]
    sections = [_HEAD, "\n".join(rows), "\n".join(f"{label:<{_LABEL}}{text}" for label, text in facts)]
    return "\n\n".join([*sections, _render_environment(environments, origins)]) + "\n"


def _row(value: str, origin: str) -> str:
    if len(value) + 4 > _COLUMN:
        return f"  {value}\n{'':{_COLUMN}}{origin}"
    return f"  {value:<{_COLUMN - 2}}{origin}"


def _write(flag: Flag, args: Namespace, origins: Mapping[str, Origin]) -> str:
    """Return a flag with its value, as it could be given."""
    value = getattr(args, flag.dest)
    if flag.is_switch:
        return flag.name if value else f"{flag.name} off"
    origin = origins.get(flag.dest)
    text = origin.text if origin is not None and origin.text else str(value)
    return f"{flag.name}={_PASSWORD.sub(_HIDDEN, text) if flag.dest == 'rdzv_conf' else text}"


def _describe(origin: Origin | None) -> str:
    if origin is None:
        return "the calling program"
    names = {FLAG: FLAG, VARIABLE: origin.source, FILE: origin.source}
    text = names.get(origin.kind, f"{origin.kind}: {origin.source}".removesuffix(": "))
    unused = origin.unused
    if unused is None:
        return text
    shown = f"{unused.text} in {unused.source}" if unused.kind == FILE else f"{unused.source}={unused.text}".rstrip("=")
    return f"{text}; {shown} is not used"


def _variable_rows(args: Namespace, environ: Mapping[str, str], workers: int) -> list[str]:
    used = [name for name, dest in _VARIABLES.items() if environ.get(name) and not (dest and getattr(args, dest))]
    values = {**environ, contract.ENV_RDZV_TOKEN: _HIDDEN}
    rows = [_row(f"{name}={values[name]}", "variable") for name in used]
    threads, reason, _ = choose_threads(args.omp_threads, workers, environ)
    if threads is not None:
        rows.append(_row(f"{contract.ENV_OMP_NUM_THREADS}={threads}", f"{DERIVED}: {reason or '--omp-threads'}"))
    return rows


def _describe_size(config: LaunchConfig) -> str:
    least, most, workers = config.min_nodes, config.max_nodes, config.nproc_per_node
    if most == 1:
        return f"1 node, {count(workers, 'worker')}"
    nodes, total = (
        (least, least * workers) if least == most else (f"{least} to {most}", f"{least * workers} to {most * workers}")
    )
    return f"{nodes} nodes, {total} workers if every node starts {workers}"


def _describe_rendezvous(args: Namespace, config: LaunchConfig, origins: Mapping[str, Origin]) -> str:
    backend, endpoint = config.rdzv_backend, config.rdzv_endpoint
    if backend == "local":
        return "none: this node is the whole job"
    if backend == "static":
        return f"static: node 0 is at {endpoint}"
    run_id = _shown_id(args, origins)
    if backend == "c10d" and not endpoint:
        from elastic_run.rendezvous.addresses import find_outward_address, names_loopback

        address = config.local_addr or find_outward_address()
        reach = ", which only this host can reach" if names_loopback(address) else ""
        served = f"this node serves the store at {address}{reach}, on a free port, and prints how other nodes join"
        return f"c10d, job {run_id}: {served}"
    if backend == "c10d" and "," in endpoint:
        first, _, successors = endpoint.partition(",")
        return f"c10d, job {run_id}: the store is at {first}; if that is lost, at {successors.replace(',', ', ')}"
    plugin = "" if backend in BACKENDS else " (plug-in)"
    return f"{backend}{plugin}, job {run_id}: the store is at {endpoint or 'an address that the plug-in knows'}"


def _describe_node(args: Namespace, config: LaunchConfig) -> str:
    place = f"{os.uname().nodename}: {count(config.nproc_per_node, 'worker')}"
    if config.max_nodes == 1:
        return place
    if config.rdzv_backend == "static":
        return f"{place}; node {args.node_rank} of {config.max_nodes}"
    if config.node_config.location:
        location = config.node_config.location.partition("/")[0]
        return f"{place}; its rank follows from its place in the network, {location}"
    rank = config.node_config.preferred_rank
    return f"{place}; {'any rank among the nodes' if rank is None else f'rank {rank} among the nodes if it is free'}"


def _render_environment(environments: Mapping[int, Mapping[str, str]], origins: Mapping[str, Origin]) -> str:
    """Return the variables that workers get, each once."""
    texts = {name: _join([environments[rank][name] for rank in sorted(environments)]) for name in environments[0]}
    if contract.ENV_RUN_ID in texts and (run_id := origins.get("rdzv_id")) is not None:
        texts[contract.ENV_RUN_ID] = run_id.text or texts[contract.ENV_RUN_ID]
    paragraphs = [_HEAD_OF_ENVIRONMENT, _fill([f"{name}={texts[name]}" for name in sorted(texts)])]
    unknown = [name for name in contract.ENV_OF_ROUND if name not in texts]
    if unknown:
        end = "known once the nodes have met" if contract.ENV_RANK in unknown else "chosen at the start"
        paragraphs.append(_fill([*(f"{name}," for name in unknown[:-1]), f"{unknown[-1]}:", end]))
    return "\n".join(paragraphs)


def _fill(words: Sequence[str]) -> str:
    """Return words as lines; a line is never broken inside a word, also one that contains blanks."""
    text = " ".join(word.replace(" ", "\0") for word in words)
    fill = textwrap.TextWrapper(WIDTH, "  ", "  ", break_long_words=False, break_on_hyphens=False).fill
    return fill(text).replace("\0", " ")


def _join(values: Sequence[str]) -> str:
    """Return the values of one variable for all workers: the only one, a range, or all."""
    if len(set(values)) == 1:
        return values[0]
    if all(value.isdecimal() for value in values):
        first = int(values[0])
        if values == [str(first + step) for step in range(len(values))]:
            return f"{values[0]}..{values[-1]}"
    return "|".join(values)


def _shown_id(args: Namespace, origins: Mapping[str, Origin]) -> str:
    origin = origins.get("rdzv_id")
    return (origin and origin.text) or str(args.rdzv_id)

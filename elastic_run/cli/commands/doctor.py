"""``elastic-run doctor``: problems on this machine, or between the nodes, that would break a job, with remedies."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from functools import partial

from elastic_run import contract
from elastic_run.cli.commands import CommandParser, argument
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.values import whole_number
from elastic_run.core.config import JobConfig, NodeConfig, Window
from elastic_run.core.kept_generations import read_size
from elastic_run.diagnosis.doctor_checks import find_version, run_checks
from elastic_run.diagnosis.doctor_report import (
    PROBLEM,
    Subject,
    describe_findings,
    problem,
    read_findings,
    render_report,
)
from elastic_run.notices import UsageError, print_json, print_text, say
from elastic_run.rendezvous.addresses import find_whether_own_host, parse_endpoints
from elastic_run.rendezvous.api import RendezvousError
from elastic_run.schedulers.slurm import StepError, find_step

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence
    from typing import Any

    from elastic_run.diagnosis.doctor_report import Finding

_ENDPOINT = "address at which the nodes of the job will meet: its name and port are checked"
_NODES = "number of nodes on which you run this command: they meet at the endpoint, and check the network between them"
_TO_LOOK_UP = 3.0
_PROBE = "elastic_run.diagnosis.doctor_nodes"
_TIMEOUT = "seconds in which the nodes have to meet (default: 60)"
_KEEP_STATE = "memory for the training's state: checks that the machine and the container have it (default: none)"
_LOG_DIR = "directory for log files: checks that it is writable (default: none)"

ARGUMENTS = {
    "doctor": [
        argument("--rdzv-endpoint", "--rdzv_endpoint", default="", metavar="HOST:PORT", help=_ENDPOINT),
        argument("--nnodes", metavar="N", help=_NODES),
        argument("--timeout", default="60", metavar="SECONDS", help=_TIMEOUT),
        argument("--log-dir", "--log_dir", default="", metavar="DIR", help=_LOG_DIR),
        argument("--keep-state", "--keep_state", default="", metavar="SIZE", help=_KEEP_STATE),
        argument("--json", action="store_true", help="print the findings as JSON"),
    ]
}


def run_doctor(words: Sequence[str]) -> int:
    """Run the checks, and print the findings; 1 if there is a problem."""
    args = _parse(words)
    subject = _make_subject(args)
    report = describe_findings([subject.hostname], run_checks(subject), collect_facts())
    if args.nnodes > 1:
        try:
            report = _examine_together(args, report)
        except OSError as error:
            what = f"the nodes can't be examined together: {error.strerror}"
            remedy = "export TMPDIR=DIR, a directory that can be written"
            report = _add(problem(what, error.filename or "", remedy), report)
    _print(report, is_json=args.json)
    return int(any(finding.severity == PROBLEM for finding in read_findings(report)))


def collect_facts() -> dict[str, str]:
    """Return the versions that all nodes of a job should share."""
    return {
        "elastic-run": find_version("elastic-run") or "(not installed)",
        "Python": platform.python_version(),
        "torch": find_version("torch") or "(not installed)",
    }


def _parse(words: Sequence[str]) -> Namespace:
    args = CommandParser("doctor").parse_args(words)
    step = None
    if not args.rdzv_endpoint and args.nnodes is None:  # may be a task of a Slurm step, each of which runs the doctor
        with suppress(StepError):  # which a launcher refuses in one line
            step = find_step(os.environ, os.uname().nodename)
    if step is not None and step.task_count == len(step.nodes):
        args.rdzv_endpoint, args.nnodes = step.endpoint, str(len(step.nodes))
    args.nnodes = _read("--nnodes", args.nnodes or "1", partial(whole_number, least=1, allowed="a number of nodes"))
    allowed = "a number of seconds from 1 up"
    args.timeout = _read("--timeout", args.timeout, partial(whole_number, least=1, allowed=allowed))
    args.keep_state = _read("--keep-state", args.keep_state, read_size) if args.keep_state else 0
    if args.nnodes > 1 and not args.rdzv_endpoint:
        message = f"--rdzv-endpoint: is needed with --nnodes={args.nnodes}: HOST:PORT where the nodes meet"
        raise UsageError(message)
    return args


def _read(flag: str, text: str, read: Callable[[str], int]) -> int:
    try:
        return read(text)
    except ValueError as error:
        message = f"{flag}: {text!r} {error}"
        raise UsageError(message) from None


def _make_subject(args: Namespace) -> Subject:
    endpoints: Sequence[tuple[str, int]] = ()
    if args.rdzv_endpoint:
        try:
            endpoints = parse_endpoints(args.rdzv_endpoint, contract.DEFAULT_C10D_PORT)
        except ValueError as error:
            message = f"--rdzv-endpoint: {error}"
            raise UsageError(message) from None
    return Subject(
        environ=os.environ,
        hostname=os.uname().nodename,
        endpoints=tuple(endpoints),
        most_nodes=args.nnodes,
        directories=(args.log_dir,) if args.log_dir else (),
        kept_bytes=args.keep_state,
        known_variables=frozenset(flag.variable for flag in FLAGS if flag.variable),
    )


def _examine_together(args: Namespace, own: dict[str, Any]) -> dict[str, Any]:
    """Run the checks between the nodes, as a job with one worker on each node, and return the findings of all.

    The result has the rank of this node, or no rank if the nodes did not meet.
    """
    import json
    import tempfile

    from elastic_run.launch_config import LaunchConfig, launch_job

    with tempfile.TemporaryDirectory(prefix="elastic-run-doctor-") as directory:
        path = os.path.join(directory, "own.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(own, file)
        host = parse_endpoints(args.rdzv_endpoint, contract.DEFAULT_C10D_PORT)[0][0]
        config = LaunchConfig(
            min_nodes=args.nnodes,
            max_nodes=args.nnodes,
            nproc_per_node=1,
            run_id=f"doctor-{args.nnodes}",
            role="doctor",
            rdzv_backend="c10d",
            rdzv_endpoint=args.rdzv_endpoint,
            rdzv_configs={"join_timeout": args.timeout},
            max_restarts=0,
            # A lost node is a finding, and no other node takes its place.
            job_config=JobConfig(join_timeout=args.timeout, membership_window=Window(0)),
            # All nodes reach the endpoint's host: there the workers' store can be reached too.
            node_config=NodeConfig(preferred_rank=0 if find_whether_own_host(host, _TO_LOOK_UP) else None),
        )
        try:
            code = launch_job(config, sys.executable, ["-m", _PROBE, path])
        except RendezvousError as error:
            say(f"error: {error}")
            code = contract.EXIT_RENDEZVOUS
        if not code and os.path.exists(f"{path}.result"):
            with open(f"{path}.result", encoding="utf-8") as file:
                return dict(json.load(file))
    return _add(_judge_end(args, code), own)


def _judge_end(args: Namespace, code: int) -> Finding:
    """Return the finding about a launcher that ended without a result; the launcher has named the cause on stderr."""
    evidence = f"the launcher ended with exit code {code}"
    if code == contract.EXIT_RENDEZVOUS:
        what = f"{args.nnodes} nodes did not come together at {args.rdzv_endpoint} (--timeout={args.timeout})"
        remedy = f"start this command on all {args.nnodes} nodes at about the same time"
    elif code in (contract.EXIT_NODES_LOST, contract.EXIT_STORE_LOST):
        what = "a node was lost while the nodes examined the network"
        remedy = "check that the node is up and that the doctor was not stopped there, and read its kernel log (dmesg)"
    else:
        what = "the nodes have met, but the check between them did not end"
        remedy = "if dmesg shows no defect on any node, please report this"
    return problem(what, evidence, f"{remedy}; the lines above name the cause")


def _add(finding: Finding, report: dict[str, Any]) -> dict[str, Any]:
    """Return the report of this node with one more finding in front."""
    return describe_findings(report["hosts"], [finding, *read_findings(report)], report["facts"])


def _print(report: dict[str, Any], *, is_json: bool) -> None:
    rank = report.pop("rank", 0)
    if rank and not is_json:
        say(f"the findings of all nodes are printed by the doctor on {report['hosts'][0]}")
    elif is_json and not rank:
        print_json(report)
    elif not rank:
        print_text(render_report(report["hosts"], read_findings(report), report["facts"]))

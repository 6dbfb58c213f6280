"""``elastic-run doctor``: what would break a job on this machine, or between the nodes, and how to mend it."""

from __future__ import annotations

import os
import platform

from elastic_run import contract
from elastic_run.cli.commands.parser import CommandParser
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.parser import print_text
from elastic_run.cli.values import whole_number
from elastic_run.diagnosis.doctor.checks import run_checks
from elastic_run.diagnosis.doctor.finding import PROBLEM, Subject
from elastic_run.diagnosis.doctor.python import find_version
from elastic_run.diagnosis.doctor.report import describe_findings, render_report
from elastic_run.errors import UsageError
from elastic_run.rendezvous.elastic.addresses import parse_endpoints

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from elastic_run.diagnosis.doctor.finding import Finding

_ENDPOINT = "HOST:PORT where the nodes are to meet: its name and port are checked"
_NODES = "run this command on N nodes: they meet at the endpoint, and check the network between them"
_LOG_DIR = "directory for logs, which has to be writable (default: none)"


def main(words: Sequence[str]) -> int:
    """Check, and print what was found.

    Args:
        words: The arguments.

    Returns:
        1 if there is a problem, else 0.

    Raises:
        UsageError: A value is not allowed.
        SystemExit: The help was printed (0).
    """
    args = _parse(words)
    subject = _make_subject(args)
    findings = run_checks(subject)
    _print(args, [subject.hostname], findings, collect_facts())
    return int(any(finding.severity == PROBLEM for finding in findings))


def collect_facts() -> dict[str, str]:
    """Return the versions that all nodes of a job should share."""
    return {
        "elastic-run": find_version("elastic-run") or "(not installed)",
        "Python": platform.python_version(),
        "torch": find_version("torch") or "(not installed)",
    }


def _parse(words: Sequence[str]) -> Namespace:
    parser = CommandParser("doctor")
    parser.add_argument("--rdzv-endpoint", "--rdzv_endpoint", default="", metavar="HOST:PORT", help=_ENDPOINT)
    parser.add_argument("--nnodes", default="1", metavar="N", help=_NODES)
    parser.add_argument("--log-dir", "--log_dir", default="", metavar="DIR", help=_LOG_DIR)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_args(words)
    try:
        args.nnodes = whole_number(args.nnodes, least=1, allowed="a number of nodes")
    except ValueError as error:
        message = f"--nnodes: {args.nnodes!r} {error}"
        raise UsageError(message) from None
    if args.nnodes > 1 and not args.rdzv_endpoint:
        message = f"--rdzv-endpoint: is needed with --nnodes={args.nnodes}: HOST:PORT where the nodes meet"
        raise UsageError(message)
    return args


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
        known_variables=frozenset(flag.variable for flag in FLAGS if flag.variable),
    )


def _print(args: Namespace, hosts: Sequence[str], findings: Sequence[Finding], facts: dict[str, str]) -> None:
    if args.json:
        import json  # noqa: PLC0415 - only when asked for

        print_text(json.dumps(describe_findings(hosts, findings, facts), indent=2) + "\n")
    else:
        print_text(render_report(hosts, findings, facts))

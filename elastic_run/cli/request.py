"""What the user asked for: torch's namespace with the origin of each value, and the typed record that is read from it.

The namespace keeps the values of torch's parser: plain text, numbers and lists, since programs make and change it. The
origins stand beside it in a dictionary by name, without the values that have their default: `--explain` shows them, and
a message about a wrong value begins with its origin. `Request` has each text read once; checks, notices and the
configuration take the values from there.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.values import node_range
from elastic_run.notices import UsageError
from elastic_run.records import dataclass, replace
from elastic_run.rendezvous.api import BACKENDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, MutableMapping

    from elastic_run.cli.flags import Flag
    from elastic_run.multiprocessing.logs import Streams
    from elastic_run.schedulers.derivation import Derivation

    #: Origins by the name of the value, as in the namespace.
    Origins = MutableMapping[str, "Origin"]

FLAG, VARIABLE, FILE = "flag", "variable", "file"
SLURM, KUBERNETES, DERIVED = "Slurm", "Kubernetes", "derived"
#: Shown in place of an id that is another one at each start.
RANDOM = "(random)"
#: The variables by which a scheduler, or a program that starts launchers side by side, is known; see `schedulers`.
_OF_SCHEDULERS = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "JOB_COMPLETION_INDEX"),
    *("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE"),
    *("SKYPILOT_NUM_NODES", "SM_HOSTS"),
)
#: Bytes of a token's file; a device may have no end.
_LONGEST_TOKEN = 1 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one value comes from: from a kind of `source`, which is a flag, a variable, a file, or the reason.

    `text` is the value as it was written, or as it follows from a scheduler; for another derived value only where its
    value says nothing, such as a random id. `unused` is the origin that had a value too, and came second.
    """

    kind: str
    source: str
    text: str = ""
    unused: Origin | None = None

    @property
    def is_given(self) -> bool:
        """Whether the user gave the value."""
        return self.kind in (FLAG, VARIABLE, FILE)


@dataclass
class Request:
    """What the user asked for, with each text read once.

    Attributes:
        args: The values by the flags' names, for what needs no reading.
        origins: Where they come from; a value without an origin has its default, or a program has set it.
        names_rendezvous: Whether the user said how, or where, the nodes meet.
        hosts_rendezvous: Whether this node serves the place where several nodes meet, since the user named none.
        endpoints: Host and port of each endpoint of a backend of ours; the port is -1 if none is given.
        token: The secret that the nodes of the job share: None where the user says nothing, empty for none at all.
        location: This node's place in the network; see `NodeConfig`.
        has_left_slurm: Whether Slurm's variables are left over from another step, so that no value follows from them.
    """

    args: Namespace
    origins: Origins
    least: int
    most: int
    workers: int
    names_rendezvous: bool
    hosts_rendezvous: bool
    endpoints: tuple[tuple[str, int], ...]
    settings: dict[str, str]
    redirects: Streams
    tee: Streams
    token: bytes | None
    location: str = ""
    has_left_slurm: bool = False
    has_random_id: bool = False

    @property
    def is_static(self) -> bool:
        """Whether the backend is the one by default, whose node ranks and master count; --standalone has none."""
        return self.args.rdzv_backend == "static" and not self.args.standalone


def read_request(
    args: Namespace,
    workers: int,
    environ: Mapping[str, str],
    *,
    origins: Origins | None = None,
    found: Derivation | None = None,
) -> Request:
    """Read the texts of a namespace that has a value for each flag.

    `found` is what follows from the scheduler. UsageError: a text can't be read.
    """
    # Not at the top: the parser needs this module, and not the output's.
    from elastic_run.multiprocessing.logs import parse_streams

    if args.no_python and args.module and not args.run_path:
        message = "--no-python: cannot be combined with -m: --no-python runs a program, -m a Python module"
        raise UsageError(message)
    least, most = node_range(args.nnodes)
    is_first = not args.node_rank and args.master_addr == "127.0.0.1"
    return Request(
        args=args,
        origins={} if origins is None else origins,
        least=least,
        most=most,
        workers=workers,
        names_rendezvous=names_rendezvous(args),
        hosts_rendezvous=is_first and most > 1 and not names_rendezvous(args),
        endpoints=() if args.standalone or args.rdzv_backend not in BACKENDS else read_endpoints(args),
        settings=_read_settings(args),
        redirects=parse_streams(args.redirects),
        tee=parse_streams(args.tee),
        token=read_token(args.rdzv_token_file, environ),
        location="" if found is None else found.location,
        has_left_slurm=found is not None and found.has_left_slurm,
    )


def names_rendezvous(args: Namespace) -> bool:
    """Whether the user said how, or where, the nodes meet."""
    return bool(args.rdzv_backend != "static" or args.rdzv_endpoint or args.master_port)


def _read_settings(args: Namespace) -> dict[str, str]:
    if not args.rdzv_conf:
        return {}
    from elastic_run.rendezvous.utils import parse_rendezvous_config

    try:
        return parse_rendezvous_config(args.rdzv_conf)
    except ValueError as error:
        message = f"--rdzv-conf: {error}"
        raise UsageError(message) from None


def read_endpoints(args: Namespace) -> tuple[tuple[str, int], ...]:
    """Return host and port of each endpoint; there is none where the place is the path of a file store."""
    if not args.rdzv_endpoint or (args.rdzv_backend == "c10d" and _read_settings(args).get("store_type") == "file"):
        return ()
    from elastic_run.rendezvous.utils import parse_rendezvous_endpoint

    parts = args.rdzv_endpoint.split(",")
    try:
        endpoints = tuple(parse_rendezvous_endpoint(part, default_port=-1) for part in parts)
    except ValueError as error:
        message = f"--rdzv-endpoint: {error}"
        raise UsageError(message) from None
    if not all(part.strip() for part in parts):
        message = f"--rdzv-endpoint: {args.rdzv_endpoint!r} names an empty endpoint"
        raise UsageError(message)
    return endpoints


def get_use_env(args: Namespace) -> bool:
    """Whether workers get their local rank from the environment only, as they do except under the legacy launcher."""
    return bool(getattr(args, "use_env", True))


def read_token(path: str | None, environ: Mapping[str, str]) -> bytes | None:
    """Read the secret from its file, or from the environment; a pipe, as of a shell's `<(command)`, is read once."""
    if path is None:
        token = environ.get(contract.ENV_RDZV_TOKEN)
        return None if token is None else token.encode(errors="surrogateescape")
    from elastic_run.files import read_user_file

    content = b""
    try:
        content = read_user_file(path, _LONGEST_TOKEN + 1).strip()
        problem = "" if content else "is empty"
        if len(content) > _LONGEST_TOKEN:
            problem = f"is longer than {_LONGEST_TOKEN >> 10} KiB"
    except OSError as error:
        problem = f"can't be read: {(error.strerror or str(error)).lower()}"
    if problem:
        message = f"--rdzv-token-file: {path!r} {problem}"
        raise UsageError(message)
    return content


# --- values that follow from others ----------------------------------------------------------------------------------


def derive(args: Namespace, origins: Origins, origin: Origin, **values: object) -> None:
    """Give values that follow from others, unless they are there already."""
    for dest, value in values.items():
        if getattr(args, dest) != value:
            setattr(args, dest, value)
            origins[dest] = replace(origin, unused=origins.get(dest))


def complete_arguments(args: Namespace) -> None:
    """Give a namespace from a foreign parser, such as torch's, the flags that it doesn't have."""
    for flag in FLAGS:
        if not flag.prints_text and not hasattr(args, flag.dest):
            setattr(args, flag.dest, flag.default)


def may_have_scheduler(environ: Mapping[str, str]) -> bool:
    """Whether a variable is there by which a scheduler, or a program that starts launchers side by side, is known."""
    return any(name in environ for name in _OF_SCHEDULERS)


def keep_static_place(args: Namespace, origins: Mapping[str, Origin]) -> None:
    """Take torch's default port if several nodes are told their ranks or the master's address, even by a default value.

    Without this, `--node-rank=0` would serve a store of its own while `--node-rank=1` waits at the default address.
    """
    is_told = any(name in origins and origins[name].is_given for name in ("node_rank", "master_addr"))
    if is_told and not args.standalone and not names_rendezvous(args) and node_range(args.nnodes)[1] > 1:
        args.master_port = contract.DEFAULT_MASTER_PORT


def choose_rendezvous(request: Request) -> None:
    """Fill in the rendezvous of a job for which the user named none, and the default port of the static one.

    A job of one node needs no store. In a job of several nodes this node serves a c10d store, and prints the flags with
    which the others join. Both keep the user's id, and get a random one otherwise.
    """
    args, origins = request.args, request.origins
    if args.standalone or (request.most == 1 and not request.names_rendezvous):
        reason = Origin(DERIVED, "--standalone" if args.standalone else "a job of one node")
        nodes = args.nnodes if request.most == 1 else "1:1"
        derive(args, origins, reason, nnodes=nodes, rdzv_backend="local", rdzv_endpoint="")
        request.least = request.most = 1
        request.has_random_id = args.rdzv_id in ("", contract.NO_RUN_ID)
        if request.has_random_id:
            with open("/proc/sys/kernel/random/uuid", encoding="ascii") as file:  # torchrun's form, without uuid
                derive(args, origins, replace(reason, text=RANDOM), rdzv_id=file.read().strip())
    elif request.hosts_rendezvous:
        reason = Origin(DERIVED, "this node serves the store")
        derive(args, origins, reason, rdzv_backend="c10d")
        if args.rdzv_id == contract.NO_RUN_ID:
            derive(args, origins, replace(reason, text=RANDOM), rdzv_id=os.urandom(4).hex())
    if not args.master_port:
        args.master_port = contract.DEFAULT_MASTER_PORT


# --- origins in texts ------------------------------------------------------------------------------------------------


def name_source(message: str, origins: Mapping[str, Origin], environ: Mapping[str, str]) -> str:
    """Return a message that begins with a flag with the variable, or the file, from which the flag's value comes."""
    if not message.startswith("--"):
        return message
    flag, colon, rest = message.partition(":")
    origin = origins.get(flag[2:].replace("-", "_"))
    if origin is not None and origin.kind == VARIABLE:
        flag = origin.source
    elif origin is not None and origin.kind == FILE:
        flag = f"{origin.source}: {flag[2:]}"
    elif origin is not None and origin.kind in (SLURM, KUBERNETES):
        variables = " ".join(f"{name}={environ[name]}" for name in origin.source.split(", ") if name in environ)
        flag = f"{variables or origin.source or origin.kind}: {flag}"
    return f"{flag}{colon}{rest}"


def write_given(flag: Flag, args: Namespace, origins: Mapping[str, Origin]) -> str:
    """Return a flag with its value as one word, if the user gave it in any way; otherwise ""."""
    origin = origins.get(flag.dest)
    if origin is None or not origin.is_given:
        return ""
    if flag.is_switch:
        return flag.name if getattr(args, flag.dest) else ""
    return f"{flag.name}={origin.text}"

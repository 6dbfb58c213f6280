"""Values that follow from the scheduler that has started this launcher, unless a flag gives them.

Imported only where a variable of a scheduler is there.
"""

from __future__ import annotations

from elastic_run import contract
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.make_config import count_node_gpus
from elastic_run.cli.request import Origin, derive, names_rendezvous, read_endpoints
from elastic_run.cli.values import node_range
from elastic_run.notices import UsageError
from elastic_run.records import replace
from elastic_run.rendezvous.api import BACKENDS
from elastic_run.schedulers.derivation import Asked, Derivation, describe_starter
from elastic_run.schedulers.kubernetes import derive_from_indexed_job
from elastic_run.schedulers.slurm import derive_from_step, is_left_over

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from elastic_run.cli.request import Origins

_DEFAULTS = {flag.dest: flag.default for flag in FLAGS}


def complete_from_cluster(args: Namespace, environ: Mapping[str, str], origins: Origins | None = None) -> Derivation:
    """Fill in values that follow from this launcher's Slurm step or indexed Job, unless a flag gives them.

    Schedulers start a launcher on each node: srun in a step of Slurm, Kubernetes in each pod of an indexed Job. All of
    them are one job. Without the derived values each of them would train a model of its own. The origins of the derived
    values are added to `origins`, which are None if a program made the namespace: then values that differ from the
    defaults count as given, and the number of workers always.
    """
    has_left_slurm = "SLURM_STEP_ID" in environ and is_left_over(environ)
    nothing = Derivation(has_left_slurm=has_left_slurm)
    # The scheduler's variables do not describe a launcher inside a worker. A plug-in may count nodes in its own way.
    if contract.ENV_RUN_ID in environ or args.standalone or args.rdzv_backend not in BACKENDS:
        return nothing
    asked = _make_asked(args, origins)
    if not asked.names_place and (notice := describe_starter(environ)):
        return replace(nothing, notices=[notice] if asked.most == 1 else [])
    if "SLURM_JOB_ID" in environ or "SLURM_STEP_ID" in environ:
        found = derive_from_step(asked, environ, has_left_slurm=has_left_slurm)
    elif "JOB_COMPLETION_INDEX" in environ:
        found = derive_from_indexed_job(asked, environ)
    else:
        return nothing
    _apply_derivation(found, asked, args, environ, {} if origins is None else origins)
    return replace(found, has_left_slurm=has_left_slurm)


def _apply_derivation(
    found: Derivation, asked: Asked, args: Namespace, environ: Mapping[str, str], origins: Origins
) -> None:
    if found.is_per_gpu and "nproc_per_node" not in asked.given:
        workers, more = count_node_gpus(environ)
        found.values["nproc_per_node"] = workers
        found.notices.extend(more)
    values = {dest: value for dest, value in found.values.items() if value != getattr(args, dest)}
    for dest, value in values.items():
        variables = ", ".join(name for name in found.variables[dest] if environ.get(name))
        source = variables or ("GPUs of this node" if dest == "nproc_per_node" else "")
        derive(args, origins, Origin(found.kind, source, str(value)), **{dest: value})
    if values and found.is_first:
        told = " ".join(f"--{dest.replace('_', '-')}={value}" for dest, value in values.items())
        found.notices.insert(0, f"from {found.source}: {told}")


def _make_asked(args: Namespace, origins: Origins | None) -> Asked:
    """Return what a scheduler has to know of the command line."""
    if origins is not None:
        given = frozenset(origins)
    else:
        changed = {dest for dest, value in vars(args).items() if value != _DEFAULTS.get(dest, value)}
        given = frozenset(changed | {"nproc_per_node"})
    is_c10d = args.rdzv_backend == "c10d"
    names_place = bool(args.rdzv_endpoint) if is_c10d else names_rendezvous(args) or "master_addr" in given
    least, most = node_range(args.nnodes)
    flag = ""
    hosts: tuple[str, ...] = ()
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        flag, hosts = "--master-addr", (args.master_addr,)
    elif args.rdzv_backend in ("c10d", "static"):  # an etcd at localhost may be a proxy on each node
        try:
            hosts = tuple(host for host, _ in read_endpoints(args))
        except UsageError:
            pass  # it is refused when it is read again
        flag = "--rdzv-endpoint" if hosts else ""
    return Asked(
        nnodes=args.nnodes,
        least=least,
        most=most,
        given=given,
        names_place=names_place,
        backend=args.rdzv_backend,
        place_flag=flag,
        hosts=hosts,
        port=args.rdzv_endpoint.rpartition(":")[2],
    )

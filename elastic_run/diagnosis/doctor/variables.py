"""Variables that break jobs: leftovers of other jobs, settings for debugging, names with a typing error."""

from __future__ import annotations

import os

from elastic_run.diagnosis.doctor.finding import problem, warning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.diagnosis.doctor.finding import Finding, Subject

#: Variables of one worker. The launcher sets them for its workers; before that they are another job's.
_OF_A_WORKER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_OF_THE_PLACE = ("MASTER_ADDR", "MASTER_PORT")
#: Values with which a job runs, but slowly or without some of its devices, and why.
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "each CUDA kernel is waited for"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "each collective is checked by a second one"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node don't use NVLink"),
    "NCCL_IB_DISABLE": ("1", "nodes don't use InfiniBand"),
    "NCCL_SHM_DISABLE": ("1", "workers of a node don't use shared memory"),
}
_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")


def check(subject: Subject) -> list[Finding]:
    """Judge the environment."""
    environ = subject.environ
    found = [*judge_leftovers(environ), *judge_settings(environ), *judge_names(environ, subject.known_variables)]
    hosts = [host for host, _ in subject.endpoints]
    return found + judge_proxy(environ, hosts) + judge_python(environ)


def judge_leftovers(environ: Mapping[str, str]) -> list[Finding]:
    """Judge variables of a worker of another job."""
    if "TORCHELASTIC_RUN_ID" in environ:
        what = "this process is a worker of a job: TORCHELASTIC_RUN_ID is set"
        remedy = "run it outside of the job; if this shell only kept the variable: unset TORCHELASTIC_RUN_ID"
        return [warning(what, f"TORCHELASTIC_RUN_ID={environ['TORCHELASTIC_RUN_ID']}", remedy)]
    found = []
    ranks = [name for name in _OF_A_WORKER if name in environ]
    # The training operator of Kubeflow gives each pod all of them, for scripts without a launcher.
    if ranks:
        what = (
            f"{ranks[0]} is set, as if this were a worker: scripts started without the launcher would wait for others"
        )
        found.append(warning(what, _write(environ, ranks), f"unset {' '.join(ranks)}"))
    places = [name for name in _OF_THE_PLACE if name in environ]
    if places:
        what = f"{' and '.join(places)} {'is' if len(places) == 1 else 'are'} set, perhaps by another job"
        remedy = f"unset {' '.join(places)}; the launcher reads --master-addr, PET_MASTER_ADDR or --rdzv-endpoint"
        found.append(warning(what, _write(environ, places), remedy))
    return found


def judge_settings(environ: Mapping[str, str]) -> list[Finding]:
    """Judge settings that make a job slow, and numbers that are none."""
    found = [
        warning(f"{name}={environ[name]}: {effect}", "", f"unset {name}, unless you look for an error")
        for name, (value, effect) in _SLOW.items()
        if environ.get(name, "").upper() == value
    ]
    threads = environ.get("OMP_NUM_THREADS")
    if threads is not None and not threads.split(",")[0].isdecimal():
        what = f"OMP_NUM_THREADS={threads!r} is not a number: each worker starts a thread per CPU"
        found.append(problem(what, "", "unset OMP_NUM_THREADS, or set it to CPUs divided by workers"))
    return found


def judge_names(environ: Mapping[str, str], known: frozenset[str]) -> list[Finding]:
    """Judge names that begin as the launcher's variables and are none of them."""
    import difflib

    found = []
    for name in sorted(environ):
        if known and name.startswith("PET_") and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else f"unset {name}"
            found.append(problem(f"{name} is not a variable of elastic-run: its value is not used", "", remedy))
    return found


def judge_proxy(environ: Mapping[str, str], hosts: list[str]) -> list[Finding]:
    """Judge a proxy through which etcd would be asked."""
    proxy = next((name for name in _PROXIES if environ.get(name)), "")
    exempt = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    words = [word.strip() for word in exempt.split(",")]
    asked = [host for host in hosts if "*" not in words and not any(word and host.endswith(word) for word in words)]
    if not (proxy and asked):
        return []
    what = f"{proxy} is set: an etcd endpoint at {asked[0]} would be asked through the proxy"
    joined = ",".join([word for word in words if word] + asked)
    return [warning(what, _write(environ, [proxy]), f"export no_proxy={joined}")]


def judge_python(environ: Mapping[str, str]) -> list[Finding]:
    """Judge variables that change every interpreter."""
    found = []
    if environ.get("PYTHONHOME"):
        what = "PYTHONHOME is set: interpreters of other environments don't find their own modules"
        found.append(problem(what, f"PYTHONHOME={environ['PYTHONHOME']}", "unset PYTHONHOME"))
    missing = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and not os.path.exists(path)]
    if missing:
        what = f"PYTHONPATH names {missing[0]}, which is not there"
        found.append(warning(what, "", "correct PYTHONPATH, or mount the directory on this host"))
    return found


def _write(environ: Mapping[str, str], names: list[str]) -> str:
    return " ".join(f"{name}={environ[name]}" for name in names)

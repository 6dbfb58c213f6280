"""The lease in version 2 of etcd, whose client is python-etcd: its place, its settings, and a missing package."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, etcd_rendezvous, etcd_rendezvous_backend

from elastic_run.rendezvous.backend_table import open_lease, read_settings
from elastic_run.store.errors import StoreAccessError
from tests.support.etcd import Etcd, make_certificates
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import etcd

    from tests.support.launch import Launched

#: Keys of `--rdzv-conf`, as each of torch's two backends calls them.
_NAMES_OF_ETCD = ("cacert", "cert", "key")
_NAMES_OF_ETCD_V2 = ("ca_cert", "ssl_cert", "ssl_cert_key")


@pytest.mark.system
@pytest.mark.parametrize(
    ("backend", "names", "make_theirs"),
    [
        ("etcd", _NAMES_OF_ETCD, etcd_rendezvous._create_etcd_client),
        ("etcd-v2", _NAMES_OF_ETCD_V2, etcd_rendezvous_backend._create_etcd_client),
    ],
)
def test_settings_mean_what_they_mean_to_torch(
    tmp_path: Path, backend: str, names: tuple[str, ...], make_theirs: Callable[[RendezvousParameters], etcd.Client]
) -> None:
    """With the same `--rdzv-conf` torch's client and ours reach the same etcd, which wants a certificate of both."""
    certificates = make_certificates(tmp_path)
    files = (certificates.cacert, certificates.cert, certificates.key)
    conf = {"protocol": "https", **dict(zip(names, files, strict=True))}
    with Etcd(certificates=certificates) as server:
        endpoint = str(server.endpoints[0])
        theirs = make_theirs(RendezvousParameters(backend, endpoint, "job", 1, 1, None, **conf))
        settings = read_settings(backend, {**conf, "etcd_prefix": "/custom", "timeout": "77"})
        assert settings.job_settings["join_timeout"] == 77
        with closing(open_lease(backend, endpoint, "job", settings, secret=None, timeout=DEADLINE)) as lease:
            assert lease.acquire("a node", 10.0) is not None
        assert theirs.read("/custom/elastic-run/job/coordinator").value.endswith("a node")
        without = read_settings(backend, {key: value for key, value in conf.items() if key not in names[1:]})
        lease = open_lease(backend, endpoint, "job", without, secret=None, timeout=DEADLINE)
        with closing(lease), pytest.raises(StoreAccessError, match="certificate"):
            lease.read()


@pytest.mark.parametrize("spec", ["None", "importlib.machinery.ModuleSpec('etcd', None)"], ids=["none", "directory"])
def test_without_python_etcd_one_line_names_the_extra(
    spec: str, launch: Callable[..., Launched], worker: Callable[[str], Path], tmp_path: Path
) -> None:
    """Exit 2, before anything starts; Python takes a directory of that name for a package without content."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: {spec} if name == 'etcd' else found(name, *rest)\n",
        encoding="utf-8",
    )
    flags = ("--nnodes=1:2", "--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=job")
    launcher = launch(*flags, worker("say('running')"), env={"PYTHONPATH": str(tmp_path)})
    assert launcher.wait_exit() == 2
    assert launcher.stderr == (
        "elastic-run: error: --rdzv-backend: rendezvous backend 'etcd' needs python-etcd: "
        "pip install 'elastic-run[etcd]' (etcd-v3 needs no package)\n"
    )

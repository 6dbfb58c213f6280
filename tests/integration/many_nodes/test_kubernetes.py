"""Kubernetes: an indexed Job on virtual hosts, and the manifests against the schemas of Kubernetes and others."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from elastic_run import contract
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.parser import LauncherArgumentParser
from tests.support.hosts import virtual_hosts
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.hosts import HostProcess, VirtualHost, VirtualHosts


# --- an indexed Job: pods with names, whose Service comes late --------------------------------------------------------
ROOT = Path(__file__).parents[3]
SCRIPT = """
import os
os.write(1, "trained {RANK} of {WORLD_SIZE} on ".format(**os.environ).encode() + os.uname().nodename.encode() + b"\\n")
"""
_DOMAIN = "mesh.default.svc.cluster.local"


class Pods:
    """Three pods of the Job `train`, each with a hosts file of its own, as the kubelet writes it."""

    def __init__(self, hosts: VirtualHosts, directory: Path) -> None:
        self._hosts = hosts
        self._directory = directory
        (directory / "train.py").write_text(SCRIPT, encoding="utf-8")

    def start(self, *arguments: str) -> list[HostProcess]:
        """Start each pod's launcher; so far a pod knows its own name only."""
        return [self._start(index, host, arguments) for index, host in enumerate(self._hosts)]

    def _start(self, index: int, host: VirtualHost, arguments: tuple[str, ...]) -> HostProcess:
        self._hosts_file(host).write_text(f"127.0.0.1 localhost\n{_line(host)}\n", encoding="ascii")
        host.run("mount", "--bind", self._hosts_file(host), "/etc/hosts")
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        env = {"PATH": programs, "PYTHONPATH": str(ROOT), "JOB_COMPLETION_INDEX": str(index), "PET_NNODES": "3"}
        command = [sys.executable, "-m", "elastic_run", *arguments, "train.py"]
        return host.start(command, env=env, cwd=self._directory, merge=True)

    def publish(self) -> None:
        """Let all names be known everywhere, as a headless Service does when its pods have addresses."""
        lines = "".join(f"{_line(host)}\n" for host in self._hosts)
        for host in self._hosts:  # in place: the mount holds the file, not its name
            with self._hosts_file(host).open("a", encoding="ascii") as file:
                file.write(lines)

    def _hosts_file(self, host: VirtualHost) -> Path:
        return self._directory / f"hosts.{host.name}"


def _line(host: VirtualHost) -> str:
    return f"{host.address} {host.name}.{_DOMAIN} {host.name}"


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """Boot three hosts under the names that the Job's pods have."""
    with virtual_hosts(3, prefix="train-") as hosts:
        yield Pods(hosts, tmp_path)


def test_pods_whose_service_comes_late_are_one_job(pods: Pods) -> None:
    """Names are looked up again until they are known; ranks follow the pods' indexes, and one pod says what follows."""
    launchers = pods.start()
    wait_until(lambda: "0.mesh.default" in launchers[2].stdout.partition("waiting")[2], what="a pod that waits")
    pods.publish()
    assert [launcher.wait_exit() for launcher in launchers] == [0, 0, 0], [one.stdout for one in launchers]
    trained = [re.findall(r"trained (.*)", launcher.stdout) for launcher in launchers]
    assert trained == [[f"{index} of 3 on train-{index}"] for index in range(3)]
    told = [launcher.stdout.count("from the Kubernetes Job: --rdzv-backend=c10d --rdzv-") for launcher in launchers]
    assert told == [1, 0, 0]


# --- the manifests of examples/kubernetes and of the docs -------------------------------------------------------------
EXAMPLES = ROOT / "examples" / "kubernetes"
#: Made from the CustomResourceDefinitions of JobSet 0.13 and Kubeflow Trainer 2.1, without descriptions and pod specs:
#: https://github.com/kubernetes-sigs/jobset/blob/main/config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml
#: https://github.com/kubeflow/trainer/blob/master/manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml
SCHEMAS = {"JobSet": "jobset", "TrainJob": "trainjob"}
VERSION = "1.37"

Resource = dict[str, Any]


def read(text: str) -> list[Resource]:
    """Return the resources of a manifest."""
    return [resource for resource in yaml.safe_load_all(text) if resource]


def of_the_docs() -> list[Resource]:
    """Return the resources of the page about containers."""
    page = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")
    return [resource for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) for resource in read(block)]


MANIFESTS = {path.name: read(path.read_text(encoding="utf-8")) for path in sorted(EXAMPLES.glob("*.yaml"))}
MANIFESTS["containers.md"] = of_the_docs()
RESOURCES = [
    pytest.param(resource, id=f"{name}-{resource['kind']}")
    for name, resources in MANIFESTS.items()
    for resource in resources
]


def close(schema: Any) -> Any:
    """Let a schema refuse fields that it doesn't name: the API server drops them, and nobody would notice."""
    if isinstance(schema, list):
        return [close(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: close(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in schema:
        closed.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    return closed


def find_pods(part: Any) -> list[Resource]:
    """Return the pod specs anywhere in a resource."""
    if isinstance(part, list):
        return [found for each in part for found in find_pods(each)]
    if not isinstance(part, dict):
        return []
    return [part] if "containers" in part else [found for each in part.values() for found in find_pods(each)]


def validate_pod(spec: Resource) -> None:
    """Refuse a pod spec that Kubernetes would."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
    kubernetes_validate.validate(pod, VERSION, strict=True)


@pytest.mark.parametrize("resource", RESOURCES)
def test_a_manifest_is_valid(resource: Resource) -> None:
    """Also without fields that the schema doesn't name."""
    name = SCHEMAS.get(resource["kind"])
    if name is None:
        kubernetes_validate.validate(resource, VERSION, strict=True)
        return
    schema = json.loads((ROOT / "tests" / "data" / "kubernetes" / f"{name}.json").read_text(encoding="utf-8"))
    jsonschema.validate({**resource, "metadata": {}}, close(schema))
    for spec in find_pods(resource):
        validate_pod(spec)


def commands() -> list[list[str]]:
    """Return the commands of elastic-run in all manifests."""

    def find(part: Any) -> list[list[str]]:
        if isinstance(part, list):
            return [found for each in part for found in find(each)]
        if not isinstance(part, dict):
            return []
        own = [part["command"]] if part.get("command", [""])[0] == "elastic-run" else []
        return own + [found for each in part.values() for found in find(each)]

    return [command for resources in MANIFESTS.values() for command in find(resources)]


def test_the_commands_of_the_manifests_parse() -> None:
    """Each of their flags exists, and none is missing."""
    assert len(commands()) == len(MANIFESTS) - 1  # etcd.yaml starts none
    for command in commands():
        assert LauncherArgumentParser(FLAGS).parse_args(command[1:]).training_script == "train.py"


def test_the_exit_codes_of_the_manifests_are_the_launchers() -> None:
    """Where another try can't help is the same list everywhere, and made of the codes that mean it."""
    useless = [
        contract.EXIT_USAGE,
        contract.EXIT_NOT_EXECUTABLE,
        contract.EXIT_NOT_FOUND,
        contract.EXIT_REPEATED_FAILURE,
        contract.EXIT_REFUSED,
    ]
    texts = [(EXAMPLES / name).read_text(encoding="utf-8") for name in ("indexed-job.yaml", "jobset.yaml")]
    for text in texts:
        (failing,) = re.findall(r"action: FailJob\n\s+onExitCodes: .* values: \[(.*?)\]", text)
        assert failing == ", ".join(map(str, useless))
    (in_place,) = re.findall(r"operator: NotIn, values: \[(.*?)\]", texts[1])
    of_node = [contract.EXIT_UNKILLABLE_WORKER, contract.EXIT_UNHEALTHY, contract.EXIT_EXCLUDED]
    assert sorted(map(int, in_place.split(", "))) == sorted([0, *useless, *of_node])

"""The doctor's checks read this machine: ports, directories, name servers and programs that a test gives."""

from __future__ import annotations

import os
import socket
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest

from elastic_run.diagnosis.doctor import directories, gpus, names, ports, resource_limits, variables
from elastic_run.diagnosis.doctor.checks import run_checks
from elastic_run.diagnosis.doctor.finding import Subject, problem
from elastic_run.diagnosis.doctor.network_probe import measure_rate
from elastic_run.diagnosis.doctor.ports import PortState
from elastic_run.store.errors import REFUSED

if TYPE_CHECKING:
    from pathlib import Path

_LOOPBACK = "127.0.0.1"


def test_a_port_of_this_host_is_opened_for_a_moment() -> None:
    """A taken port is a problem. After the check the port is free again."""
    with socket.create_server((_LOOPBACK, 0)) as server:
        subject = Subject({}, "h", endpoints=(server.getsockname(),))
        (found,) = ports.check(subject)
    assert "this host, is in use" in found.what
    assert ports.check(subject) == ports.check(subject) == []


def test_a_port_of_another_host_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that accepts the connection is in order."""
    monkeypatch.setattr(ports, "can_bind", lambda *_: False)
    with socket.create_server((_LOOPBACK, 0)) as server:
        subject = Subject({}, "h", endpoints=(server.getsockname(), ("nobody", -1)))
        assert ports.check(subject) == []
    (found,) = ports.check(subject)
    assert "refuses connections" in found.what


@pytest.mark.parametrize(("most_nodes", "count"), [(1, 1), (2, 0)])
def test_only_nodes_that_meet_may_find_a_port_without_a_server(
    monkeypatch: pytest.MonkeyPatch, most_nodes: int, count: int
) -> None:
    """A job of one node has nobody to wait for: its endpoint is a store that should run already."""
    monkeypatch.setattr(ports, "_try", lambda host, port, _: PortState(host, port, is_own=False, failure=REFUSED))
    subject = Subject({}, "h", endpoints=(("store", 2379),), most_nodes=most_nodes)
    assert len(ports.check(subject)) == count


def test_the_directory_of_temporary_files_is_tried(tmp_path: Path) -> None:
    """TMPDIR names it; a file in its place is told."""
    assert directories.check(Subject({"TMPDIR": str(tmp_path / "made" / "later")}, "h")) == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (found,) = directories.check(Subject({"TMPDIR": str(tmp_path / "file")}, "h"))
    assert "it is a file" in found.remedy


def test_a_connection_that_breaks_has_no_rate() -> None:
    """Nobody listens there any more."""
    with socket.create_server((_LOOPBACK, 0)) as server:
        host, port = server.getsockname()
    assert measure_rate(host, port, 0.1) == 0.0


@pytest.mark.parametrize(("kind", "expected"), [("answers", True), ("refuses", True), ("is silent", False)])
def test_a_name_server_is_asked(monkeypatch: pytest.MonkeyPatch, kind: str, *, expected: bool) -> None:
    """Any answer is good, even an error: a name server that answers delays nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((_LOOPBACK, 0))
        monkeypatch.setattr(names, "_DNS_PORT", server.getsockname()[1])

        def answer() -> None:
            question, client = server.recvfrom(512)
            server.sendto(question, client)

        thread = threading.Thread(target=answer)
        if kind == "refuses":
            server.close()
        elif kind == "answers":
            thread.start()
        assert names._answers(_LOOPBACK, 0.1 if kind == "is silent" else 20.0) is expected
        if kind == "answers":
            thread.join()


@pytest.mark.parametrize("has_driver", [False, True])
def test_a_driver_without_its_program_is_told(tmp_path: Path, *, has_driver: bool) -> None:
    """A machine that has neither is in order."""
    if has_driver:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").touch()
    found = gpus.check(Subject({"PATH": str(tmp_path)}, "h", root=str(tmp_path)))
    assert len(found) == has_driver


def test_all_variables_are_judged() -> None:
    """Leftovers, settings, names, a proxy and those of Python each have their finding."""
    environ = {"RANK": "0", "NCCL_P2P_DISABLE": "1", "PET_NNODE": "2", "http_proxy": "http://p", "PYTHONHOME": "/none"}
    subject = Subject(environ, "h", endpoints=(("etcd", 2379),), known_variables=frozenset({"PET_NNODES"}))
    found = variables.check(subject)
    assert [finding.what.split()[0].partition("=")[0] for finding in found] == list(environ)
    assert found[2].remedy == "did you mean PET_NNODES?"
    assert variables.check(Subject({}, "h")) == []


def test_only_the_threads_of_this_user_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of processes is each user's own; a process that has just ended shows neither user nor threads."""
    other = os.getuid() + 1
    processes = [(os.getuid(), 3), (other, 40), (os.getuid(), None), (None, 500), (os.getuid(), 2)]
    shown = [
        SimpleNamespace(info={"uids": uid if uid is None else SimpleNamespace(real=uid), "num_threads": count})
        for uid, count in processes
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda _: iter(shown))
    assert resource_limits._count_running() == 5


def test_all_checks_together_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many hang: when it has passed, no other check is waited for."""
    end = threading.Event()
    limits: list[float] = []
    join = threading.Thread.join

    def note(thread: threading.Thread, timeout: float) -> None:
        limits.append(timeout)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", note)
    hangs = {name: lambda _: [problem(f"{end.wait()}", "", "")] for name in ("disks", "names", "ports")}
    found = run_checks(Subject({}, "h"), families=hangs, deadline=0.1)
    end.set()
    assert (len(found), sum(limits) < 0.5) == (3, True)

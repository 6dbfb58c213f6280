"""The files in which PBS, LSF and Grid Engine name the hosts of a job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elastic_run.cluster.host_files import find_job_hosts

if TYPE_CHECKING:
    from pathlib import Path


def test_each_host_counts_once_and_this_one_is_among_them(tmp_path: Path) -> None:
    """A host has a line for each of its slots; a file without this host is left over from another job."""
    path = tmp_path / "hosts"
    path.write_text("node0 8 all.q\nnode0.cluster\nnode1\n\nnode1\n", encoding="utf-8")
    environ = {"PE_HOSTFILE": str(path)}
    assert find_job_hosts(environ, "node1.cluster") == ("PE_HOSTFILE", ("node0", "node0.cluster", "node1"))
    assert find_job_hosts(environ, "login") == ("", ())
    assert find_job_hosts({}, "node1") == ("", ())


def test_what_is_no_file_and_no_name_is_passed_over(tmp_path: Path) -> None:
    """A pipe without a writer holds nobody up, and no name obeys the terminal's language."""
    os.mkfifo(tmp_path / "pipe")
    assert find_job_hosts({"PBS_NODEFILE": str(tmp_path / "pipe")}, "node0") == ("", ())
    path = tmp_path / "hosts"
    path.write_text("node0\n\x1b[2Jevil\n", encoding="utf-8")
    assert find_job_hosts({"LSB_DJOB_HOSTFILE": str(path)}, "node0") == ("LSB_DJOB_HOSTFILE", ("node0",))

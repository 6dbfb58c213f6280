"""A log directory to which other users may write: they can read no more than it allows, and lead no write elsewhere."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from elastic_run.files import open_own, replace_file
from tests.support.launch import ELASTIC_RUN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

#: A user who is neither root nor this one.
_STRANGER = 54321


def _permissions(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("above", "expected"),
    [
        pytest.param(0o755, 0o755, id="readable"),
        pytest.param(0o750, 0o750, id="readable for a group"),
        pytest.param(0o775, 0o700, id="writable for a group"),
        pytest.param(0o1777, 0o700, id="writable for all"),
        pytest.param(0o2775, 0o750, id="a group's, on purpose"),
    ],
)
def test_a_run_is_as_open_as_the_log_directory_and_never_writable_for_others(
    launch: Launch, worker: Worker, tmp_path: Path, above: int, expected: int
) -> None:
    """The umask does not matter: other users could put links there, through which this user's files are overwritten."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(above)
    for place in (shared, shared / "logs"):
        flags = (f"--log-dir={place}", "--flight-recorder", worker("pass"))
        assert launch(*flags, program=["sh", "-c", 'umask 0; exec "$@"', "sh", *ELASTIC_RUN]).wait_exit() == 0
    directories = [path for path in shared.rglob("*") if path.is_dir() and not path.is_symlink()]
    assert len(directories) == 7  # two runs with an attempt and a rank each, and the directory of the second run
    assert {_permissions(path) for path in directories} == {expected}


def test_a_link_in_the_place_of_the_page_is_replaced(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """`elastic-run report LOGDIR` does not write through a link that another user has put into the log directory."""
    logs, victim = tmp_path / "logs", tmp_path / "victim"
    victim.write_text("precious")
    assert launch(f"--log-dir={logs}", worker("pass")).wait_exit() == 0
    (logs / "report.html").symlink_to(victim)
    assert launch("report", logs).wait_exit() == 0
    assert victim.read_text() == "precious"
    assert "</html>" in (logs / "report.html").read_text(encoding="utf-8")
    assert not (logs / "report.html").is_symlink()


def test_a_file_is_replaced_and_a_link_is_not_followed(tmp_path: Path) -> None:
    """Dumps and reports take the place of what has their name; nothing else is left behind."""
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    for content in (b"first", b"second"):
        replace_file(str(link), content)
        assert link.read_bytes() == content
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "victim"]
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(str(tmp_path / "directory"), b"")
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.system  # for another owner of the link
def test_what_another_user_has_put_there_is_not_written_to(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A stranger's link is not followed, this user's is; `latest` of another user stays, and a line says so."""
    victim, link = tmp_path / "victim", tmp_path / "latest"
    victim.write_text("precious")
    link.symlink_to(victim)
    os.close(open_own(str(link), os.O_WRONLY))
    os.chown(link, _STRANGER, _STRANGER, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"it belongs to another user .uid {_STRANGER}."):
        open_own(str(link), os.O_WRONLY | os.O_TRUNC)
    job = launch(f"--log-dir={tmp_path}", worker("pass"))
    assert job.wait_exit() == 0
    assert f"the link {link} belongs to another user (uid {_STRANGER}), and does not lead to this run: 2" in job.stderr
    assert stat.S_ISLNK(link.lstat().st_mode)
    assert link.readlink() == victim
    assert victim.read_text() == "precious"

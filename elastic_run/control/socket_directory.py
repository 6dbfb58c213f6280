"""The directory of this user's control sockets on this machine: one socket for each agent, named by its pid.

- The directory has mode 0700 and belongs to the user; one that does not is neither used nor read, so no other user can
  put a socket there, or ask an agent. The sockets have mode 0600.
- It is in /tmp: $XDG_RUNTIME_DIR is removed when the user logs out, while a job under nohup runs on.
- A path has at most 107 bytes (unix(7)), so the name has no run id.
- A killed agent leaves its socket, at which no process listens (`is_stale`). Each command removes the stale ones.
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, while the workers start
import os
import stat

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SUFFIX = ".sock"
#: The version of the control protocol. The path of each request begins with it. Client and agent both import this
#: module; an agent does not import the client, which would cost it 4 MB.
VERSION = 1


def _locate(environment: Mapping[str, str]) -> str:
    place = environment.get(contract.ENV_CONTROL_DIR) or "/tmp"  # noqa: S108 - the directory in it is private
    return os.path.join(os.path.abspath(place), f"elastic-run-{os.geteuid()}")


def make_directory(environment: Mapping[str, str]) -> str:
    """Return the directory of this user's sockets, made now if it is missing; OSError if it can't be trusted."""
    path = _locate(environment)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    if problem := _explain_unfit(path):
        raise OSError(problem)
    return path


def _explain_unfit(path: str) -> str:
    """Return why a directory can't be trusted, or an empty string; raises OSError if it isn't there."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a directory"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user ({status.st_uid})"
    if status.st_mode & 0o077:
        return f"{path} is open to other users (chmod 700 mends it)"
    return ""


def find_sockets(environment: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the paths of this user's sockets, stale ones included, and why the directory was not read, or ""."""
    directory = _locate(environment)
    try:
        problem = _explain_unfit(directory)
        names = [] if problem else sorted(os.listdir(directory))
    except OSError:
        return [], ""  # no agent was here
    return [os.path.join(directory, name) for name in names if name.endswith(SUFFIX)], problem


def is_stale(path: str) -> bool:
    """Whether no process listens at a socket any more."""
    client = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    client.settimeout(0)
    try:
        client.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # gone, or its agent has many clients
    finally:
        client.close()
    return False


def remove_stale(path: str) -> None:
    """Remove a socket at which no process listens; do nothing if it is gone."""
    try:
        os.unlink(path)
    except OSError:
        pass

"""The directory of this user's control sockets on this machine: one socket for each agent.

Rules
- The directory has mode 0700 and belongs to the user; a directory under its name that does not is neither used nor
  read. So no other user can put a socket there, or ask an agent. The sockets have mode 0600.
- /tmp comes first. $XDG_RUNTIME_DIR is not used: it is removed when the user logs out, while a job under nohup runs on,
  and a batch job inherits the name without the directory. /dev/shm is for machines whose /tmp is read-only.
- A path has at most 107 bytes (unix(7)), so a socket is named by its agent's pid, and not by the job.
- A killed agent leaves its socket, at which no process listens (`is_stale`). Each agent that starts, and
  each command, removes the stale ones.
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, while the workers start
import os
import stat

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

#: Bytes of a Unix socket's path.
PATH_LIMIT = 107
SUFFIX = ".sock"
_PLACES = ("/tmp", "/dev/shm")  # noqa: S108 - the directory in it is private
_PRIVATE = 0o700
_OTHERS = 0o077


def list_directories(environment: Mapping[str, str]) -> list[str]:
    """Return where sockets of this user may be, the usual place first."""
    given = environment.get(contract.ENV_CONTROL_DIR)
    places = (given,) if given else _PLACES
    return [os.path.join(os.path.abspath(place), f"elastic-run-{os.geteuid()}") for place in places]


def make_directory(environment: Mapping[str, str]) -> str:
    """Return the first directory that is fit, made now if it is missing.

    Raises:
        OSError: There is none.
    """
    problems = []
    for path in list_directories(environment):
        try:
            os.mkdir(path, _PRIVATE)
        except FileExistsError:
            pass
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        problem = explain_unfit(path)
        if not problem:
            return path
        problems.append(problem)
    raise OSError("; ".join(problems))


def explain_unfit(path: str) -> str:
    """Return why a directory can't be trusted, or an empty string.

    Raises:
        OSError: It isn't there.
    """
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a directory"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user ({status.st_uid})"
    if status.st_mode & _OTHERS:
        return f"{path} is open to other users (chmod 700 mends it)"
    return ""


def find_sockets(environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the paths of this user's sockets, stale ones included, and why a directory was not read."""
    paths: list[str] = []
    problems: list[str] = []
    for directory in list_directories(environment):
        try:
            problem = explain_unfit(directory)
            names = [] if problem else sorted(os.listdir(directory))
        except OSError:
            continue  # no agent was here
        if problem:
            problems.append(problem)
        found = (os.path.join(directory, name) for name in names if name.endswith(SUFFIX))
        paths += [path for path in found if len(os.fsencode(path)) <= PATH_LIMIT]
    return paths, problems


def pid_in_name(path: str) -> int:
    """Return the pid of a socket's agent, in the agent's pid namespace; 0 if the name has none."""
    number = os.path.basename(path).partition("-")[0]
    return int(number) if number.isdecimal() else 0


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

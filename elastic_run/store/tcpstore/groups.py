"""Keeps apart the process groups that the workers form one after another within one life.

Why
- `init_process_group("env://")` over a store that outlives the group writes the same keys each time
  (`default_pg/0//cpu//0/RANK`). A worker that forms its second group finds the first one's addresses and connects to
  sockets that are gone: over torch's own server, ten cycles of init, all-reduce and destroy failed 8 times of 8.

Rules
- A worker's n-th group meets the others' n-th groups: the keys of the second and later ones get the number. Nothing
  else is touched, so a job that forms one group sees what torch's server would show it.
- A worker is known by its address and the number in its PING, which is its pid; torch before 2.5 sends none, and gets
  what torch's server gives. A group begins with a connection of its own, which torch opens with a count at `init/` (a
  clone doesn't), and counts from its first key of a process group on.
- A group whose connection is still open is not followed by another one: the process keeps its number. So clones, a
  second store beside the first, and containers whose workers all have pid 1 are served as torch would serve them.
- Keys of a number are dropped when its last connection is closed and a later number exists.
"""

from __future__ import annotations

from elastic_run.store.errors import LimitError
from elastic_run.store.limits import KEY_LIMIT, PROCESS_LIMIT
from elastic_run.store.tcpstore import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.store.tcpstore.memory_store import MemoryStore

_OPENING_KEY = b"init/"
_GROUP_KEY = b"/default_pg/"
_NUMBERED_KEY = b"/default_pg#%d/"
_NO_PID = 0
_UNKNOWN = 0
_FIRST = 1


class Member:
    """A connection's part in its process's groups.

    Attributes:
        process: Who it belongs to.
        number: Which of the process's groups it serves; 0 as long as it has not asked for a key of one.
    """

    __slots__ = ("has_opened", "is_counted", "number", "process")

    def __init__(self, host: str) -> None:
        self.process: tuple[str, int] = (host, _NO_PID)
        self.number = _UNKNOWN
        self.has_opened = False
        self.is_counted = False


class ProcessGroups:
    """Numbers the groups and their keys.

    Args:
        data: The store in which keys of past groups are dropped.
    """

    def __init__(self, data: MemoryStore) -> None:
        self._data = data
        self._numbers: dict[tuple[str, int], int] = {}
        self._open_by_process: dict[tuple[str, int], int] = {}
        self._open_by_number: dict[int, int] = {}
        self._newest = _FIRST

    def clear(self) -> None:
        """Begin anew, with no process known."""
        self._numbers.clear()
        self._newest = _FIRST

    def rename(self, member: Member, operation: int, fields: list[bytes | int]) -> list[bytes | int]:
        """Return a message's fields with the keys of process groups numbered."""
        if member.number == _UNKNOWN:
            self._learn(member, operation, fields)
        if member.number <= _FIRST:
            return fields
        numbered = _NUMBERED_KEY % member.number
        kinds = wire.LAYOUTS[operation].kinds if operation in wire.LAYOUTS else ()
        return [
            field.replace(_GROUP_KEY, numbered, 1)
            if isinstance(field, bytes) and kinds[position % len(kinds)] == KEY_LIMIT
            else field
            for position, field in enumerate(fields)
        ]

    def leave(self, member: Member) -> None:
        """Note that a connection is closed."""
        if not member.is_counted:
            return
        member.is_counted = False
        self._open_by_process[member.process] -= 1
        self._open_by_number[member.number] -= 1
        if not self._open_by_process[member.process]:
            del self._open_by_process[member.process]
        if not self._open_by_number[member.number]:
            del self._open_by_number[member.number]
            self._drop_past(member.number)

    def _learn(self, member: Member, operation: int, fields: list[bytes | int]) -> None:
        first = fields[0] if fields else b""
        if operation == wire.PING and isinstance(first, int):
            member.process = (member.process[0], first)
        elif operation == wire.ADD and first == _OPENING_KEY:
            member.has_opened = True
        elif isinstance(first, bytes) and _GROUP_KEY in first:
            self._join(member)

    def _join(self, member: Member) -> None:
        process = member.process
        number = self._numbers.get(process, _FIRST)
        if member.has_opened and process[1] != _NO_PID:
            if process in self._numbers and process not in self._open_by_process:
                number += 1
            if process not in self._numbers and len(self._numbers) >= PROCESS_LIMIT:
                message = f"more than {PROCESS_LIMIT} processes form groups in one store"
                raise LimitError(message, "processes")
            self._numbers[process] = number
            self._open_by_process[process] = self._open_by_process.get(process, 0) + 1
            self._open_by_number[number] = self._open_by_number.get(number, 0) + 1
            member.is_counted = True
        member.number = number
        if number > self._newest:
            self._newest = number
            self._drop_past(number - 1)

    def _drop_past(self, number: int) -> None:
        if number >= self._newest or number in self._open_by_number:
            return
        mark = _GROUP_KEY if number == _FIRST else _NUMBERED_KEY % number
        for key in self._data.list_keys():
            if mark in key:
                self._data.delete_key(key)

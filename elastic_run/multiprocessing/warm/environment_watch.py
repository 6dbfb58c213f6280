"""The variables that are read before there are workers: a template lacks the variables in which workers differ.

The watch begins in the line of our .pth file. So it covers the later parts of Python's own start (later .pth files,
`sitecustomize`, `usercustomize`) and the import of modules. The parts before that line run again in a process of their
own (`startup_replay`).

A copy of the whole environment lacks those variables too. Most copies are made for a child process and dropped again,
by torch, networkx, `platform` and `ctypes.util` for example. So only a copy that is kept counts. For this check one
secret variable has the same objects as name and value in each copy while the watch is on; their reference counts show
whether a copy is left.

A read of such a variable may also go through a copy that is dropped, or through the names of all variables. So the
environment has a stand-in for each variable that it lacks while the watch is on. Its name, as a copy has it, has the
hash of the missing name, so that a dict compares the two, and each comparison is noted (`_StandIn`).

Rejected: values of the template that can be told apart (modules create directories by their rank, and an int has no
mark); a search for names in the constants of modules (most of torch has them, and reads them in functions).
"""

from __future__ import annotations

import os
import sys

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

#: Variables that a template doesn't have, or not as its workers will.
_WORKERS_OWN = frozenset(
    (
        *(contract.ENV_RANK, contract.ENV_LOCAL_RANK, contract.ENV_GROUP_RANK, contract.ENV_ROLE_RANK),
        *(contract.ENV_WORLD_SIZE, contract.ENV_LOCAL_WORLD_SIZE, contract.ENV_GROUP_WORLD_SIZE),
        *(contract.ENV_ROLE_WORLD_SIZE, contract.ENV_ROLE_NAME, contract.ENV_MASTER_ADDR, contract.ENV_MASTER_PORT),
        *(contract.ENV_RESTART_COUNT, contract.ENV_MAX_RESTARTS, contract.ENV_RUN_ID, contract.ENV_ERROR_FILE),
        *(contract.ENV_USE_AGENT_STORE, contract.ENV_SIGNALS_TO_HANDLE, contract.ENV_SCALE_UP_SIGNAL),
        *(contract.ENV_TIMER_FILE, contract.ENV_STOP_TIME),
    )
)
#: The same, with variables that differ between workers in some jobs only.
_WATCHED = _WORKERS_OWN | {contract.ENV_CUDA_VISIBLE_DEVICES, contract.ENV_HIP_VISIBLE_DEVICES}
#: Modules that read for other modules.
_READING_FOR_OTHERS = frozenset((__name__, "os", "_collections_abc", "collections.abc", "copy"))
#: Modules that are named for having gone through the environment, where several have.
_MOST_NAMED = 3


class EnvironmentWatch:
    """Sees reads and copies of this process's environment from now on, until it is closed."""

    def __init__(self) -> None:
        self._reads: dict[str, str] = {}
        self._copiers: list[str] = []
        self._others_copiers: list[str] = []
        self._environs: list[Any] = [os.environ, os.environb]
        self._before = [(each.encodekey, each.decodekey, each.decodevalue) for each in self._environs]
        self._marks = _make_marks(os.environ)
        self._stand_ins = _make_stand_ins(os.environ, self._note_comparison)
        # Names as an iteration gave them: to sort them, or to get the value for one of them, is no read of a variable.
        self._passed: dict[bytes, Any] = {}
        for environ in self._environs:
            self._watch(environ)
        self._references = self._count_references()

    def _watch(self, environ: Any) -> None:
        """Put functions in the place of its own; no methods, since a deep copy of the environment has them too."""
        encode, decode, decode_value = environ.encodekey, environ.decodekey, environ.decodevalue
        note_read, copiers, stand_ins = self._note_read, self._copiers, self._stand_ins
        raw_name, raw_value, name, value = self._marks or (None,) * 4
        passed = self._passed if environ is os.environ else {}
        if self._marks:
            passed[raw_name] = name if environ is os.environ else raw_name

        def encode_key(key: Any) -> Any:
            raw = encode(key)
            if passed.get(raw) is not key and (text := os.fsdecode(key)) in _WATCHED:
                note_read(text)
            return raw

        def decode_key(raw: Any) -> Any:
            if environ is not os.environ:
                key = decode(raw)
            else:
                key = name if raw is raw_name else stand_ins.get(raw) or decode(raw)
            passed[raw] = key
            reader = _find_reader()
            if reader not in copiers:
                copiers.append(reader)
            return key

        environ.encodekey, environ.decodekey = encode_key, decode_key
        if environ is os.environ:
            environ.decodevalue = lambda raw: value if raw is raw_value else decode_value(raw)

    def _note_comparison(self, name: str) -> None:
        if name in _WATCHED and self._passed.get(os.fsencode(name)) is not name:
            self._note_read(name)

    def _note_read(self, name: str) -> None:
        if name not in self._reads:
            self._reads[name] = _find_reader()

    def close(self) -> None:
        """Let the environment be read without a note."""
        for raw in self._stand_ins:
            self._environs[0]._data.pop(raw, None)  # noqa: SLF001 - a module may have replaced os.environ
            os.unsetenv(raw)  # C's environment has it if a module has set each variable again
        for environ, (encode_key, decode_key, decode_value) in zip(self._environs, self._before, strict=True):
            environ.encodekey, environ.decodekey, environ.decodevalue = encode_key, decode_key, decode_value

    def report(self) -> dict[str, Any]:
        """Return the observations as plain data for `add`."""
        return {"reads": self._reads, "copiers": self._copiers if self._is_copied() else []}

    def add(self, report: dict[str, Any]) -> None:
        """Add the observations of another process."""
        self._reads.update(report["reads"])
        self._others_copiers += report["copiers"]

    def find_hazard(self, own: Collection[str] = ()) -> str:
        """Return the variable that workers would miss, as the end of a sentence about a module; or ""."""
        for name, reader in self._reads.items():
            if name in _WORKERS_OWN or name in own:
                return f"reads {name}, whose value differs from worker to worker (in {reader})"
        if copiers := self._others_copiers or (self._is_copied() and (self._copiers or ["an unknown module"])):
            places = ", ".join(copiers[:_MOST_NAMED])
            return f"keeps a copy of the environment, which has no {contract.ENV_RANK} yet (in {places})"
        self._copiers.clear()
        return ""

    def _is_copied(self) -> bool:
        if self._count_references() == self._references:
            return False
        import gc

        gc.collect()
        return any(now > before for now, before in zip(self._count_references(), self._references, strict=True))

    def _count_references(self) -> list[int]:
        return [*map(sys.getrefcount, self._marks)]


def _make_marks(environ: Any) -> tuple[Any, ...]:
    """Return name and value of the secret variable: the objects in the environment, and the objects in copies."""
    raw_name = next((raw for raw in environ._data if raw == os.fsencode(contract.ENV_TOKEN)), None)  # noqa: SLF001
    if raw_name is None:
        return ()
    raw_value = environ._data[raw_name]  # noqa: SLF001 - the objects themselves
    return raw_name, raw_value, environ.decodekey(raw_name), environ.decodevalue(raw_value)


class _StandIn(str):
    """A name in copies of the environment that notes when somebody looks for the variable that is missing there."""

    __slots__ = ("_note_comparison", "_watched")
    _note_comparison: Callable[[str], None]
    _watched: str

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) and not isinstance(other, _StandIn):
            self._note_comparison(other)
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._watched)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str.__str__(self),)


def _make_stand_ins(
    environ: Any,
    note_comparison: Callable[[str], None],
) -> dict[bytes, _StandIn]:
    """Give the environment a stand-in for each variable that it lacks; return their names as copies have them."""
    stand_ins = {}
    for name in _WORKERS_OWN:
        raw = os.fsencode(f"ELASTIC_RUN_NO_{name}")
        if os.fsencode(name) not in environ._data:  # noqa: SLF001 - not C's environment, which children inherit
            environ._data[raw] = b""  # noqa: SLF001
            stand_ins[raw] = stand_in = _StandIn(os.fsdecode(raw))
            stand_in._note_comparison, stand_in._watched = note_comparison, name  # noqa: SLF001
    return stand_ins


def _find_reader() -> str:
    """Return the module or the .pth file whose code reads the environment now."""
    frame = sys._getframe(1)  # noqa: SLF001 - the only way
    while frame.f_back is not None and frame.f_globals.get("__name__") in _READING_FOR_OTHERS:
        frame = frame.f_back
    if frame.f_globals.get("__name__") != "site":
        return str(frame.f_globals.get("__name__"))
    while frame.f_back is not None and frame.f_code.co_name != "addpackage":
        frame = frame.f_back
    return str(frame.f_locals.get("name", "a .pth file"))

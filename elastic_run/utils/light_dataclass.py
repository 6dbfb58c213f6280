"""`dataclass` and `field` that cost nothing to import: torch's public records, without 25 ms before the first worker.

The standard module imports `inspect`, `ast` and `dis`, and compiles five methods per class. Importing it would take a
third of the time from exec to the first worker. A class decorated here behaves like a dataclass: keyword and positional
arguments, defaults, factories, `__post_init__`, `==`, `repr`; `dataclasses.fields`, `replace`, `asdict`, `is_dataclass`
and `inspect.signature` work, because what they look at (`__dataclass_fields__`, `__signature__`) is made when they ask,
by the standard module itself. Only `init`, `default` and `default_factory` of a field are supported; type checkers are
shown the standard module instead of this one.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MISSING = object()


class Field:
    """What `field` said of one attribute."""

    __slots__ = ("default", "default_factory", "init")

    def __init__(self, default: Any, default_factory: Any, *, init: bool) -> None:  # noqa: ANN401
        self.default = default
        self.default_factory = default_factory
        self.init = init

    def make(self) -> Any:  # noqa: ANN401
        """Return the default, a fresh one where a factory was given."""
        return self.default if self.default_factory is _MISSING else self.default_factory()

    @property
    def is_required(self) -> bool:
        """Whether the constructor must be given a value."""
        return self.default is _MISSING and self.default_factory is _MISSING


def field(*, default: Any = _MISSING, default_factory: Any = _MISSING, init: bool = True) -> Any:  # noqa: ANN401
    """Describe an attribute, as `dataclasses.field` does."""
    return Field(default, default_factory, init=init)


class _MadeByTheStandardModule:
    """A class attribute that the standard module makes when somebody looks at it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, _instance: object, owner: type) -> Any:  # noqa: ANN401
        twin = _standard(owner)
        if self._name == "__signature__":
            import inspect  # noqa: PLC0415 - this is what must not be imported early

            made: Any = inspect.signature(twin)
        else:
            made = getattr(twin, self._name)
        setattr(owner, self._name, made)
        return made


def dataclass(cls: type) -> type:
    """Turn a class with annotated attributes into a record."""
    fields = {}
    for name in cls.__dict__.get("__annotations__", {}):  # noqa: RUF063 - inspect is what this avoids
        value = cls.__dict__.get(name, _MISSING)
        fields[name] = value if isinstance(value, Field) else Field(value, _MISSING, init=True)
        if isinstance(value, Field):
            if value.default is _MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, value.default)
    cls._light_fields = fields  # type: ignore[attr-defined]
    cls.__init__ = _init  # type: ignore[misc]
    cls.__eq__ = _eq  # type: ignore[assignment]
    cls.__hash__ = None  # type: ignore[assignment]
    if "__repr__" not in cls.__dict__:
        cls.__repr__ = _repr  # type: ignore[assignment]
    cls.__match_args__ = tuple(name for name, one in fields.items() if one.init)  # type: ignore[attr-defined,misc]
    for name in ("__dataclass_fields__", "__dataclass_params__", "__signature__"):
        setattr(cls, name, _MadeByTheStandardModule(name))
    return cls


def _init(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
    fields: dict[str, Field] = self._light_fields
    names = self.__match_args__
    if len(args) > len(names):
        message = f"{type(self).__name__}() takes {len(names)} arguments, not {len(args)}"
        raise TypeError(message)
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names or name in given:
            reason = "was given twice" if name in given else "is unknown"
            message = f"{type(self).__name__}(): argument {name!r} {reason}"
            raise TypeError(message)
        given[name] = value
    missing = [name for name in names if name not in given and fields[name].is_required]
    if missing:
        message = f"{type(self).__name__}() needs {', '.join(map(repr, missing))}"
        raise TypeError(message)
    for name, one in fields.items():
        if name in given:
            setattr(self, name, given[name])
        elif not one.is_required:
            setattr(self, name, one.make())
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _values(record: Any) -> list[Any]:  # noqa: ANN401
    return [getattr(record, name) for name in record._light_fields]  # noqa: SLF001 - ours


def _eq(self: object, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _repr(self: Any) -> str:  # noqa: ANN401
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._light_fields)
    return f"{type(self).__qualname__}({shown})"


def _standard(owner: type) -> type:
    """Return a real dataclass with the same fields."""
    import dataclasses  # noqa: PLC0415 - this is what must not be imported early

    light: dict[str, Field] = owner._light_fields  # type: ignore[attr-defined]  # noqa: SLF001 - ours
    body: dict[str, Any] = {"__annotations__": dict.fromkeys(light, "object"), "__module__": owner.__module__}
    for base in reversed(owner.__mro__):
        known = base.__dict__.get("__annotations__", {})  # noqa: RUF063 - Python 3.10 to 3.13
        body["__annotations__"].update({name: kind for name, kind in known.items() if name in light})
    for name, one in light.items():
        options: dict[str, Any] = {"init": one.init}
        if one.default is not _MISSING:
            options["default"] = one.default
        if one.default_factory is not _MISSING:
            options["default_factory"] = one.default_factory
        body[name] = dataclasses.field(**options)
    return dataclasses.dataclass(type(owner.__name__, (), body))

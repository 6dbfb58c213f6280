"""`dataclass`, `field`, `fields` and `replace` as the standard module has them, at a twentieth of the price.

The standard module imports `inspect`, `ast` and `dis`, and compiles half a dozen methods for every class: together half
of what a node of several took to import before its first worker. Here a class gets methods that all records share,
which read the names of its fields at run time. Only the constructor is compiled, when the first record is made.

`dataclasses.fields`, `replace`, `asdict`, `is_dataclass` and `inspect.signature` work on these records, because what
they look at is made when they ask, by the standard module itself. What nobody here needs is missing: of `dataclass`
there are `frozen` and `slots`, of `field` there are `default`, `default_factory` and `init`. Annotations must be
strings (`from __future__ import annotations`). Type checkers are shown the standard module.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import MISSING, dataclass, field, fields, replace
    from typing import Any

__all__ = ["MISSING", "dataclass", "field", "fields", "replace"]

#: What the standard module is asked for when somebody looks.
_STANDARD = ("__dataclass_fields__", "__dataclass_params__", "__signature__")


class _Missing:
    """No default."""

    def __repr__(self) -> str:
        return "MISSING"


_MISSING: Any = _Missing()


class _Field:
    """What is known of one attribute."""

    __slots__ = ("default", "default_factory", "init", "name", "type")

    def __init__(self, default: Any, default_factory: Any, *, init: bool) -> None:
        self.name = ""
        self.type = ""
        self.default = default
        self.default_factory = default_factory
        self.init = init

    @property
    def is_required(self) -> bool:
        """Whether the constructor must be given a value."""
        return self.init and self.default is _MISSING and self.default_factory is _MISSING


class _Shape:
    """What a class's shared methods need to know of it."""

    __slots__ = ("compared", "fields", "given", "is_frozen", "is_slotted", "names")

    def __init__(self, fields: tuple[_Field, ...], *, is_frozen: bool, is_slotted: bool) -> None:
        self.fields = fields
        self.names = tuple([one.name for one in fields])
        self.given = [one.name for one in fields if one.init]
        self.is_frozen = is_frozen
        self.is_slotted = is_slotted
        self.compared: Callable[[object], Any] = self._make_getter

    def _make_getter(self, record: object) -> Any:
        """Return the values of a record as a tuple; the first call leaves its place to the C function that does it."""
        from operator import attrgetter

        # One name alone would give no tuple.
        self.compared = attrgetter(*self.names, *self.names[:1]) if self.names else lambda _: ()
        return self.compared(record)


class _MadeByTheStandardModule:
    """A class attribute that the standard module makes when somebody looks at it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, _instance: object, owner: Any) -> Any:
        import dataclasses

        shape: _Shape = owner.__record_shape__
        body: dict[str, Any] = {"__annotations__": {one.name: one.type for one in shape.fields}}
        for one in shape.fields:
            options = {"default": one.default, "default_factory": one.default_factory}
            given = {name: value for name, value in options.items() if value is not _MISSING}
            body[one.name] = dataclasses.field(init=one.init, **given)
        twin = type(owner.__name__, (), {**body, "__module__": owner.__module__})
        twin = dataclasses.dataclass(twin, frozen=shape.is_frozen)
        if self._name == "__signature__":
            import inspect

            made: Any = inspect.signature(twin)
        else:
            made = getattr(twin, self._name)
        setattr(owner, self._name, made)
        return made


def _make_field(*, default: Any = _MISSING, default_factory: Any = _MISSING, init: bool = True) -> Any:
    return _Field(default, default_factory, init=init)


def _fields(record: Any) -> tuple[_Field, ...]:
    shape: _Shape = record.__record_shape__
    return shape.fields


def _replace(record: Any, /, **changes: Any) -> Any:
    # A coordinator of many nodes spends most of its time here.
    given = {name: getattr(record, name) for name in record.__record_shape__.given}
    given.update(changes)
    return type(record)(**given)


def _dataclass(cls: Any = None, /, *, frozen: bool = False, slots: bool = False) -> Any:
    if cls is not None:
        return _make_record(cls, is_frozen=frozen, is_slotted=slots)
    return lambda cls: _make_record(cls, is_frozen=frozen, is_slotted=slots)


# --- making a class --------------------------------------------------------------------------------------------------
def _make_record(cls: Any, *, is_frozen: bool, is_slotted: bool) -> Any:
    shape = _Shape(_take_fields(cls), is_frozen=is_frozen, is_slotted=is_slotted)
    methods: dict[str, Any] = {name: _MadeByTheStandardModule(name) for name in _STANDARD}
    methods["__record_shape__"] = shape
    methods["__match_args__"] = tuple(one.name for one in shape.fields if one.init)
    methods["__init__"] = _init
    methods["__replace__"] = _replace
    if "__repr__" not in cls.__dict__:
        methods["__repr__"] = _repr
    if "__eq__" not in cls.__dict__:
        methods["__eq__"] = _eq
        methods["__hash__"] = _hash if is_frozen else None
    if is_frozen:
        methods["__setattr__"] = methods["__delattr__"] = _refuse
    if is_slotted:
        methods["__getstate__"] = _values
        methods["__setstate__"] = _set_values
        return _remake(cls, shape, methods)
    for name, value in methods.items():
        setattr(cls, name, value)
    return cls


def _take_fields(cls: Any) -> tuple[_Field, ...]:
    """Return the fields of a class and of those that it is derived from; leave only plain defaults in the class."""
    found: dict[str, _Field] = {}
    for base in cls.__mro__[-1:0:-1]:
        if "__record_shape__" in base.__dict__:
            found.update((one.name, one) for one in _fields(base))
    has_default = any(one.init and not one.is_required for one in found.values())
    for name, kind in cls.__dict__.get("__annotations__", {}).items():  # noqa: RUF063 - inspect is what this avoids
        if kind.startswith("ClassVar"):
            continue
        value = cls.__dict__.get(name, _MISSING)
        one = value if isinstance(value, _Field) else _Field(value, _MISSING, init=True)
        one.name, one.type = name, kind
        if one.is_required and has_default:
            message = f"{cls.__name__}.{name} has no default, but a field before it has one"
            raise TypeError(message)
        has_default = has_default or (one.init and not one.is_required)
        found[name] = one
        if one.default is not _MISSING:
            setattr(cls, name, one.default)
        elif value is one:
            delattr(cls, name)
    return tuple(found.values())


def _remake(cls: Any, shape: _Shape, methods: dict[str, Any]) -> Any:
    """Return the class with slots: it can be given them only when it is made, so it is made again."""
    inherited = {name for base in cls.__mro__ for name in base.__dict__.get("__slots__", ())}
    body = {**cls.__dict__, **methods, "__slots__": tuple(name for name in shape.names if name not in inherited)}
    for name in ("__dict__", "__weakref__", *shape.names):
        body.pop(name, None)
    made = type(cls)(cls.__name__, cls.__bases__, body)
    made.__qualname__ = cls.__qualname__
    return made


# --- the constructor -------------------------------------------------------------------------------------------------
def _init(self: Any, /, *args: Any, **kwargs: Any) -> None:
    """Compile the constructor of the class: a parameter and an assignment for each field; it takes this one's place."""
    shape: _Shape = self.__record_shape__
    owner: Any = next(base for base in type(self).__mro__ if base.__dict__.get("__record_shape__") is shape)
    known: dict[str, Any] = {"__MISSING__": _MISSING, "__set__": _set}
    parameters, lines = ["self", "/"], []
    for one in shape.fields:
        parameter, value = _texts(one)
        parameters += [parameter] * one.init
        known[f"__default_{one.name}__"], known[f"__make_{one.name}__"] = one.default, one.default_factory
        if not shape.is_frozen:
            assignment = f"self.{one.name} = {value}"
        elif shape.is_slotted:
            # A slot's own setter asks nobody, and takes 0.6 of what `object.__setattr__` takes.
            known[f"__set_{one.name}__"] = getattr(owner, one.name).__set__
            assignment = f"__set_{one.name}__(self, {value})"
        else:
            assignment = f"__set__(self, {one.name!r}, {value})"
        lines += [assignment] * bool(value)
    if hasattr(owner, "__post_init__"):
        lines.append("self.__post_init__()")
    body = "\n    ".join(lines or ["pass"])
    exec(f"def __init__({', '.join(parameters)}):\n    {body}", known)  # noqa: S102 - all of it is from our own code
    owner.__init__ = known["__init__"]
    owner.__init__(self, *args, **kwargs)


def _texts(one: _Field) -> tuple[str, str]:
    """Return a field's parameter and its value in the compiled constructor; "" for a value that is set later."""
    name = one.name
    if one.default_factory is not _MISSING:
        made = f"__make_{name}__()"
        return f"{name}=__MISSING__", f"{made} if {name} is __MISSING__ else {name}" if one.init else made
    if one.init:
        return name if one.default is _MISSING else f"{name}=__default_{name}__", name
    return "", "" if one.default is _MISSING else f"__default_{name}__"


# --- what all records share ------------------------------------------------------------------------------------------
def _values(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self.__record_shape__.names]


def _set_values(self: Any, values: list[Any]) -> None:
    for name, value in zip(self.__record_shape__.names, values, strict=True):
        _set(self, name, value)


def _eq(self: Any, other: Any) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    shape: _Shape = self.__record_shape__
    return shape.compared(self) == shape.compared(other)


def _hash(self: Any) -> int:
    return hash(self.__record_shape__.compared(self))


def _repr(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__record_shape__.names)
    return f"{type(self).__qualname__}({shown})"


def _refuse(_self: object, name: str, *_value: object) -> None:
    from dataclasses import FrozenInstanceError

    message = f"field {name!r} of a frozen record can't be changed"
    raise FrozenInstanceError(message)


_set = object.__setattr__

if not TYPE_CHECKING:
    MISSING, dataclass, field, fields, replace = _MISSING, _dataclass, _make_field, _fields, _replace

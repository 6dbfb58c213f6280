"""`dataclass`, `field`, `fields` and `replace` as the standard module has them, at a twentieth of the price.

The standard module imports `inspect`, `ast` and `dis`, and compiles half a dozen methods for every class: together half
of what a node of several took to import before its first worker. Here a class gets methods that all records share,
which read the names of its fields at run time. Only a constructor that turns out to be busy is compiled, and then it is
faster than the standard one.

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

#: Constructions after which the constructor is compiled; that takes about as long as so many by the generic one.
_BUSY = 20
#: What the standard module is asked for when somebody looks.
_STANDARD = ("__dataclass_fields__", "__dataclass_params__", "__signature__")


class _Missing:
    """No default."""

    def __repr__(self) -> str:
        return "MISSING"


_MISSING: Any = _Missing()


class _Field:
    """What is known of one attribute."""

    __slots__ = ("default", "default_factory", "init", "is_required", "name", "type")

    def __init__(self, default: Any, default_factory: Any, *, init: bool) -> None:
        self.name = ""
        self.type = ""
        self.default = default
        self.default_factory = default_factory
        self.init = init
        #: Whether the constructor must be given a value.
        self.is_required = init and default is _MISSING and default_factory is _MISSING

    def make(self) -> Any:
        """Return the default, a fresh one where a factory was given, or `MISSING`."""
        return self.default if self.default_factory is _MISSING else self.default_factory()


class _Shape:
    """What a class's shared methods need to know of it."""

    __slots__ = ("compared", "constructions", "derived", "fields", "is_frozen", "is_slotted", "names", "required")

    def __init__(self, fields: tuple[_Field, ...], *, is_frozen: bool, is_slotted: bool) -> None:
        self.fields = fields
        self.names = tuple([one.name for one in fields])
        self.required = [one.name for one in fields if one.is_required]
        self.derived = [one.name for one in fields if not one.init]
        self.is_frozen = is_frozen
        self.is_slotted = is_slotted
        self.constructions = 0
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
        twin = _standard(owner)
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
    shape: _Shape = record.__record_shape__
    values = dict(zip(shape.names, shape.compared(record)))  # noqa: B905 - `compared` may give one more
    for name in shape.derived:
        del values[name]
    values.update(changes)
    return type(record)(**values)


def _dataclass(cls: Any = None, /, *, frozen: bool = False, slots: bool = False) -> Any:
    if cls is not None:
        return _make_record(cls, is_frozen=frozen, is_slotted=slots)
    return lambda cls: _make_record(cls, is_frozen=frozen, is_slotted=slots)


# --- making a class --------------------------------------------------------------------------------------------------
def _make_record(cls: Any, *, is_frozen: bool, is_slotted: bool) -> Any:
    shape = _Shape(_take_fields(cls), is_frozen=is_frozen, is_slotted=is_slotted)
    methods = _methods(cls, shape)
    if is_slotted:
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


def _methods(cls: Any, shape: _Shape) -> dict[str, Any]:
    """Return what a record's class gets beside what it has."""
    own = cls.__dict__
    methods: dict[str, Any] = {name: _MadeByTheStandardModule(name) for name in _STANDARD}
    methods["__record_shape__"] = shape
    methods["__match_args__"] = tuple(one.name for one in shape.fields if one.init)
    methods["__init__"] = _init
    methods["__replace__"] = _replace
    if "__repr__" not in own:
        methods["__repr__"] = _repr
    if "__eq__" not in own:
        methods["__eq__"] = _eq
        methods["__hash__"] = _hash if shape.is_frozen else None
    if shape.is_frozen:
        methods["__setattr__"] = methods["__delattr__"] = _refuse
    if shape.is_slotted:
        methods["__getstate__"] = _values
        methods["__setstate__"] = _set_values
    return methods


def _remake(cls: Any, shape: _Shape, methods: dict[str, Any]) -> Any:
    """Return the class with slots: it can be given them only when it is made, so it is made again."""
    inherited = {name for base in cls.__mro__ for name in base.__dict__.get("__slots__", ())}
    body = {**cls.__dict__, **methods, "__slots__": tuple(name for name in shape.names if name not in inherited)}
    for name in ("__dict__", "__weakref__", *shape.names):
        body.pop(name, None)
    made = type(cls)(cls.__name__, cls.__bases__, body)
    made.__qualname__ = cls.__qualname__
    return made


def _standard(owner: Any) -> type:
    """Return a record of the standard module with the same fields."""
    import dataclasses

    shape: _Shape = owner.__record_shape__
    body: dict[str, Any] = {"__annotations__": {one.name: one.type for one in shape.fields}}
    for one in shape.fields:
        options = {"default": one.default, "default_factory": one.default_factory}
        given = {name: value for name, value in options.items() if value is not _MISSING}
        body[one.name] = dataclasses.field(init=one.init, **given)
    twin = type(owner.__name__, (), {**body, "__module__": owner.__module__})
    return dataclasses.dataclass(twin, frozen=shape.is_frozen)


# --- the constructor -------------------------------------------------------------------------------------------------
def _init(self: Any, /, *args: Any, **kwargs: Any) -> None:
    shape: _Shape = self.__record_shape__
    shape.constructions += 1
    if shape.constructions == _BUSY:
        owner: Any = next(base for base in type(self).__mro__ if base.__dict__.get("__record_shape__") is shape)
        owner.__init__ = _compile_init(owner, shape)
    given = _bind(self, args, kwargs)
    for one in shape.fields:
        name = one.name
        value = given[name] if name in given else one.make()
        if value is not _MISSING:
            _set(self, name, value)
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _bind(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the values given, by name.

    Raises:
        TypeError: They are not what the constructor takes.
    """
    names, kind = self.__match_args__, type(self).__name__
    if len(args) > len(names):
        message = f"{kind}() takes {len(names)} arguments, not {len(args)}"
        raise TypeError(message)
    given = dict(zip(names, args))  # noqa: B905 - fewer are fine; `strict` costs a keyword in each call
    for name in kwargs:
        if name in given or name not in names:
            message = f"{kind}(): argument {name!r} {'was given twice' if name in given else 'is unknown'}"
            raise TypeError(message)
    given.update(kwargs)
    missing = [name for name in self.__record_shape__.required if name not in given]
    if missing:
        message = f"{kind}() needs {', '.join(map(repr, missing))}"
        raise TypeError(message)
    return given


def _compile_init(owner: Any, shape: _Shape) -> Callable[..., None]:
    """Return a constructor of one class: a parameter and an assignment for each field, nothing to look up."""
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
    init: Callable[..., None] = known["__init__"]
    return init


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

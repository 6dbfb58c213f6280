"""Our records beside those of the standard module."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_run.records import dataclass, field, replace


@dataclass
class Light:
    """A record of ours."""

    first: int
    second: str = "b"
    third: dict[str, int] = field(default_factory=dict)
    derived: int = field(init=False)
    kind: ClassVar[str] = "light"

    def __post_init__(self) -> None:
        self.derived = self.first + 1


@dataclasses.dataclass
class Standard:
    """The same record, standard."""

    first: int
    second: str = "b"
    third: dict[str, int] = dataclasses.field(default_factory=dict)
    derived: int = dataclasses.field(init=False)
    kind: ClassVar[str] = "standard"

    def __post_init__(self) -> None:
        self.derived = self.first + 1


@dataclass(frozen=True, slots=True)
class LightPoint:
    """A frozen, slotted record of ours."""

    x: int
    y: int = 2
    more: tuple[int, ...] = field(default_factory=tuple)


@dataclasses.dataclass(frozen=True, slots=True)
class StandardPoint:
    """The same record, standard."""

    x: int
    y: int = 2
    more: tuple[int, ...] = dataclasses.field(default_factory=tuple)


BOTH: list[Any] = [Light, Standard]
BOTH_POINTS: list[Any] = [LightPoint, StandardPoint]

#: Kinds of field that the property tests make records of: what is said in the class's body.
PLAIN, DEFAULT, FACTORY, DERIVED = "plain", "default", "factory", "derived"
KINDS = st.lists(st.sampled_from([PLAIN, DEFAULT, FACTORY, DERIVED]), max_size=6)
OPTIONS = st.fixed_dictionaries({"frozen": st.booleans(), "slots": st.booleans()})
VALUES = st.one_of(st.integers(-2, 2), st.text(max_size=2), st.none())


def make_class(kinds: list[str], options: dict[str, bool], *, is_ours: bool) -> Any:
    """Make a record whose fields are of these kinds, required ones first; ours or standard."""
    make, make_field = (dataclass, field) if is_ours else (dataclasses.dataclass, dataclasses.field)
    said: dict[str, dict[str, Any]] = {
        DEFAULT: {"default": 7},
        FACTORY: {"default_factory": list},
        DERIVED: {"init": False, "default": "derived"},
    }
    ordered = sorted(kinds, key=lambda kind: kind != PLAIN)
    annotations = {f"field_{number}": "object" for number in range(len(kinds))}
    body: dict[str, Any] = {"__annotations__": annotations, "__module__": __name__}
    for name, kind in zip(annotations, ordered, strict=True):
        if kind != PLAIN:
            body[name] = make_field(**said[kind])
    return make(**options)(type("Made", (), body))


def outcome(call: Any) -> Any:
    """Return what a call gives or that it can't be made."""
    try:
        return call()
    except (TypeError, AttributeError) as error:
        return type(error)


def describe(record: Any) -> Any:
    """Return all that can be seen of a record."""
    if isinstance(record, type):
        return record
    return repr(record), [getattr(record, one.name) for one in dataclasses.fields(record)]


# --- side by side ----------------------------------------------------------------------------------------------------
@given(kinds=KINDS, options=OPTIONS, values=st.lists(VALUES, max_size=6), split=st.integers(0, 6))
def test_any_record_is_constructed_and_shown_as_the_standard_one(
    kinds: list[str],
    options: dict[str, bool],
    values: list[object],
    split: int,
) -> None:
    """Whatever its fields and the arguments are, a record is what the standard one is."""
    ours, standard = (make_class(kinds, options, is_ours=is_ours) for is_ours in (True, False))
    names = [f"field_{number}" for number in range(len(values))]
    args, kwargs = values[:split], dict(zip(names[split:], values[split:], strict=True))
    made, expected = (outcome(lambda kind=kind: kind(*args, **kwargs)) for kind in (ours, standard))
    assert describe(made) == describe(expected)
    assert ours.__match_args__ == standard.__match_args__
    assert hasattr(made, "__dict__") == hasattr(expected, "__dict__")


@given(
    kinds=KINDS,
    options=OPTIONS,
    one=st.lists(VALUES, min_size=6, max_size=6),
    other=st.lists(VALUES, min_size=6, max_size=6),
)
def test_any_two_records_compare_as_the_standard_ones(
    kinds: list[str], options: dict[str, bool], one: list[object], other: list[object]
) -> None:
    """Equality, hashing and `replace` give what they give for the standard record."""
    seen = []
    for is_ours in (True, False):
        kind = make_class(kinds, options, is_ours=is_ours)
        count = len(kind.__match_args__)
        first, same, second = kind(*one[:count]), kind(*one[:count]), kind(*other[:count])
        changed = (replace if is_ours else dataclasses.replace)(
            first, **dict(zip(kind.__match_args__[:1], other, strict=False))
        )
        hashes = [outcome(lambda record=record: hash(record)) for record in (first, same, second)]
        equal = [first == same, first != same, first == second, first == object()]
        seen.append((equal, [hashes[0] == hashes[1], hashes[0] is TypeError], describe(changed)))
    assert seen[0] == seen[1]


# --- one by one ------------------------------------------------------------------------------------------------------
def test_the_standard_tools_see_no_difference() -> None:
    """The standard tools answer as for the standard record."""
    assert dataclasses.is_dataclass(Light)
    assert dataclasses.is_dataclass(Light(1))
    light, standard = (
        [(one.name, one.type, one.default, one.default_factory, one.init) for one in dataclasses.fields(record)]
        for record in BOTH
    )
    assert light == standard
    assert str(inspect.signature(Light)) == str(inspect.signature(Standard))
    assert dataclasses.asdict(Light(1, "x")) == dataclasses.asdict(Standard(1, "x"))
    assert dataclasses.replace(Light(1, "x"), first=5) == Light(5, "x")
    assert repr(Light(1)) == repr(Standard(1)).replace("Standard", "Light")
    assert str(inspect.signature(LightPoint)) == str(inspect.signature(StandardPoint))


@pytest.mark.parametrize("point", BOTH_POINTS)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling(point: type[LightPoint], protocol: int) -> None:
    """Records go through pickle and copy, frozen or not."""
    for record in (point(1, more=(3,)), Light(1, third={"a": 1})):
        assert pickle.loads(pickle.dumps(record, protocol)) == record  # noqa: S301 - our own
        assert copy.copy(record) == copy.deepcopy(record) == record


def test_replace() -> None:
    """`replace` changes what is named and nothing else, and refuses what is no field."""
    assert replace(LightPoint(1, 3), y=4) == LightPoint(1, 4)
    assert LightPoint(1).__replace__(x=5) == LightPoint(5)  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        replace(LightPoint(1), z=1)  # type: ignore[call-arg]


# --- derived classes -------------------------------------------------------------------------------------------------
def test_a_standard_subclass_inherits_the_fields() -> None:
    """Somebody's dataclass may derive from one of ours."""

    @dataclasses.dataclass
    class Derived(Light):
        fourth: int = 4

    assert [one.name for one in dataclasses.fields(Derived)] == ["first", "second", "third", "derived", "fourth"]
    assert Derived(1, fourth=5).fourth == 5


def test_a_record_derived_from_a_record_has_the_fields_of_both() -> None:
    """A derived record takes the fields of its base first, and each class's constructor is compiled for itself."""

    @dataclass(frozen=True, slots=True)
    class Space(LightPoint):
        z: int = 3

    for _ in range(2):  # the first one compiles
        assert repr(Space(1, z=4)).endswith("Space(x=1, y=2, more=(), z=4)")
        assert Space(1) != LightPoint(1)
    assert vars(Space)["__slots__"] == ("z",)


def test_a_required_field_after_an_optional_one_is_refused() -> None:
    """What the constructor could never take is refused when the class is made."""
    with pytest.raises(TypeError, match="second has no default"):

        @dataclass
        class _Wrong:
            first: int = 1
            second: int  # type: ignore[misc]

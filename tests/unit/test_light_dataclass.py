"""The cheap dataclass beside the standard one."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dataclasses import dataclass, field
else:
    from elastic_run.utils.light_dataclass import dataclass, field


@dataclass
class Light:
    """A record of ours."""

    first: int
    second: str = "b"
    third: dict[str, int] = field(default_factory=dict)
    derived: int = field(init=False)

    def __post_init__(self) -> None:
        self.derived = self.first + 1


@dataclasses.dataclass
class Standard:
    """The same record, standard."""

    first: int
    second: str = "b"
    third: dict[str, int] = dataclasses.field(default_factory=dict)
    derived: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.derived = self.first + 1


BOTH: list[Any] = [Light, Standard]


@pytest.mark.parametrize("record", BOTH)
def test_construction(record: type[Light]) -> None:
    """Positions, keywords, defaults, factories and __post_init__ work, and factories are not shared."""
    assert record(1).derived == 2
    assert (record(1, "x").second, record(1, third={"a": 1}).third) == ("x", {"a": 1})
    assert record(1).third is not record(1).third


@pytest.mark.parametrize("record", BOTH)
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, "b", {}, 4), {}), ((1,), {"first": 2}), ((1,), {"no": 2}), ((1,), {"derived": 2})],
)
def test_wrong_arguments(record: type[Light], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What the constructor can't take is a TypeError."""
    with pytest.raises(TypeError):
        record(*args, **kwargs)


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


def test_values() -> None:
    """Records compare by value, are unhashable, copy and pickle."""
    assert Light(1) == Light(1)
    assert Light(1) != Light(2)
    assert Light(1) != object()
    with pytest.raises(TypeError):
        hash(Light(1))
    assert copy.deepcopy(Light(1, third={"a": 1})) == Light(1, third={"a": 1})
    match Light(1, "x"):
        case Light(first, second):
            assert (first, second) == (1, "x")


def test_a_standard_subclass_inherits_the_fields() -> None:
    """Somebody's dataclass may derive from one of ours."""

    @dataclasses.dataclass
    class Derived(Light):
        fourth: int = 4

    assert [one.name for one in dataclasses.fields(Derived)] == ["first", "second", "third", "derived", "fourth"]
    assert Derived(1, fourth=5).fourth == 5


def test_pickling() -> None:
    """A record goes through pickle."""
    assert pickle.loads(pickle.dumps(LaunchLike(1))) == LaunchLike(1)  # noqa: S301 - our own


@dataclass
class LaunchLike:
    """A record at module level."""

    first: int

"""Options in groups are flat keywords, fields and attributes of what has the groups."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass

import pytest

from securecluster.core.option_groups import Grouped, group, grouped


@dataclass(kw_only=True)
class Privacy:
    noise: float = 0.0
    unit: str = "client"

    @property
    def noisy(self) -> bool:
        return self.noise > 0


@dataclass(kw_only=True)
class Doubled(Privacy):
    @property
    def noisy(self) -> bool:
        return False


@grouped
class Method(Grouped):
    rounds: int = 40
    privacy: Privacy = group(Privacy)
    tail: str = "end"


@grouped
class Example(Method):
    """Has another default of an option of a group."""

    unit: str = "example"
    own: int = 1


@grouped
class Replaced(Method):
    privacy: Privacy = group(Doubled)


def test_options_of_groups_are_fields_in_the_place_of_their_group() -> None:
    names = [field.name for field in dataclasses.fields(Example)]
    assert names == ["rounds", "noise", "unit", "tail", "own"]
    assert not hasattr(Method, "noise") and "privacy" not in names


def test_flat_keywords_and_flat_attributes_are_those_of_the_group() -> None:
    made = Method(noise=2.0)
    assert made.privacy == Privacy(noise=2.0) and made.privacy.noisy
    assert (made.noise, made.unit) == (2.0, "client")
    made.noise = 0.0
    assert not made.privacy.noisy
    assert Method(noise=0.0) == made and Method(noise=1.0) != made


def test_a_class_has_defaults_of_its_own_and_groups_of_its_own() -> None:
    assert Example().privacy.unit == "example" and Method().privacy.unit == "client"
    assert (
        isinstance(Replaced(noise=1.0).privacy, Doubled) and not Replaced(noise=1.0).privacy.noisy
    )


def test_a_copy_changes_without_its_original() -> None:
    made = Method(noise=1.0)
    for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        other.noise = 5.0
        assert (made.noise, other.noise) == (1.0, 5.0)
    assert dataclasses.replace(made, noise=3.0).privacy.noise == 3.0


def test_an_unknown_name_is_an_attribute_error_of_the_object() -> None:
    made = Method()
    with pytest.raises(
        AttributeError, match="'Method' object has no attribute 'noises'"
    ) as missing:
        _ = made.noises  # type: ignore[attr-defined]
    assert missing.value.obj is made and missing.value.name == "noises"
    with pytest.raises(TypeError, match="noises"):
        Method(noises=1.0)  # type: ignore[call-arg]


def test_an_option_of_two_groups_is_refused_and_an_undeclared_group_is_known() -> None:
    class Twice(Method):
        other: Privacy = group(Doubled)

    with pytest.raises(TypeError, match="noise is an option of privacy and of other"):
        grouped(Twice)


def test_the_repr_has_what_differs_from_the_defaults() -> None:
    assert repr(Method()) == "Method()"
    assert repr(Example(noise=2.0, own=1)) == "Example(noise=2.0)"
    assert repr(Method(tail=[1] * 100)) == "Method(tail=<list>)"

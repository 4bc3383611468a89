"""Documentation of dataclasses from the texts below their fields."""

from __future__ import annotations

import pydoc
import re
from dataclasses import dataclass, field, fields

import pytest

import securecluster
from securecluster.core.field_docs import field_descriptions, with_parameters
from securecluster.protocols.registry import PROTOCOLS, protocol_class


@dataclass
class Base:
    """A base."""

    rounds: int = 40
    """communication
    rounds
    """
    bare: bool = False
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    """two sizes"""


@dataclass
class Child(Base):
    """A child.

    With a second paragraph.
    """

    rounds: int = 10
    """rounds of the child"""
    needed: str = field(kw_only=True)
    """has no default"""


def test_descriptions_are_on_one_line_and_a_subclass_has_its_own() -> None:
    assert field_descriptions(Base) == {"rounds": "communication rounds", "sizes": "two sizes"}
    assert field_descriptions(Child)["rounds"] == "rounds of the child"
    assert field_descriptions(Child)["sizes"] == "two sizes"


def test_the_documentation_lists_every_parameter_with_type_default_and_description() -> None:
    assert with_parameters(Child, "A child.\n\n    With more.").splitlines() == [
        "A child.", "", "With more.", "", "Args:", "    rounds (int, default 10):",
        "        rounds of the child", "    bare (bool, default False):",
        "    sizes (list[int], default [1, 2]):", "        two sizes", "    needed (str):",
        "        has no default",
    ]  # fmt: skip


@pytest.mark.parametrize("name", PROTOCOLS)
def test_help_of_a_protocol_shows_every_hyper_parameter(name: str) -> None:
    declared = protocol_class(name)
    page = pydoc.plain(pydoc.render_doc(declared))
    shown = " ".join(re.sub(r"^ \|", "", page, flags=re.MULTILINE).split())
    descriptions = field_descriptions(declared)
    for parameter in fields(declared):
        assert f"{parameter.name} (" in shown, parameter.name
        assert descriptions[parameter.name] in shown, parameter.name
    with pytest.raises(TypeError, match="positional"):
        declared(40)


def test_protocols_are_imported_from_the_package() -> None:
    for name in PROTOCOLS:
        declared = protocol_class(name)
        assert getattr(securecluster, declared.__name__) is declared
    assert set(securecluster.__all__) <= set(dir(securecluster))

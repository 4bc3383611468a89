"""Descriptions of the fields of dataclasses, as they are written below each field."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from securecluster.core.option_groups import groups_of

INDENT = "        "
WIDTH = 88  # columns of a class's documentation


@cache
def field_descriptions(declaring: type) -> dict[str, str]:
    """Return the description of each field of a dataclass, those of bases and groups included.

    Args:
        declaring: a dataclass; one without source has no descriptions.

    Returns:
        By field, the text below it on one line; fields without a text are left out.
    """
    descriptions: dict[str, str] = {}
    for options in groups_of(declaring).values():
        descriptions |= field_descriptions(options)
    # A subclass comes after its bases, so its own text counts.
    for base in reversed(declaring.__mro__):
        if is_dataclass(base):
            descriptions |= _own_descriptions(base)
    return descriptions


def has_source(declaring: type) -> bool:
    """Return whether the descriptions of a class's own fields can be read.

    Args:
        declaring: a class; one made in a function, or at a prompt, has no source to read.
    """
    return declaring.__qualname__ in _definitions(declaring.__module__)


def _own_descriptions(declaring: type) -> dict[str, str]:
    """Return the descriptions of the fields that a class itself declares.

    A word in braces stands for a text that only the class knows, in its `words_`: such as the
    choices of a registry.
    """
    words: Mapping[str, str] = getattr(declaring, "words_", {})
    definition = _definitions(declaring.__module__).get(declaring.__qualname__)
    if definition is None:  # a class made in a function, or at a prompt
        return {}
    descriptions = {}
    for statement, below in pairwise(definition.body):
        if not isinstance(statement, ast.AnnAssign):
            continue
        if not isinstance(statement.target, ast.Name) or not isinstance(below, ast.Expr):
            continue
        text = str(ast.literal_eval(below.value))
        for word, meaning in words.items():
            text = text.replace("{" + word + "}", meaning)
        descriptions[statement.target.id] = " ".join(text.split())
    return descriptions


@cache
def _definitions(module: str) -> dict[str, ast.ClassDef]:
    """Return the class definitions at the top of a module, by name.

    Python drops strings below fields, so they can only be read from the source. It is parsed once
    for all classes of a module: `inspect.getsource` parses it for each.

    Args:
        module: its full name.
    """
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or not Path(path).is_file():
        return {}
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def with_parameters(documented: type, text: str) -> str:
    """Return a docstring with name, type, default and description of each field.

    Args:
        documented: a dataclass.
        text: its own docstring.
    """
    descriptions = field_descriptions(documented)
    lines = [inspect.cleandoc(text), "", "Args:"]
    for field in fields(documented):
        heading = f"    {field.name} ({_type_name(field.type)}"
        default = _default(field)
        if default is not MISSING:
            heading += f", default {default!r}"
        lines.append(f"{heading}):")
        description = descriptions.get(field.name, "")
        lines += textwrap.wrap(description, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join(lines)


def _default(field: Field[Any]) -> Any:
    """Return a field's default, or MISSING where it has none."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _type_name(annotation: Any) -> str:
    """Return a type as it is written in annotations."""
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    text = str(annotation)
    # ranges are for checks
    if text.startswith("Annotated["):
        text = ast.unparse(ast.parse(text, mode="eval").body.slice.elts[0])  # type: ignore[attr-defined]
    return text

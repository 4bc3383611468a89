"""One set of protocol options for several protocols."""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import cache, reduce
from itertools import pairwise
from typing import Annotated, Any, get_type_hints

from securecluster.app.options import PROTOCOLS, Output, Simulation, flat_class, protocol_class
from securecluster.errors import UsageError, unknown
from securecluster.runtime.settings import Settings


def check_chosen(names: Sequence[str]) -> None:
    """Raise UsageError for an unknown protocol, one that is named twice, or fewer than two."""
    for name in names:
        if name not in PROTOCOLS:
            raise unknown("protocol", name, PROTOCOLS)
    if len(names) < 2:
        raise UsageError(
            "compare takes two protocols or more, then the options: choose from "
            f"{', '.join(PROTOCOLS)}"
        )
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(
            f"{twice[0]} is named twice, and both runs would be the same: name it once"
        )


def check_owned(names: Sequence[str], arguments: Sequence[str]) -> None:
    """Raise UsageError for an option that only protocols have which are not among `names`."""
    known = set(_owners(names))
    for part in (Simulation, Settings, Output):
        known.update(each.name for each in fields(part))
    owners = _owners(list(PROTOCOLS))
    for argument in arguments:
        if not argument.startswith("--"):
            continue
        text = argument.split("=")[0]
        option = text.removeprefix("--").removeprefix("no-").replace("-", "_")
        if option not in known and option in owners:
            raise UsageError(
                f"{text} is an option of {', '.join(owners[option])} only: leave it out, or "
                "compare that protocol too"
            )


def comparison_class(names: Sequence[str]) -> type:
    """Return one flat dataclass of all options of `compare NAMES`."""
    options = [_field(name, owners, names) for name, owners in _owners(names).items()]
    union: Any = make_dataclass("Protocols", options)
    union.__doc__ = (
        "The protocols. A value goes to every protocol that has the option; None is each one's own "
        "default."
    )
    return flat_class("protocols", union)


def chosen(names: Sequence[str], given: Any, clusters: int | None = None) -> list[Any]:
    """Return the protocols, with each given value in every one that has such a field.

    Args:
        names: of the protocols.
        given: the options of `comparison_class`; None leaves each protocol's own default.
        clusters: true clusters, where the user says how many; protocols that are told a number k
            get this one, unless k is given.
    """
    owners = _owners(names)
    values = {name: value for name, value in vars(given).items() if value is not None}
    if clusters is not None and "k" in owners:
        values.setdefault("k", clusters)
    protocols = []
    for protocol in names:
        own = {name: value for name, value in values.items() if protocol in owners[name]}
        protocols.append(protocol_class(protocol)(**own))
    return protocols


def _owners(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the protocols that have a field, by the field's name."""
    owners: dict[str, list[str]] = {}
    for protocol in names:
        for each in fields(protocol_class(protocol)):
            owners.setdefault(each.name, []).append(protocol)
    return owners


def _field(name: str, owners: list[str], names: Sequence[str]) -> tuple[str, Any, Any]:
    """Return an option that stands for the same field of some protocols.

    None leaves each one's own default. A switch whose owners agree shows their default instead, so
    that it stays a switch.
    """
    import tyro

    texts: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    types = set()
    for owner in owners:
        protocol = protocol_class(owner)
        texts[owner] = _sentences(protocol).get(name, "")
        defaults[owner] = _default(protocol, name)
        types.add(_type(protocol, name))
    sentence = _by_owner(texts, len(owners) == len(names))
    first = defaults[owners[0]]
    if types == {bool} and all(default == first for default in defaults.values()):
        return name, Annotated[bool, tyro.conf.arg(help=sentence)], field(default=first)
    shown = _by_owner({owner: str(default) for owner, default in defaults.items()}, True)
    if name == "k":
        shown = f"--clusters where it is given, else {shown}"
    hint = tyro.conf.arg(help=sentence, help_behavior_hint=f"(default: {shown})")
    union = reduce(operator.or_, types)
    return name, Annotated[union | None, hint], field(default=None)


def _by_owner(texts: dict[str, str], everyone: bool) -> str:
    """Return each text with the protocols it belongs to; one text of everyone needs no names."""
    owners: dict[str, list[str]] = {}
    for protocol, text in texts.items():
        owners.setdefault(text, []).append(protocol)
    if len(owners) == 1 and everyone:
        (only,) = owners
        return only
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in owners.items())


def _default(protocol: type, name: str) -> Any:
    """Return a field's default."""
    (option,) = (each for each in fields(protocol) if each.name == name)
    if option.default_factory is MISSING:
        return option.default
    return option.default_factory()


def _type(protocol: type, name: str) -> Any:
    """Return a field's type.

    A field of any type (a network, in Python) is on the command line what its default is.
    """
    hint = get_type_hints(protocol)[name]
    return type(_default(protocol, name)) if hint is Any else hint


@cache
def _sentences(protocol: type) -> dict[str, str]:
    """Return the text below each field in a protocol's source."""
    sentences: dict[str, str] = {}
    # a subclass comes after its bases, so its own text counts
    for base in reversed(protocol.__mro__):
        if is_dataclass(base):
            sentences |= _own_sentences(base)
    return sentences


def _own_sentences(kind: type) -> dict[str, str]:
    """Return the text below each field that a class itself declares."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    sentences = {}
    for above, below in pairwise(body.body):
        if not isinstance(above, ast.AnnAssign) or not isinstance(above.target, ast.Name):
            continue
        if isinstance(below, ast.Expr):
            sentences[above.target.id] = str(ast.literal_eval(below.value))
    return sentences

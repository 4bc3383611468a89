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
    known = {f.name for part in (Simulation, Settings, Output) for f in fields(part)} | set(
        _owners(names)
    )
    everyone = _owners(list(PROTOCOLS))
    for argument in arguments:
        text = argument.split("=")[0]
        option = text.removeprefix("--").removeprefix("no-").replace("-", "_")
        if text.startswith("--") and option not in known and option in everyone:
            raise UsageError(
                f"{text} is an option of {', '.join(everyone[option])} only: leave it out, or "
                "compare that protocol too"
            )


def comparison_class(names: Sequence[str]) -> type:
    """One flat dataclass of all options of `compare NAMES`."""
    union: Any = make_dataclass(
        "Protocols", [_field(name, owners, names) for name, owners in _owners(names).items()]
    )
    union.__doc__ = (
        "The protocols. A value goes to every protocol that has the option; None is each one's own "
        "default."
    )
    return flat_class("protocols", union)


def chosen(names: Sequence[str], given: Any, clusters: int | None = None) -> list[Any]:
    """The protocols, with each given value in every one that has such a field.

    Args:
        clusters: true clusters, where the user says how many; protocols that are told a number k
            get this one, unless k is given.
    """
    owners = _owners(names)
    values = {name: value for name, value in vars(given).items() if value is not None}
    if clusters is not None and "k" in owners:
        values.setdefault("k", clusters)
    return [
        protocol_class(p)(**{name: value for name, value in values.items() if p in owners[name]})
        for p in names
    ]


def _owners(names: Sequence[str]) -> dict[str, list[str]]:
    """Which protocols have a field, by the field's name."""
    owners: dict[str, list[str]] = {}
    for protocol in names:
        for each in fields(protocol_class(protocol)):
            owners.setdefault(each.name, []).append(protocol)
    return owners


def _field(name: str, owners: list[str], names: Sequence[str]) -> tuple[str, Any, Any]:
    """An option that stands for the same field of some protocols; None leaves each one's own
    default.

    A switch whose owners agree shows their default instead, so that it stays a switch.
    """
    import tyro

    defaults = {p: _default(protocol_class(p), name) for p in owners}
    first = defaults[owners[0]]
    texts = {p: _sentences(protocol_class(p)).get(name, "") for p in owners}
    sentence = _told(texts, len(owners) == len(names))
    kinds = {_kind(protocol_class(p), name) for p in owners}
    if kinds == {bool} and all(value == first for value in defaults.values()):
        return name, Annotated[bool, tyro.conf.arg(help=sentence)], field(default=first)
    shown = _told({p: str(v) for p, v in defaults.items()}, True)
    if name == "k":
        shown = f"--clusters where it is given, else {shown}"
    hint = tyro.conf.arg(help=sentence, help_behavior_hint=f"(default: {shown})")
    return name, Annotated[reduce(operator.or_, kinds) | None, hint], field(default=None)


def _told(texts: dict[str, str], everyone: bool) -> str:
    """Each text with the protocols it belongs to; one text of everyone needs no names."""
    owners: dict[str, list[str]] = {}
    for protocol, text in texts.items():
        owners.setdefault(text, []).append(protocol)
    return (
        next(iter(owners))
        if len(owners) == 1 and everyone
        else "; ".join(f"{', '.join(who)}: {text}" for text, who in owners.items())
    )


def _default(protocol: type, name: str) -> Any:
    (found,) = (f for f in fields(protocol) if f.name == name)
    return found.default if found.default_factory is MISSING else found.default_factory()


def _kind(protocol: type, name: str) -> Any:
    """A field's type; one of any type (a network, in Python) is on the command line what its
    default is.
    """
    kind = get_type_hints(protocol)[name]
    return type(_default(protocol, name)) if kind is Any else kind


@cache
def _sentences(protocol: type) -> dict[str, str]:
    """The text below each field in a protocol's source."""
    found: dict[str, str] = {}
    for base in reversed([b for b in protocol.__mro__ if is_dataclass(b)]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for above, below in pairwise(body.body):
            if (
                isinstance(above, ast.AnnAssign)
                and isinstance(above.target, ast.Name)
                and isinstance(below, ast.Expr)
            ):
                found[above.target.id] = str(ast.literal_eval(below.value))
    return found

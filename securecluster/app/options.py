"""The command line's options, as the dataclasses they are built from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from securecluster.app.registry import PROTOCOLS, protocol_class
from securecluster.data.simulation import Simulation, option_name
from securecluster.runtime.settings import Settings

# a word with an underscore, outside of quotes, paths, options and keyword arguments
FIELD_NAME = r"(?<![\w'\"./=-])[a-z]+\d*(?:_[a-z\d]+)+(?![\w'\"/(=]|\.\w)"


@dataclass(frozen=True)
class Output:
    """Files and printed output."""

    out: Path | None = None
    """run folder; None is a new one under runs/"""
    force: bool = False
    """replace a run folder that exists"""
    quiet: bool = False
    """print nothing but errors"""


def _automatic() -> Settings:
    """Return the settings that the command line begins with."""
    return Settings(transcript="auto")


def as_typed(text: str) -> str:
    """Return a sentence in which options have their names on the command line.

    Sentences of the Python API name fields (pre_rounds), and users of the command line know options
    (--pre-rounds). Words in quotes, in paths and before "=" without a space are left as they are.

    Args:
        text: the sentence of an error or a warning.
    """
    return re.sub(FIELD_NAME, _typed_option, text)


def _typed_option(match: re.Match[str]) -> str:
    name = match.group()
    # other words with underscores are names of data sets and columns
    if name not in _option_names():
        return name
    return option_name(name)


@cache
def _option_names() -> frozenset[str]:
    """Return the fields of all options."""
    names: set[str] = set()
    classes: list[Any] = [Simulation, Settings, Output]
    classes += [protocol_class(name) for name in PROTOCOLS]
    for options in classes:
        names.update(option.name for option in fields(options))
    return frozenset(names)


def options_class(protocol: type) -> type:
    """Return one flat dataclass of all options of `run PROTOCOL`.

    Args:
        protocol: its class.
    """
    return flat_class("protocol", protocol)


def flat_class(name: str, command_options: type) -> type:
    """Return one flat dataclass of a command's own options and of those that every run takes.

    Args:
        name: of the field with the command's own options.
        command_options: class of these options, a dataclass.
    """
    import tyro

    # without prefixes: --rounds, and not --protocol.rounds
    flat: Any = tyro.conf.OmitArgPrefixes
    options = [
        (name, flat[command_options], field(default_factory=command_options)),
        ("simulation", flat[Simulation], field(default_factory=Simulation)),
        ("settings", flat[Settings], field(default_factory=_automatic)),
        ("output", flat[Output], field(default_factory=Output)),
    ]
    return make_dataclass("Options", options)

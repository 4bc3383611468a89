"""The options of runs on the command line, and their names in sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from securecluster.commands.command_line import SHOWN, Section, asks_for_help
from securecluster.core.validation import python_only_fields
from securecluster.data.simulation import Simulation, option_name
from securecluster.errors import SecureClusterError, UsageError
from securecluster.protocols.registry import PROTOCOLS, protocol_class
from securecluster.runtime.settings import Settings

# described by --help; all others by --help-all
USUAL = frozenset(
    {
        "rounds", "model", "lr", "epochs", "k", "mask", "clip", "noise", "dp_unit",
        "target_epsilon", "aggregation", "data", "client_column", "label_column", "scenario",
        "clients", "clusters", "samples", "seed", "out", "quiet",
    }
)  # fmt: skip
NOT_BEFORE = r"(?<![\w'\"./=-])"
NO_VALUES = "out|too|of|and|or|for|is|are|in|on|to|by|at|as|a|the|from|that|where|alone"
# names of options in sentences
MENTION = re.compile(
    # of several words, outside of quotes, paths, options and keyword arguments
    rf"{NOT_BEFORE}[a-z]+\d*(?:_[a-z\d]+)+(?![\w'\"/(=]|\.\w)"
    # of one word before its value; alone such a word is one of the language
    rf"|{NOT_BEFORE}[a-z]+\d?(?= = )"
    r"|(?<=\bleave )[a-z]+(?= (?:out|on)\b)"
    r"|(?<=\bunknown )[a-z]+(?= ')"
    r"|(?:(?<=\btake )|(?<=\bwith )|(?<=\buse )|(?<=\bor ))"
    rf"(?P<before_value>[a-z]+)(?= (?!(?:{NO_VALUES})\b)[a-z\d])"
)


@dataclass(frozen=True)
class Output:
    """Files and printed output."""

    out: Path | None = None
    """run folder; None is a new one under runs/"""
    force: bool = False
    """replace a run folder that exists"""
    quiet: bool = False
    """print nothing but errors and, with noise, ε of a run"""


@dataclass(frozen=True)
class RunOutput(Output):
    """Files and printed output of one run."""

    pictures: bool = False
    """draw the pictures of a run when it ends; `report` draws those that are missing"""


def as_typed(text: str) -> str:
    """Return a sentence in which options have their names on the command line.

    Sentences of the Python API name fields (pre_rounds), and users of the command line know options
    (--pre-rounds). Words in quotes, in paths and before "=" without a space are left as they are;
    a name that is also a word of the language (noise) is an option where a value follows it.

    Args:
        text: the sentence of an error or a warning.
    """
    return MENTION.sub(_typed_option, text)


def _typed_option(match: re.Match[str]) -> str:
    name = match.group()
    kinds = _option_types()
    # other words are of the language, or names of data sets and columns
    if name not in kinds:
        return name
    # "with noise everything" and "with seed 0" are no options, "take noise 0" and "take placement
    # local" are
    if match["before_value"] and "str" not in kinds[name]:
        value = match.string[match.end() + 1 :]
        taken = match.string[: match.start()].endswith("take ")
        if not (taken and value[0].isdigit()):
            return name
    return option_name(name)


@cache
def _option_types() -> dict[str, str]:
    """Return the types of the fields of all options, as they are written, by name."""
    types: dict[str, str] = {}
    classes: list[Any] = [Simulation, Settings, RunOutput]
    for name in PROTOCOLS:
        # the sentence may be about a class that cannot be imported
        with suppress(SecureClusterError):
            classes.append(protocol_class(name))
    for options in classes:
        hidden = python_only_fields(options)
        types.update({o.name: str(o.type) for o in fields(options) if o.name not in hidden})
    return types


def about(protocol: Any) -> str:
    """Return what a protocol does, in the first sentence of its documentation."""
    if not hasattr(protocol, "name"):  # the base class of all protocols
        return "Run a protocol on simulated clients, or on your own table, and leave a run folder."
    first, *_ = (protocol.__doc__ or "").splitlines() or [""]
    return first


def of_protocol(protocol: Any) -> dict[str, Section]:
    """Return the options of `run PROTOCOL`, in sections.

    Args:
        protocol: its class.
    """
    sections = with_common({"protocol": section_of(protocol)})
    return {**sections, "output": Section("files and output", RunOutput, USUAL)}


def section_of(protocol: Any) -> Section:
    """Return the options of a protocol, of which its first own ones are among the usual ones.

    Args:
        protocol: its class.
    """
    from securecluster.protocols.common.base import ClusteringProtocol

    shared = {option.name for option in fields(ClusteringProtocol)} | protocol._group_of.keys()
    hidden = shared | USUAL | python_only_fields(protocol).keys()
    protocol_options = [option.name for option in fields(protocol) if option.name not in hidden]
    usual = USUAL.union(protocol_options[: SHOWN - len(USUAL)])
    return Section("method and privacy", protocol, usual)


def protocol_first(argv: list[str], command: str) -> tuple[str | None, list[str]]:
    """Return the protocol that a command was given, and the arguments after it.

    Args:
        argv: the command's arguments.
        command: its name.

    Returns:
        None and all arguments of a call for help without a protocol.

    Raises:
        UsageError: no protocol comes first.
    """
    if asks_for_help(argv[:1]):
        return None, argv
    if not argv or argv[0].startswith("-"):
        raise UsageError(
            f"{command} takes a protocol first: securecluster {command} cfl; `securecluster list` "
            "shows all"
        )
    return argv[0], argv[1:]


def with_common(sections: Mapping[str, Section]) -> dict[str, Section]:
    """Return a command's own options, followed by those that every run takes.

    Args:
        sections: by name.
    """
    return {
        **sections,
        "simulation": Section("clients and their data", Simulation, USUAL),
        "settings": Section("the run", Settings, USUAL, {"transcript": "auto"}),
        "output": Section("files and output", Output, USUAL),
    }

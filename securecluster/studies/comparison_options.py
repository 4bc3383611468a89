"""One set of protocol options for several protocols.

They are the union of the protocols' fields, where None stands for each protocol's own default.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, field, fields, make_dataclass
from functools import reduce
from typing import Annotated, Any, get_type_hints

from securecluster.commands.command_line import Section, asks_for_help
from securecluster.commands.options import USUAL, Output, with_common
from securecluster.core.field_docs import field_descriptions
from securecluster.core.validation import PythonOnly, python_only_fields
from securecluster.data.simulation import Simulation
from securecluster.errors import UsageError
from securecluster.protocols.registry import PROTOCOLS, named, protocol_class
from securecluster.runtime.settings import Settings

OptionField = tuple[str, Any, Any]  # name, type and default, as make_dataclass takes them


def protocols_first(argv: Sequence[str], command: str, example: str) -> tuple[list[str], list[str]]:
    """Return the protocols that a command was given, and the arguments after them.

    Args:
        argv: the command's arguments.
        command: its name.
        example: of its arguments.

    Returns:
        No protocols and all arguments of a call for help without protocols.

    Raises:
        UsageError: no protocol comes first, or a class that is none.
    """
    if asks_for_help(argv[:1]):
        return [], list(argv)
    labels = []
    for argument in argv:
        if argument.startswith("-"):
            break
        labels.append(with_own_name(argument))
    if not labels:
        raise UsageError(f"{command} takes the protocols first: securecluster {command} {example}")
    return labels, list(argv[len(labels) :])


def with_own_name(label: str) -> str:
    """Return the label of a variant, in which a class has its name in place of its path.

    Args:
        label: `cfl`, `cfl:sketch=64`, `my_module:MyClass` or `my_module:MyClass:sketch=64`.

    Raises:
        UsageError: the path of a class that is no protocol.
    """
    module, colon, rest = label.partition(":")
    class_name, second_colon, options = rest.partition(":")
    if not colon or "=" in class_name or module in PROTOCOLS:
        return label
    return named(f"{module}:{class_name}") + second_colon + options


def with_own_names(items: Sequence[Any]) -> list[Any]:
    """Return labels of variants as `with_own_name` does, and objects as they are.

    Args:
        items: labels, or protocols with their hyper-parameters.
    """
    return [with_own_name(item) if isinstance(item, str) else item for item in items]


def check_owned(
    names: Sequence[str], arguments: Sequence[str], others: Collection[str] = ()
) -> None:
    """Check that each option belongs to a protocol that is compared, or to every run.

    Args:
        names: of the protocols that are compared.
        arguments: of the command line, after the protocols.
        others: names of the command's own options.

    Raises:
        UsageError: an option that only other protocols have. Unknown options are left to the
            parser.
    """
    valid = {*_owners(names), *others}
    for options in (Simulation, Settings, Output):
        valid.update(option.name for option in fields(options))
    owners = _owners(list(dict.fromkeys([*PROTOCOLS, *names])))
    for argument in arguments:
        if not argument.startswith("--"):
            continue
        text = argument.split("=")[0]
        name = text.removeprefix("--").removeprefix("no-").replace("-", "_")
        if name not in valid and name in owners:
            raise UsageError(
                f"{text} is an option of {', '.join(owners[name])} only: leave it out, or "
                "compare that protocol too"
            )


def option_names(names: Sequence[str]) -> set[str]:
    """Return the names of all options of some protocols.

    Args:
        names: of the protocols.
    """
    return set(_owners(names))


def sections(names: Sequence[str], without: Collection[str] = ()) -> dict[str, Section]:
    """Return all options of `compare NAMES`, in sections.

    Args:
        names: of the protocols that are compared.
        without: names of the protocols' options that the command sets itself.
    """
    options = []
    for name, owners in _owners(names).items():
        if name not in without:
            option, option_type, default = _field(name, owners, names)
            first = protocol_class(owners[0])
            if name in python_only_fields(first):
                mark = PythonOnly(f"{first.__name__}({name}=...)")
                option_type = Annotated[option_type, mark]
            options.append((option, option_type, default))
    union: Any = make_dataclass("Protocols", options)
    title = "methods and privacy; a value goes to every protocol that has the option"
    return with_common({"protocols": Section(title, union, USUAL)})


def given_params(
    names: Sequence[str], options: Any, clusters: int | None = None
) -> list[dict[str, Any]]:
    """Return for each protocol the given values of its own options.

    Args:
        names: of the protocols.
        options: with the options as attributes; None leaves each protocol's own default.
        clusters: number of true clusters, where the user says it; k where none is given.
    """
    owners = _owners(names)
    values = {}
    for name, value in vars(options).items():
        if value is not None:
            values[name] = value
    if clusters is not None and "k" in owners:
        values.setdefault("k", clusters)
    protocol_params = []
    for protocol in names:
        params = {}
        for name, value in values.items():
            if protocol in owners[name]:
                params[name] = value
        protocol_params.append(params)
    return protocol_params


def _owners(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the protocols that have an option, by the option's name.

    Args:
        names: of the protocols to look at.
    """
    owners: dict[str, list[str]] = {}
    for protocol in names:
        for option in fields(protocol_class(protocol)):
            owners.setdefault(option.name, []).append(protocol)
    return owners


def _field(name: str, owners: list[str], names: Sequence[str]) -> OptionField:
    """Return an option that stands for the same field of some protocols.

    None leaves each protocol's own default. A switch whose owners agree shows their default
    instead, so that it stays a switch.

    Args:
        name: of the field.
        owners: the protocols that have it, at least one.
        names: of all protocols that are compared.
    """
    texts: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    types = set()
    for owner in owners:
        protocol = protocol_class(owner)
        texts[owner] = field_descriptions(protocol).get(name, "")
        defaults[owner] = _default(protocol, name)
        types.add(_type(protocol, name))
    help_text = _by_owner(texts, len(owners) == len(names))
    first_default = defaults[owners[0]]
    same_default = all(default == first_default for default in defaults.values())
    if types == {bool} and same_default:
        return name, bool, field(default=first_default, metadata={"text": help_text})
    words = {"text": help_text, "default": _default_text(name, defaults)}
    # protocols may have fields of one name and several types
    union = reduce(operator.or_, types)
    return name, union | None, field(default=None, metadata=words)


def _default_text(name: str, defaults: dict[str, Any]) -> str:
    """Return each protocol's default in words.

    Args:
        name: of the option.
        defaults: by protocol.
    """
    texts = {}
    for owner, default in defaults.items():
        texts[owner] = "none" if default is None else str(default)
    text = _by_owner(texts, True)
    if text == "none":  # what it stands for is in the description
        text = ""
    if name == "k":
        return f"--clusters where it is given, else {text}".removesuffix(", else ")
    return text


def _by_owner(texts: dict[str, str], of_all: bool) -> str:
    """Return each text after the protocols that it belongs to.

    Args:
        texts: by protocol.
        of_all: True if these are all protocols; a text that they share then needs no names.
    """
    owners: dict[str, list[str]] = {}
    for protocol, text in texts.items():
        owners.setdefault(text, []).append(protocol)
    if len(owners) == 1 and of_all:
        (text,) = owners
        return text
    phrases = []
    for text, protocols in owners.items():
        names = ", ".join(protocols)
        phrases.append(f"{names}: {text}")
    return "; ".join(phrases)


def _default(protocol: type, name: str) -> Any:
    """Return the default of a protocol's field."""
    options: dict[str, Field[Any]] = {}
    for option in fields(protocol):
        options[option.name] = option
    option = options[name]
    if option.default_factory is MISSING:
        return option.default
    return option.default_factory()


def _type(protocol: type, name: str) -> Any:
    """Return the type of a protocol's field on the command line.

    Args:
        protocol: its class.
        name: of the field.
    """
    hint = get_type_hints(protocol)[name]
    # such as a network: any object in Python, and a name on the command line, like its default
    if hint is Any:
        return type(_default(protocol, name))
    return hint

"""Options of a command: parsed from the fields of dataclasses, and shown by --help.

The command line knows types in words, says in one sentence what it cannot parse, and shows by
--help what most runs need, each by its first whole phrase. --help-all shows everything.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin, get_type_hints

from securecluster.core.field_docs import field_descriptions
from securecluster.core.number_format import printable
from securecluster.core.stops import output
from securecluster.core.validation import Options, PythonOnly, python_only_fields
from securecluster.data.simulation import option_name
from securecluster.errors import UsageError, quoted, unknown

HELP = ("-h", "--help")
HELP_ALL = "--help-all"
OTHER_NAMES = {"--epsilon": "--target-epsilon"}  # also understood
# how values are called, and what they are, in the order in which a text is tried as one of them
WORDS: Mapping[Any, tuple[str, str]] = {
    int: ("INTEGER", "a whole number"),
    float: ("NUMBER", "a number"),
    Path: ("PATH", "a path"),
    str: ("NAME", "a name"),
}
INFINITE = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
OTHER_DASHES = re.compile(r"(-|–|—)(?!inf)[a-z]")  # of an option that is not written with two
WIDEST = 100  # columns of a help text
COLUMN = 26  # in which descriptions begin
LINES = 60  # of a help text; --help shortens a longer one
SHOWN = 25  # options at most that a shortened text describes


@dataclass(frozen=True)
class Section:
    """Options that belong together, which are the fields of a dataclass.

    Args:
        title: above them in help texts.
        kind: the dataclass.
        usual: the fields that a short help text describes; None is all.
        defaults: of the command, where they are not those of the dataclass.
        all_options: offer those that are set in Python only, too.
    """

    title: str
    kind: Any
    usual: Collection[str] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    all_options: bool = False

    @property
    def hidden(self) -> Mapping[str, PythonOnly]:
        """Return the marks of fields that are no options of the command, by name."""
        return {} if self.all_options else python_only_fields(self.kind)


@dataclass(frozen=True)
class _Option:
    """An option of the command line.

    Args:
        field: its name in Python.
        flag: as typed.
        kinds: types of its values, tried in this order; empty for a switch.
        optional: whether it takes None.
        several: whether it takes several values.
        needed: whether it has no default.
        default: in words; empty where there is nothing to say.
        text: what it means.
    """

    field: str
    flag: str
    kinds: tuple[Any, ...]
    optional: bool
    several: bool
    needed: bool
    default: str
    text: str

    @property
    def label(self) -> str:
        """Return the option with its type in words, as help texts show it."""
        if not self.kinds:
            return f"{self.flag}, --no-{self.flag[2:]}" if self.default == "yes" else self.flag
        word, _ = WORDS[self.kinds[-1]]
        return f"{self.flag} {word} ..." if self.several else f"{self.flag} {word}"

    @property
    def takes(self) -> str:
        """Return in words what the option takes."""
        _, words = WORDS[self.kinds[-1]]
        return f"{words} or several, with blanks between them" if self.several else words

    def value(self, text: str) -> Any:
        """Return the value of a text.

        Raises:
            UsageError: it is none that the option takes.
        """
        if self.optional and text == "None":
            return None
        for value_type in self.kinds:
            try:
                value = value_type(text)
            except ValueError:
                continue
            # beyond the range of floats, numbers would become infinite, which means another thing
            if value in (math.inf, -math.inf) and not INFINITE.fullmatch(text.strip()):
                raise UsageError(f"{self.flag} {quoted(text)} is too large: give a smaller number")
            if value_type is not Path or text:  # an empty path is the current folder
                return value
        raise UsageError(f"{self.flag} takes {self.takes}, not {quoted(text)}")


class _Parser(argparse.ArgumentParser):
    """Parser that raises its errors, and takes what begins as a negative number for a value."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # argparse's own knows whole and decimal numbers alone, and no bounds such as -3:3.5
        self._negative_number_matcher = re.compile(r"^-\.?\d")

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        text = message.removeprefix("argument ")
        text = text.replace("unrecognized arguments:", "these words belong to no option:")
        raise UsageError(f"{printable(text)}: `{self.prog} --help` shows what it takes")


def parsed(
    command: str, arguments: Sequence[str], text: str, sections: Mapping[str, Section]
) -> Any:
    """Return an object for each section, with the values of the command line, in a dataclass.

    Args:
        command: as typed, with what comes before its options.
        arguments: the options.
        text: what the command does.
        sections: by name.

    Raises:
        UsageError: an unknown option, or a value that an option does not take.
        SystemExit: --help or --help-all was asked for, and is printed.
    """
    if asks_for_help(arguments):
        with output():
            print(help_text(command, text, [*sections.values()], HELP_ALL in arguments), end="")
        raise SystemExit(0)
    options = {name: _options(section) for name, section in sections.items()}
    flags = {option.flag: option for group in options.values() for option in group}
    _refuse_known(arguments, sections.values())
    parser = _Parser(prog=command, add_help=False, allow_abbrev=False)
    for option in flags.values():
        _add(parser, option)
    by_flag = vars(parser.parse_args(_spelled(command, arguments, flags)))
    if ":" in str(by_flag.get("--mask")):
        from securecluster.privacy.masking import masks

        by_flag["--mask"] = masks.named(by_flag["--mask"])
    values = {}
    for name, group in options.items():
        named = [option for option in group if option.flag in by_flag]
        field_values = {option.field: by_flag[option.flag] for option in named}
        section = sections[name]
        values[name] = section.kind(**{**section.defaults, **field_values})
    return make_dataclass("Options", values)(**values)


def of_folder(command: str, arguments: Sequence[str], options_class: Any) -> Any:
    """Return the options of a command that takes a folder first.

    Args:
        command: its name.
        arguments: after the folder.
        options_class: dataclass of the options, whose documentation says what the command does.
    """
    sections = {"options": Section("options", options_class)}
    text = inspect.getdoc(options_class) or ""
    return parsed(f"securecluster {command} DIR", arguments, text, sections).options


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether --help or --help-all is among the arguments."""
    return any(argument in (*HELP, HELP_ALL) for argument in arguments)


def _add(parser: argparse.ArgumentParser, option: _Option) -> None:
    """Add an option to a parser, which sets nothing where it is not given."""
    if not option.kinds:
        action = argparse.BooleanOptionalAction
        parser.add_argument(option.flag, dest=option.flag, action=action, default=argparse.SUPPRESS)
        return
    several: dict[str, Any] = {}
    if option.several:
        several = {"nargs": "*", "action": _Tuple}
    parser.add_argument(
        option.flag, dest=option.flag, type=option.value, required=option.needed,
        default=argparse.SUPPRESS, **several,
    )  # fmt: skip


class _Tuple(argparse.Action):
    """Action that stores several values as a tuple; the text None alone is None."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Store the values."""
        value = None if values == [None] else tuple(values)
        setattr(namespace, self.dest, value)


def _spelled(command: str, arguments: Sequence[str], flags: Mapping[str, _Option]) -> list[str]:
    """Return the arguments with every option as it is called.

    Args:
        command: as typed.
        arguments: the options.
        flags: all options.

    Raises:
        UsageError: an unknown option.
    """
    spelled = []
    for argument in arguments:
        flag, sign, value = argument.partition("=")
        if OTHER_DASHES.match(flag):
            raise unknown("option", flag, flags)
        if flag.startswith("--"):
            # as it is called in Python
            flag = flag.replace("_", "-")
            if flag not in flags and OTHER_NAMES.get(flag) in flags:
                flag = OTHER_NAMES[flag]
            switch = f"--{flag.removeprefix('--no-')}"
            if flag not in flags and not (switch in flags and not flags[switch].kinds):
                raise unknown("option", flag, flags)
            argument = f"{flag}{sign}{value}"
        spelled.append(argument)
    return spelled


def _refuse_known(arguments: Sequence[str], sections: Iterable[Section]) -> None:
    """Raise UsageError for an option that is set in Python only, or that has left."""
    typed = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    for section in sections:
        if issubclass(section.kind, Options):
            left = [name for name in section.kind.LEFT if option_name(name) in typed]
            section.kind.refuse_left(left)
        for name, mark in section.hidden.items():
            flag = option_name(name)
            if flag in typed or flag.replace("--", "--no-", 1) in typed:
                example = mark.example or f"{section.kind.__name__}({name}=...)"
                raise UsageError(
                    f"{flag} is set in Python, by {example}: leave it out on the command line"
                )


def _options(section: Section) -> list[_Option]:
    """Return the options of a section, without those that are set in Python only."""
    hints = get_type_hints(section.kind, include_extras=True)
    texts = field_descriptions(section.kind)
    offered = {entry.name for entry in fields(section.kind)} - section.hidden.keys()
    options = []
    for declared in fields(section.kind):
        name = declared.name
        if name in section.hidden:
            continue
        default = section.defaults.get(name, _default(declared))
        kinds, optional, several = _types(hints[name], default)
        text = declared.metadata.get("text", texts.get(name, ""))
        text = re.sub(r"\w+_\w+", lambda word: _as_option(word[0], offered), text)
        options.append(
            _Option(
                name,
                declared.metadata.get("flag", option_name(name)),
                kinds,
                optional,
                several,
                default is MISSING,
                declared.metadata.get("default", _in_words(default)),
                # on the command line nobody types None
                re.sub(r"\bNone (is )?", "by default ", text),
            )
        )
    return options


def _as_option(word: str, offered: Collection[str]) -> str:
    """Return a word of a description, and the option in place of a field's name."""
    return option_name(word) if word in offered else word


def _default(declared: Field[Any]) -> Any:
    """Return the default of a field, or MISSING."""
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return declared.default


def _types(hint: Any, default: Any) -> tuple[tuple[Any, ...], bool, bool]:
    """Return the types of an option's values, whether it takes None, and whether several values.

    Args:
        hint: annotation of the field.
        default: of the field.
    """
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    # such as a network: any object in Python, and a name on the command line, like its default
    if hint is Any:
        hint = type(default)
    members = [hint]
    if get_origin(hint) in (Union, UnionType):
        members = list(get_args(hint))
    several = False
    kinds = set()
    for member in members:
        if get_origin(member) is tuple:
            several = True
            member = get_args(member)[0]
        kinds.add(member)
    if bool in kinds:
        return (), False, False
    value_types = tuple(value_type for value_type in WORDS if value_type in kinds)
    return value_types, NoneType in kinds, several


def _in_words(default: Any) -> str:
    """Return a default in words; empty where the option is only then set if it is given."""
    if default is None or default is MISSING or default == ():
        return ""
    if isinstance(default, bool):
        return "yes" if default else ""
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return str(default)


def help_text(command: str, text: str, sections: Sequence[Section], everything: bool) -> str:
    """Return the help text of a command.

    Args:
        command: as typed, with what comes before its options.
        text: what the command does.
        sections: of its options.
        everything: describe every option in full; else a text of more than `LINES` lines is
            shortened.
    """
    width = min(WIDEST, shutil.get_terminal_size().columns)
    full = _text(command, text, sections, partial(_described, width=width), width)
    if everything or len(full) <= LINES:
        return "\n".join(full) + "\n"
    short = _text(command, text, sections, partial(_in_short, width=width), width, True)
    return "\n".join(short) + "\n"


def _text(
    command: str,
    text: str,
    sections: Sequence[Section],
    describe: Callable[[_Option], list[str]],
    width: int,
    short: bool = False,
) -> list[str]:
    """Return the lines of a help text.

    Args:
        command: as typed.
        text: what the command does.
        sections: of its options.
        describe: returns the lines of an option.
        width: in columns.
        short: name the options that are not usual only.
    """
    lines = [f"usage: {command} [options]" if sections else f"usage: {command}"]
    lines += _wrapped(text, "", width)
    others = []
    for section in sections:
        options = _options(section)
        if short and section.usual is not None:
            others += [option.flag for option in options if option.field not in section.usual]
            options = [option for option in options if option.field in section.usual]
        if options:
            lines += ["", section.title]
        for option in options:
            lines += describe(option)
    if others:
        lines += ["", f"more options, which {HELP_ALL} describes"]
        lines += _wrapped(", ".join(others), "  ", width)
    return lines


def _described(option: _Option, width: int) -> list[str]:
    """Return the lines that describe an option in full."""
    text = option.text
    if option.default:
        text = f"{text} (default: {option.default})".strip()
    first = f"  {option.label}"
    lines = _wrapped(text, " " * COLUMN, width)
    if len(first) > COLUMN - 2 or not lines:
        return [first, *lines]
    return [first.ljust(COLUMN) + lines[0].strip(), *lines[1:]]


def _in_short(option: _Option, width: int) -> list[str]:
    """Return the lines that describe an option by the first phrase of its description."""
    phrase, *_ = re.split(r"(?:;|\.) (?![^(]*\))", option.text)
    return _described(replace(option, text=phrase), width)


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    """Return a text in lines of a width, in which options are not divided."""
    return textwrap.wrap(
        text, max(width, len(indent) + 20), initial_indent=indent, subsequent_indent=indent,
        break_on_hyphens=False,
    )  # fmt: skip

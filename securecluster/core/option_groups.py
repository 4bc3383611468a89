"""Options in groups: a class has groups of options, and takes every option as a flat keyword.

    @dataclass(kw_only=True)
    class Privacy(OptionGroup):
        noise: float = 0.0

    @grouped
    class Method(Grouped):
        rounds: int = 40
        privacy: Privacy = group(Privacy)

`Method(noise=1.0).privacy.noise` is 1.0. Options of groups are fields of the class, in the place of
their group, so that `dataclasses.fields`, the constructor and the command line have them by their
flat names; `method.noise` is an attribute, too. A subclass gives an option another default, or
another description, by a field of that name.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeGuard, TypeVar, get_type_hints

from securecluster.core.validation import python_only

LONGEST_VALUE = 60  # letters of an option in a `repr`
C = TypeVar("C", bound="type[Grouped]")
G = TypeVar("G")


@dataclasses.dataclass(frozen=True)
class _Declared:
    """A group in the body of a class."""

    kind: type


def group(group_class: type[G]) -> G:
    """Declare a group of options in the body of a class.

    Args:
        group_class: a dataclass all of whose fields have defaults.
    """
    return _Declared(group_class)  # type: ignore[return-value]


def is_group(value: Any) -> TypeGuard[_Declared]:
    """Return whether a value in the body of a class declares a group that is none yet."""
    return isinstance(value, _Declared)


def groups_of(declaring: type) -> dict[str, type]:
    """Return the classes of the groups of a class, by attribute; empty for one without groups."""
    groups: dict[str, type] = getattr(declaring, "_option_groups", {})
    return groups


def option_groups(owner: Any) -> list[Any]:
    """Return the groups of options of an object, such as its `privacy`.

    Args:
        owner: of a class with groups.
    """
    return [vars(owner)[name] for name in groups_of(type(owner))]


class Grouped:
    """Base of classes whose options are in groups.

    Each group is an attribute, and a value: to set one of its options makes a new group.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    _own_groups: ClassVar[dict[str, type]] = {}
    """Classes of the groups that the class itself declares, by attribute."""
    _option_groups: ClassVar[dict[str, type]] = {}
    """Classes of all groups, by attribute."""
    _group_of: ClassVar[dict[str, str]] = {}
    """The attribute of the group that each of their options is in."""

    def __new__(cls, *arguments: Any, **values: Any) -> Self:
        """Return an object whose groups have their defaults."""
        made = super().__new__(cls)
        for attribute, group_class in cls._option_groups.items():
            vars(made)[attribute] = group_class()
        return made

    def __repr__(self) -> str:
        """Return the class with the options that differ from its defaults."""
        changed = []
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            # an array, or another object that cannot be compared, is no default
            same = isinstance(value, type(option.default)) and value == option.default
            if same is not True:
                changed.append(f"{option.name}={_short(value)}")
        return f"{type(self).__name__}({', '.join(changed)})"

    # Type checkers would take any name for an attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an option of a group by its flat name."""
            attribute = type(self)._group_of.get(name)
            if attribute not in vars(self):
                message = f"{type(self).__name__!r} object has no attribute {name!r}"
                raise AttributeError(message, name=name, obj=self)
            return getattr(vars(self)[attribute], name)

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute, or an option of a group by its flat name."""
            attribute = type(self)._group_of.get(name)
            if attribute is not None:
                value = dataclasses.replace(vars(self)[attribute], **{name: value})
                name = attribute
            super().__setattr__(name, value)


def _short(value: Any) -> str:
    """Return the text of a value, and of one with a long text its class."""
    text = repr(value)
    if len(text) > LONGEST_VALUE or "\n" in text:
        return f"<{type(value).__name__}>"
    return text


def grouped(declared: C) -> C:
    """Make a class a keyword-only dataclass that has its groups' options as fields.

    Args:
        declared: a subclass of `Grouped`, which is changed.

    Raises:
        TypeError: two groups have an option of one name.
    """
    inherited: dict[str, type] = {}
    for base in reversed(declared.__mro__[1:]):
        inherited |= vars(base).get("_own_groups", {})
    declared._own_groups = _flatten(declared)
    declared._option_groups = inherited | declared._own_groups
    declared._group_of = {}
    for name, group_class in declared._option_groups.items():
        for option in dataclasses.fields(group_class):
            if option.name in declared._group_of:
                other = declared._group_of[option.name]
                raise TypeError(f"{option.name} is an option of {other} and of {name}: rename one")
            declared._group_of[option.name] = name
    dataclasses.dataclass(kw_only=True, repr=False)(declared)
    # A class attribute would hide what an object's group says.
    for name in declared._group_of.keys() & vars(declared).keys():
        delattr(declared, name)
    return declared


def _flatten(declared: type) -> dict[str, type]:
    """Put the options of groups in their places in the body of a class.

    Args:
        declared: the class, which is changed.

    Returns:
        The classes of the groups, by attribute.
    """
    groups: dict[str, type] = {}
    annotations: dict[str, Any] = {}
    for name, annotation in vars(declared).get("__annotations__", {}).items():
        value: Any = vars(declared).get(name)
        if not is_group(value):
            annotations[name] = annotation
            continue
        delattr(declared, name)
        groups[name] = value.kind
        types = get_type_hints(value.kind)
        hints = get_type_hints(value.kind, include_extras=True)
        for option in dataclasses.fields(value.kind):
            option_type = types[option.name]
            # ranges are checked by the group
            mark = python_only(hints[option.name])
            if mark:
                option_type = Annotated[option_type, mark]
            annotations[option.name] = option_type
            # the class may have a default of its own
            if option.name not in vars(declared):
                setattr(declared, option.name, option.default)
    declared.__annotations__ = annotations
    return groups

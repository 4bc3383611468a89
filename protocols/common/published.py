"""Methods as their papers have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from securecluster.core.option_groups import groups_of
from securecluster.errors import UsageError
from securecluster.protocols.common.options.option_group import OptionGroup


@dataclass(kw_only=True)
class Additions(OptionGroup):
    """Base of groups of options that a method's paper does not have."""

    absent: ClassVar[Mapping[str, Any]] = {}
    """Values with which the method is the paper's, where these are not the defaults."""


class Published:
    """Base of methods that a paper describes, which can be had as the paper has them."""

    _in_paper: ClassVar[Mapping[str, Any]] = {}
    """Values of the paper's experiments, where these are not the defaults."""
    _inputs_of_paper: ClassVar[tuple[str, ...]] = ()
    """Options that the paper takes as given, and that are found from the data here by default."""

    @classmethod
    def paper(cls, **options: Any) -> Self:
        """Return the method as its paper has it, without what is added here.

        The network stays the one that suits the data.

        Args:
            options: other values, such as the rounds of a study.

        Raises:
            UsageError: an input of the paper is missing.
        """
        for name in cls._inputs_of_paper:
            if options.get(name) is None:
                raise UsageError(
                    f"{name} is an input of the paper, which has no value for it: give "
                    f"{cls.__name__}.paper({name}=...)"
                )
        return cls(**{**cls._paper_defaults(), **options})

    @classmethod
    def _paper_defaults(cls) -> dict[str, Any]:
        """Return the options of the paper that are not the defaults, by name."""
        defaults: dict[str, Any] = {"mask": "none"}
        for option_group in groups_of(cls).values():
            defaults |= getattr(option_group, "absent", {})
        return {**defaults, **cls._in_paper}

    def __dir__(self) -> list[str]:
        """Return the names of attributes, without `paper`, which is of the class."""
        return [name for name in super().__dir__() if name != "paper"]

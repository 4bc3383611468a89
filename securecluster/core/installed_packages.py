"""Parts that are not this project's: entry points of installed packages, and users' own modules.

Protocols, attacks, masks, data sets, claims, scores and report fields each have a group of entry
points. What no package declares is given by its path, "module:Class", where the module may lie in
the current folder. Either is loaded, or refused in one sentence.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import isfunction
from pathlib import Path
from typing import Any

from securecluster.errors import SecureClusterError, UsageError, text_of, unknown


def declaration(category: str, point: EntryPoint) -> str:
    """Return the beginning of a sentence on an entry point.

    Args:
        category: what it stands for, such as "attack".
        point: the entry point.
    """
    return f"the {category} {point.name!r}, which is declared as {point.value}"


def load(category: str, point: EntryPoint) -> Any:
    """Return what an entry point leads to.

    Args:
        category: what it stands for, such as "attack".
        point: the entry point.

    Raises:
        UsageError: it cannot be imported.
    """
    try:
        return point.load()
    except SecureClusterError:  # a mistake in the module, which the error names
        raise
    except Exception as error:  # anything that a module of somebody else's raises
        raise UsageError(
            f"{declaration(category, point)}, cannot be imported ({error}): correct the entry "
            "point, or install the package again"
        ) from None


def of_path(category: str, path: str, group: str) -> EntryPoint:
    """Return a class of a module, which may lie in the current folder, as an entry point.

    Args:
        category: what it stands for, such as "attack".
        path: "module:Class".
        group: of entry points that stand for the same.

    Returns:
        Under the name that the class or function has, or its path where it has none.

    Raises:
        UsageError: it cannot be imported.
    """
    module = path.partition(":")[0]
    if not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(
            f"the {category} {path} names no module: stand in its folder, and say my_module:MyClass"
        )
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        loaded = EntryPoint(path, path, group).load()
    except SecureClusterError:  # a mistake in the class, which the error names
        raise
    except Exception as error:  # anything that a module of somebody else's raises
        raise UsageError(
            f"the {category} {path} cannot be imported ({type(error).__name__}: {text_of(error)}): "
            "correct the module, or its name, as my_module:MyClass"
        ) from None
    name = getattr(loaded, "name", None) or (isfunction(loaded) and loaded.__name__)
    return EntryPoint(name or path, path, group)


@cache
def points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points that installed packages declare in a group.

    Args:
        group: of entry points.
    """
    return tuple(entry_points(group=group))


@dataclass(frozen=True)
class Parts:
    """Parts of one kind by name: those of installed packages, and those given by their paths.

    Names of this project's own parts stay theirs.

    Args:
        kind: what they are, such as "attack".
        group: of their entry points.
        own: the names of this project's.
        variable: of the environment, for the paths of parts that no package declares, with commas,
            so that processes that start later have them, too; empty for `kept` alone.
        kept: parts that were given by their paths in this process, by name.
    """

    kind: str
    group: str
    own: Collection[str] = ()
    variable: str = ""
    kept: dict[str, EntryPoint] = field(default_factory=dict)

    def declared(self) -> dict[str, EntryPoint]:
        """Return what installed packages declare, by name."""
        found = points(self.group)
        return {p.name: p for p in found if p.group == self.group and p.name not in self.own}

    def others(self) -> dict[str, EntryPoint]:
        """Return what is not this project's by name: what is given by a path, and declared."""
        given = _given(self.kind, self.group, *self._paths())
        named = {p.name: p for p in given if p.name not in self.own}
        return named | self.kept | self.declared()

    def names(self) -> list[str]:
        """Return all names, those of this project first."""
        return [*self.own, *sorted(self.others())]

    def point(self, name: str) -> EntryPoint:
        """Return the entry point of a name that is not this project's.

        Args:
            name: of the part.

        Raises:
            UsageError: nothing has it.
        """
        others = self.others()
        if name not in others:
            raise unknown(self.kind, name, self.names())
        return others[name]

    def loaded(self, point: EntryPoint) -> tuple[str, Any]:
        """Return the beginning of a sentence on a part, and what its entry point leads to.

        Args:
            point: the entry point.

        Raises:
            UsageError: it cannot be imported.
        """
        return declaration(self.kind, point), load(self.kind, point)

    def give(self, path: str, check: Callable[[EntryPoint], Any]) -> str:
        """Return the name of a part that is given by its path, which is known by it from then on.

        Args:
            path: "module:Class".
            check: raises UsageError where the path leads to something else than such a part.

        Raises:
            UsageError: it cannot be imported, or has the name of another part.
        """
        point = of_path(self.kind, path, self.group)
        known = self.others().get(point.name)
        if point.name in self.own or (known is not None and known.value != path):
            raise UsageError(
                f"{path} has the name {point.name!r} of another {self.kind}: give it another one"
            )
        check(point)
        if not self.variable:
            self.kept[point.name] = point
        elif known is None:
            os.environ[self.variable] = ",".join([*self._paths(), path])
        return point.name

    def _paths(self) -> list[str]:
        return [path for path in os.environ.get(self.variable, "").split(",") if path]


@cache
def _given(kind: str, group: str, *paths: str) -> tuple[EntryPoint, ...]:
    """Return parts of the user's own modules.

    Args:
        kind: what they are.
        group: of their entry points.
        paths: "module:Class" of each.
    """
    return tuple(of_path(kind, path, group) for path in paths)

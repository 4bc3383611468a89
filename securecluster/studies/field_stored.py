"""Stored results of the field's built-in methods, and whether they are older than the code.

`field_results.csv` has a line per run, as `runs.csv` in the folder of a field has them. Each line
carries a digest of the files by which its numbers came about: those of the rooms of `PROGRAM`, and
those of the method. A digest that differs says that one of these files has changed since, be it by
a comment, and not that the numbers would.
"""

from __future__ import annotations

import csv
import hashlib
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import securecluster
from securecluster import protocols
from securecluster.commands.failures import Row
from securecluster.protocols.registry import protocol_class
from securecluster.studies.field_plan import HASH_LETTERS, METRIC, Plan

STORED = Path(__file__).with_name("field_results.csv")
PROGRAM = (
    "clustering", "core", "data", "messaging", "models", "parties", "privacy", "protections",
    "results", "runs", "runtime", "training",
)  # fmt: skip
COLUMNS = (
    "setting", "hash", "data_digest", "variant", "protocol", "chosen", "target_epsilon", "seed",
    "status", "reason", "epsilon", "delta", "dp_unit", "noise", "clients", "clusters", "ari",
    METRIC, f"worst_{METRIC}", "up", "down", "servers", "rounds", "tuned_alone", "seconds",
    "program", "version",
)  # fmt: skip
TEXTS = frozenset(
    {
        "setting", "hash", "data_digest", "variant", "protocol", "chosen", "status", "reason",
        "dp_unit", "program", "version",
    }
)  # fmt: skip
WHOLE = frozenset({"seed", "clients", "clusters", "rounds", "tuned_alone"})


def read(path: Path = STORED) -> list[Row]:
    """Return the rows of a field; none where the file does not exist.

    Args:
        path: of a table that `sweep_tables.write` wrote.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        return [
            {name: _value(name, row[name]) for name in COLUMNS} for row in csv.DictReader(lines)
        ]


def _value(name: str, text: str) -> Any:
    """Return the value of a cell; None of an empty one."""
    if not text:
        return None
    if name in TEXTS:
        return text
    return int(text) if name in WHOLE else float(text)


def used(plan: Plan, rows: Iterable[Row]) -> list[Row]:
    """Return the stored rows that a plan takes in place of runs.

    Args:
        plan: of a field.
        rows: that are stored.
    """
    known = _known(plan)
    return [
        row
        for row in rows
        if (row["setting"], row["variant"], row["target_epsilon"]) in plan.stored
        and row["seed"] in plan.seeds
        and (row["setting"], row["hash"], row["data_digest"]) in known
    ]


def complete(plan: Plan, rows: Iterable[Row]) -> tuple[tuple[str, str, float], ...]:
    """Return setting, method and ε of which rows of all seeds are stored.

    Args:
        plan: of a field.
        rows: that are stored.
    """
    known = _known(plan)
    seeds: dict[tuple[str, str, float], set[int]] = {}
    for row in rows:
        if (row["setting"], row["hash"], row["data_digest"]) in known:
            key = (row["setting"], row["variant"], row["target_epsilon"])
            seeds.setdefault(key, set()).add(row["seed"])
    found = (key for key, of_key in seeds.items() if of_key >= set(plan.seeds))
    return tuple(key for key in found if key[1] in plan.beside and key[2] in plan.epsilons)


def _known(plan: Plan) -> set[tuple[str, str, str]]:
    """Return name, hash and digest of the data of a plan's settings."""
    pairs = zip(plan.settings, plan.digests, strict=True)
    return {(setting.name, setting.hash(plan.dp_unit), digest) for setting, digest in pairs}


def programs(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return each protocol of a plan with the digest of its program.

    Args:
        plan: of a field.
    """
    names = dict.fromkeys(variant.protocol for variant in plan.variants)
    return tuple((name, program(name)) for name in names)


@cache
def program(protocol: str) -> str:
    """Return a digest of the files by which a method's numbers come about, in hex.

    Args:
        protocol: name of the method.
    """
    digest = hashlib.sha256()
    for path in _files(protocol):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:HASH_LETTERS]


def _files(protocol: str) -> Iterator[Path]:
    """Yield the files of the program that a method's runs go through, in a fixed order."""
    library = Path(str(securecluster.__file__)).parent
    shared = Path(str(protocols.__file__)).parent
    for folder in [*(library / room for room in PROGRAM), shared / "common"]:
        yield from sorted(folder.rglob("*.py"))
    own = Path(inspect.getfile(protocol_class(protocol)))
    if own.is_relative_to(shared) and own.parent not in (shared, shared / "contrib"):
        yield from sorted(own.parent.rglob("*.py"))  # a package of its own
    else:
        yield own

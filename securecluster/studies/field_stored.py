"""Stored results of the field's built-in methods, and the version that they were measured with.

`field_results.csv` has a line per run, as `runs.csv` in the folder of a field has them. `version`
has the commit, too. No digest of files says whether another version would give other numbers: a
comment changes it as well, and so does every room that a run goes through. Golden runs
(`benchmarks.golden`) say it; who changes those of a method measures its rows anew.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from securecluster.commands.failures import Row
from securecluster.parties.program import program_digest
from securecluster.protocols.registry import protocol_class
from securecluster.studies.field_plan import METRIC, Plan

STORED = Path(__file__).with_name("field_results.csv")
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
    """Return each protocol of a plan with the digest of its source, and of this version.

    Args:
        plan: of a field.
    """
    names = dict.fromkeys(variant.protocol for variant in plan.variants)
    return tuple((name, program(name)) for name in names)


def program(protocol: str) -> str:
    """Return the digest of a method's source and of this version, in hex.

    Args:
        protocol: name of the method.
    """
    method = protocol_class(protocol)
    return program_digest(method, method.client)


def public(version: str) -> str:
    """Return a version without the commit.

    Args:
        version: as `field_results.csv` has it.
    """
    return version.partition("+")[0]

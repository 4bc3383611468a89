"""The table of an audit as it lies in a file: its entries, and a reader that takes nothing else.

What an attack of an author's own says of itself stands in texts, which may be any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from securecluster.core import serialization
from securecluster.errors import RunFolderError
from securecluster.folders import run_folder

SCHEMA = 4


class Range(TypedDict):
    """Range of a score."""

    low: float
    """lower end"""
    high: float
    """upper end"""


class ScoreEntry(TypedDict):
    """Score of an attack, as `attacks.scoring.Score` has it."""

    metric: str
    """what the value measures"""
    value: float
    """of the guess"""
    interval: Range | None
    """of the value; null where there is none"""
    chance: float
    """mean of the negative control"""
    chance_interval: Range
    """by which a score is at chance or not"""
    higher: bool
    """whether a larger value is a more successful attack"""
    units: int
    """number of units, such as clients"""
    interval_by: str
    """how the interval was found, or why there is none"""


class TwinOutcome(TypedDict):
    """Outcome of an attack on a twin of the run."""

    verdict: str
    """against chance or the ledger's ε, or why there is no score"""
    score: ScoreEntry | None
    """null where there is none"""
    ledger_epsilon: NotRequired[float | None]
    """of audits of noise: the ledger's ε; null is ∞"""
    said: NotRequired[list[str]]
    """what the attack says besides, in sentences"""
    seconds: float
    """that it took"""


class Without(TwinOutcome):
    """Outcome of an attack on a twin without one protection, or without all."""

    protection: str
    """that it is without"""


class Outcome(TypedDict):
    """Outcome of an attack on the run."""

    verdict: Literal["broken", "visible", "could not tell", "at chance", "not tried"]
    """what it says of the run"""
    why: str
    """the reason of the verdict"""
    score: ScoreEntry | None
    """null where there is none"""
    claims: list[str]
    """protections that are said to hide what the attack guesses"""
    held: list[str]
    """protections without one of which alone it succeeds"""
    without: list[Without]
    """of what is at chance: outcomes on twins, by what they are without"""
    ledger_epsilon: NotRequired[float | None]
    """of audits of noise: the ledger's ε; null is ∞"""
    said: NotRequired[list[str]]
    """what the attack says of the run besides, in sentences"""
    seconds: float
    """that it took"""


class Row(TypedDict):
    """One attack."""

    attack: str
    """its name"""
    source: str
    """where it was published"""
    needs: str
    """what it works on"""
    learns: str
    """what it would learn"""
    harm: str
    """of what kind that is"""
    run: Outcome
    """on the run"""
    unprotected: TwinOutcome
    """on the twin"""


class AuditTable(TypedDict):
    """Content of an audit's table."""

    schema: int
    """number of the format"""
    adversary: str
    """in words, with names of clients"""
    numbered: str
    """the same, with positions in place of names"""
    made: str
    """when the audit ended"""
    version: str
    """of the package that made it"""
    headline: list[str]
    """what was found, in sentences"""
    reading: str
    """how scores are read"""
    protections: dict[str, Any]
    """options of the run that the twin is without"""
    notes: list[str]
    """on what was repeated or left out"""
    budget: float | None
    """seconds that were allowed; null without a limit"""
    seconds: float
    """that the audit took"""
    attacks: list[Row]
    """in the order in which they were tried"""
    run: str
    """digest by which runs are told apart; empty of a recorded app"""
    numbered_name: str
    """of the files, with positions in place of names"""
    summary: str
    """what the adversary could learn, as a paragraph"""
    app: NotRequired[str]
    """of a recorded app: its name"""


def read(path: Path, data: bytes) -> AuditTable:
    """Return the content of an audit's table, with the types that an audit writes.

    Args:
        path: of the file, for the message of an error.
        data: its content.

    Raises:
        RunFolderError: it is damaged, or of another version.
    """
    try:
        table = serialization.checked(path, serialization.parsed(path, data), AuditTable)
    except RunFolderError:
        raise unreadable(path) from None
    # it becomes the name of a file
    is_name = run_folder.AUDITS.fullmatch(f"{table['numbered_name']}.json") is not None
    if table["schema"] != SCHEMA or not is_name:
        raise unreadable(path)
    return table


def unreadable(path: Path) -> RunFolderError:
    """Return the error for a table that no audit of this version wrote.

    Args:
        path: of the file.
    """
    return RunFolderError(
        f"{path} is damaged, or an audit of another version: remove it, and audit again"
    )

"""`securecluster describe`: what would be understood of a table, before a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securecluster.commands import command_line
from securecluster.commands.command_line import Section
from securecluster.commands.options import as_typed
from securecluster.core.noted_warnings import noted
from securecluster.core.number_format import printable
from securecluster.core.stops import output
from securecluster.errors import UsageError
from securecluster.models.objectives import task_of

ABOUT = (
    "Show what is understood of your own table before a run: its files, clients, classes by client "
    "and columns, and what a run would refuse."
)


@dataclass(frozen=True)
class Describe:
    """The columns of a table."""

    client_column: str | None = None
    """the column that names each row's client; @file or @folder where each file or folder is one"""
    label_column: str | None = None
    """the column to learn, or several, joined by commas"""
    test_column: str | None = None
    """the column that says which rows are held out; None is a fifth, stratified by label"""
    task: str | None = None
    """what is learned of it, as of run"""
    classes: tuple[str, ...] | None = None
    """the labels in the order of their class numbers; None is all that occur"""
    truth_column: str | None = None
    """the column with each client's true cluster"""
    weight_column: str | None = None
    """the column with each row's weight in training"""
    feature_columns: tuple[str, ...] | None = None
    """the columns that are features; None is all remaining ones"""
    drop_columns: tuple[str, ...] | None = None
    """columns that are no features"""
    missing: tuple[str, ...] | None = None
    """texts that stand for missing values beside empty cells; None is ?, -, NA and their like"""
    prepare: str | None = None
    """auto fills gaps and makes numbers of categories and dates"""


def describe(argv: list[str]) -> int:
    """Print what is understood of a table.

    Args:
        argv: the file or folder, then the options.

    Raises:
        UsageError: no table, or one that cannot be read.
    """
    sections = {"options": Section("options", Describe)}
    wants_help = command_line.asks_for_help(argv[:1])
    if not wants_help and (not argv or argv[0].startswith("-")):
        raise UsageError("describe takes a file or a folder first: securecluster describe TABLE")
    arguments = argv if wants_help else argv[1:]
    options = command_line.parsed("securecluster describe TABLE", arguments, ABOUT, sections)
    from securecluster.data.tables.clients import labels_in, named_columns
    from securecluster.data.tables.description import lines
    from securecluster.data.tables.files import file_table

    columns: Describe = options.options
    of_rows = (columns.test_column, columns.truth_column, columns.weight_column)
    roles = (columns.client_column, *of_rows)
    others = [name for name in roles if name is not None]
    labels = named_columns(columns.label_column or ())
    table = file_table(Path(argv[0]), [*others, *labels])
    labels = labels_in(table, columns.label_column or ())
    table.check([*others, *labels])
    trained = task_of(columns.task)
    has_classes = len(labels) == 1 and (trained is None or trained.one_label)
    with output():
        label = labels[0] if has_classes else None
        for line in lines(table, columns.client_column, label, columns.missing):
            print(printable(line))
        for line in _outcome(argv[0], columns):
            print(printable(as_typed(line)))
    return 0


def _outcome(path: str, columns: Describe) -> list[str]:
    """Return what a run would refuse or note, in lines.

    Args:
        path: of the table.
        columns: as given.
    """
    given: dict[str, Any] = {**vars(columns), "drop_columns": columns.drop_columns or ()}
    given["test"] = given.pop("test_column")
    if columns.client_column is None or columns.label_column is None:
        return ["for clients and classes give --client-column (or @file) and --label-column"]
    from securecluster.data import Federation
    from securecluster.data.tables.description import sides

    notes: list[str] = []
    try:
        with noted(notes.append):
            federation = Federation.from_csv(path, **given, seed=0)
    except UsageError as error:
        return [f"a run would refuse this: {error}"]
    says = [f"note: {note}" for note in notes]
    return [f"a run would train on {len(federation)} clients:", *sides(federation), *says]

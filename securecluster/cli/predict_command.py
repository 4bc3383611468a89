"""`securecluster predict`: what a client's model of a finished run says of new rows."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securecluster.cli.report_command import folder_of
from securecluster.commands import command_line, execution
from securecluster.core import atomic_files
from securecluster.core.noted_warnings import noted
from securecluster.core.stops import output
from securecluster.data.tables.files import file_table
from securecluster.errors import UsageError
from securecluster.models.objectives import Classification

PREDICTED = "predicted"  # column of the most likely class


@dataclass(frozen=True)
class Predict:
    """Write the class of each row of a file, and the probability of every class.

    Columns are found by their names; those that are no features are left out.
    """

    client: str | None = None
    """whose model answers, prepared as its own rows were: a client of the run, or one that joined
    it
    """
    out: Path | None = None
    """CSV file of the predictions; None prints how many rows have which class"""
    quiet: bool = False
    """print nothing but errors"""


def predict(argv: list[str]) -> int:
    """Predict the rows of a file, and return the exit code.

    Args:
        argv: the folder of the run, the file, then the options.
    """
    folder, arguments = folder_of(argv, "predict")
    rows = Path()
    if not command_line.asks_for_help(arguments):
        if not arguments or arguments[0].startswith("-"):
            raise UsageError(
                "predict takes the file after the run folder: securecluster predict DIR rows.csv "
                "--client NAME"
            )
        rows, arguments = Path(arguments[0]), arguments[1:]
    options = command_line.of_folder("predict", arguments, Predict)
    if options.client is None:
        raise UsageError("predict answers by a client's model: name it, --client NAME")
    if options.out is not None:
        atomic_files.check_output(options.out, is_predictions)
    with noted(execution.noting(options.quiet)):
        names, shares = _answers(folder, rows, options.client)
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow([PREDICTED, *names])
    predicted = [names[k] for k in shares.argmax(1)]
    for name, row in zip(predicted, shares.tolist(), strict=True):
        table.writerow([name, *(f"{share:.6f}" for share in row)])
    if options.out is not None:
        atomic_files.write_output(options.out, lines.getvalue().encode(), is_predictions)
    if not options.quiet:
        counts = Counter(predicted)
        with output():
            print(f"{len(predicted)} rows: " + ", ".join(f"{n} {counts[n]}" for n in names))
    return 0


def is_predictions(data: bytes) -> bool:
    """Return whether a file holds predictions.

    Args:
        data: content of the file.
    """
    return data.startswith(f"{PREDICTED},".encode())


def _answers(folder: Path, path: Path, client: str) -> tuple[list[str], Any]:
    """Return the names of the classes, and the probability of each for every row.

    Args:
        folder: of the run.
        path: of the file with the rows.
        client: whose model answers.
    """
    from securecluster.protocols.registry import protocol_class
    from securecluster.results.saving import read_summary

    learned = read_summary(folder)
    if learned.config["objective"]["kind"] != Classification.kind:
        raise UsageError("predict writes classes, which this run has none of: use predict_samples")
    fitted = protocol_class(learned.protocol).load(folder)
    table = file_table(path, learned.config.get("feature_names") or ())
    shares = fitted.predict_proba(client, table)
    return [str(name) for name in fitted.classes_], shares

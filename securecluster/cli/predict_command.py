"""`securecluster predict`: what a client's model of a finished run says of new rows."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from securecluster.cli.report_command import folder_of
from securecluster.commands import command_line, execution
from securecluster.core import atomic_files
from securecluster.core.noted_warnings import noted
from securecluster.core.stops import output
from securecluster.data.tables.files import file_table
from securecluster.errors import UsageError
from securecluster.models.objectives import Regression, objective

PREDICTED = "predicted"  # column of the most likely class, of the labels, or of the number


@dataclass(frozen=True)
class Predict:
    """Write the class of each row of a file, and the probability of every class; or its number.

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
        header, answers, summary = _answers(folder, rows, options.client)
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow(header)
    table.writerows(answers)
    if options.out is not None:
        atomic_files.write_output(options.out, lines.getvalue().encode(), is_predictions)
    if not options.quiet:
        with output():
            print(f"{len(answers)} rows: {summary}")
    return 0


def is_predictions(data: bytes) -> bool:
    """Return whether a file holds predictions.

    Args:
        data: content of the file.
    """
    return data.startswith(PREDICTED.encode())


def _answers(folder: Path, path: Path, client: str) -> tuple[list[str], list[list[str]], str]:
    """Return the names of the columns, the answers by row, and a summary of them.

    Args:
        folder: of the run.
        path: of the file with the rows.
        client: whose model answers.
    """
    from securecluster.protocols.registry import class_of_folder
    from securecluster.results.saving import read_summary

    learned = read_summary(folder)
    trained = objective(learned.config["objective"])
    if trained.sequential:
        raise UsageError(
            "predict writes classes and numbers, which this run has none of: use predict_samples"
        )
    fitted = class_of_folder(learned.protocol).load(folder)
    table = file_table(path, learned.config.get("feature_names") or ())
    names = [str(name) for name in fitted.classes_]
    if trained.kind == Regression.kind:
        return _numbers(names, fitted.predict_samples(client, table).reshape(-1, len(names)))
    shares = fitted.predict_proba(client, table)
    if trained.one_label:
        labels = [[names[k]] for k in shares.argmax(1)]
    else:
        labels = [[names[k] for k in np.flatnonzero(row > 0.5)] for row in shares]
    counts = Counter(name for row in labels for name in row)
    rows = [
        [" ".join(named), *(f"{share:.6f}" for share in row)]
        for named, row in zip(labels, shares.tolist(), strict=True)
    ]
    return [PREDICTED, *names], rows, ", ".join(f"{name} {counts[name]}" for name in names)


def _numbers(
    names: list[str], predicted: NDArray[np.float64]
) -> tuple[list[str], list[list[str]], str]:
    """Return columns, rows and a summary of predicted numbers.

    Args:
        names: of the targets.
        predicted: (n, targets).
    """
    header = [PREDICTED] if len(names) == 1 else [f"{PREDICTED} {name}" for name in names]
    rows = [[f"{number:.9g}" for number in row] for row in predicted.tolist()]
    ranges = zip(header, predicted.min(axis=0), predicted.max(axis=0), strict=True)
    return header, rows, ", ".join(f"{name} {low:.6g} to {high:.6g}" for name, low, high in ranges)

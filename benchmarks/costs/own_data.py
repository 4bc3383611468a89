"""Measure seconds and peak memory of users' own parquet files, beside pyarrow's read of them.

python -m benchmarks.costs.own_data [--rows 1500000 10000000] [--clients 5000] [--repeats 3]

A file has a column of clients' names, one of labels, and features: ten columns of numbers (single
and double precision, and integers), or one column of lists of 64 numbers, in a tenth of the rows.
Seconds are of the processor, the least of the repeats, of both ways in turn; pyarrow reads the same
columns into memory, from the same warm file. Each file is read in a process of its own, since the
largest resident set of a process never falls; it includes some 140 MiB of imports.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.costs.own_process import line_of, peak
from benchmarks.grid import script_parser
from benchmarks.table import tabulate
from securecluster import Federation
from securecluster.core.optional_packages import need
from securecluster.errors import SecureClusterWarning

COLUMNS, LISTS = "columns", "lists"
FEWER_LISTS = 10  # times fewer rows have lists, whose numbers are more
LENGTH = 64  # of a list
GROUP = 1_000_000  # rows that are written at once
MIB_A_GIB = 1024
WARM_UP = 100  # rows of the file that makes both ways import what they need
FEWEST = 50  # rows of a client on average, so that none has a single one


def write_file(path: Path, layout: str, rows: int, clients: int) -> None:
    """Write a parquet file of random numbers, a group of rows at a time.

    Args:
        path: of the file.
        layout: of the features, `COLUMNS` or `LISTS`.
        rows: how many.
        clients: whose names the rows have at random.
    """
    parquet = need("pyarrow.parquet")
    rng = np.random.default_rng(0)
    names = np.array([f"hospital {k}" for k in range(clients)])
    writer = None
    for start in range(0, rows, GROUP):
        table = _group(layout, min(GROUP, rows - start), names, rng)
        if writer is None:
            writer = parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def _group(layout: str, rows: int, names: Any, rng: np.random.Generator) -> Any:
    """Return some rows of a file (`pyarrow.Table`).

    Args:
        layout: of the features.
        rows: how many.
        names: of the clients.
        rng: of all numbers.
    """
    arrow = need("pyarrow")
    clients = rng.integers(len(names), size=rows, dtype=np.int32)
    columns: dict[str, Any] = {}
    if layout == LISTS:
        numbers = arrow.array(rng.standard_normal(rows * LENGTH, dtype=np.float32))
        ends = arrow.array(np.arange(0, rows * LENGTH + 1, LENGTH, dtype=np.int32))
        columns["list"] = arrow.ListArray.from_arrays(ends, numbers)
    else:
        columns |= {f"single{k}": rng.standard_normal(rows, dtype=np.float32) for k in range(6)}
        columns |= {f"double{k}": rng.standard_normal(rows) for k in range(2)}
        columns |= {f"integer{k}": rng.integers(-9, 10, rows) for k in range(2)}
    columns["label"] = rng.integers(10, size=rows)
    coded = arrow.DictionaryArray.from_arrays(arrow.array(clients), arrow.array(names))
    columns["client"] = coded.cast(arrow.string())
    return arrow.table(columns)


def load(path: Path) -> Federation:
    """Return the federation of a file.

    Args:
        path: of the file.
    """
    with warnings.catch_warnings():
        # a client may be too small to hold out a row
        warnings.simplefilter("ignore", SecureClusterWarning)
        return Federation.from_parquet(path, client_column="client", label_column="label", seed=0)


def least_seconds(path: Path, repeats: int) -> tuple[float, float, float]:
    """Return the least processor seconds of pyarrow and of this library, and GiB at the peak.

    The peak is of the library's first read.

    Args:
        path: of the file.
        repeats: of each of both.
    """
    parquet = need("pyarrow.parquet")
    largest = 0.0
    ours = others = math.inf
    for _ in range(repeats):
        start = time.process_time()
        federation = load(path)
        ours = min(ours, time.process_time() - start)
        largest = largest or peak()
        del federation
        start = time.process_time()
        table = parquet.read_table(path, use_threads=False)
        others = min(others, time.process_time() - start)
        del table
    return others, ours, largest


def one(path: Path, repeats: int) -> dict[str, Any]:
    """Read a file in this process, and return what was measured.

    Args:
        path: of the file, beside which lies one for imports.
        repeats: of each way.
    """
    least_seconds(path.with_name("small.parquet"), 1)
    read, seconds, largest = least_seconds(path, repeats)
    return {
        "read_cpu_seconds": round(read, 2),
        "cpu_seconds": round(seconds, 2),
        "over_read": round(seconds / read, 2),
        "peak_mib": round(largest * MIB_A_GIB),
    }


def measure(layout: str, rows: int, clients: int, repeats: int) -> list[dict[str, Any]]:
    """Return the line of the table of a file.

    Args:
        layout: of its features.
        rows: how many it has.
        clients: how many it names.
        repeats: of each way.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.parquet"
        # in processes of their own, too: one inherits the largest resident set of its parent
        for file, count in ((path, rows), (path.with_name("small.parquet"), WARM_UP)):
            arguments = (file, layout, count, min(clients, count // FEWEST))
            writer = multiprocessing.get_context("spawn").Process(target=write_file, args=arguments)
            writer.start()
            writer.join()
        line = line_of("benchmarks.costs.own_data", ["--one", str(path), "--repeats", str(repeats)])
    return [{"features": layout, "rows": rows, "clients": clients, **line}]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write the table.

    Args:
        argv: arguments of the command line; None takes the process's own.
    """
    parser = script_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_500_000, 10_000_000])
    parser.add_argument("--clients", type=int, default=5000, help="named by a file")
    parser.add_argument("--repeats", type=int, default=3, help="of each way to read a file")
    parser.add_argument("--one", type=Path, help="a file to read in this process")
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(one(options.one, options.repeats)))
        return
    cases = [(COLUMNS, rows) for rows in options.rows]
    cases += [(LISTS, rows // FEWER_LISTS) for rows in options.rows]
    measured = (measure(layout, rows, options.clients, options.repeats) for layout, rows in cases)
    print(tabulate("own_data", measured))


if __name__ == "__main__":
    main()

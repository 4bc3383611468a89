"""Users' own parquet files, whose reads `benchmarks.ratios` compares with pyarrow's.

A file has a column of clients' names, one of labels, and ten columns of numbers (single and double
precision, and integers). Seconds are of the processor, the least of the repeats, of both ways in
turn; pyarrow reads the same columns into memory, from the same warm file.
"""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from securecluster import Federation
from securecluster.core.optional_packages import need
from securecluster.errors import SecureClusterWarning

GROUP = 1_000_000  # rows that are written at once


def write_file(path: Path, rows: int, clients: int) -> None:
    """Write a parquet file of random numbers, a group of rows at a time.

    Args:
        path: of the file.
        rows: how many.
        clients: whose names the rows have at random.
    """
    parquet = need("pyarrow.parquet")
    rng = np.random.default_rng(0)
    names = np.array([f"hospital {k}" for k in range(clients)])
    writer = None
    for start in range(0, rows, GROUP):
        table = _group(min(GROUP, rows - start), names, rng)
        if writer is None:
            writer = parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def _group(rows: int, names: Any, rng: np.random.Generator) -> Any:
    """Return some rows of a file (`pyarrow.Table`).

    Args:
        rows: how many.
        names: of the clients.
        rng: of all numbers.
    """
    arrow = need("pyarrow")
    clients = rng.integers(len(names), size=rows, dtype=np.int32)
    columns: dict[str, Any] = {}
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


def least_seconds(path: Path, repeats: int) -> tuple[float, float]:
    """Return the least processor seconds of pyarrow and of this library.

    Args:
        path: of the file.
        repeats: of each of both.
    """
    parquet = need("pyarrow.parquet")
    ours = others = math.inf
    for _ in range(repeats):
        start = time.process_time()
        federation = load(path)
        ours = min(ours, time.process_time() - start)
        del federation
        start = time.process_time()
        table = parquet.read_table(path, use_threads=False)
        others = min(others, time.process_time() - start)
        del table
    return others, ours

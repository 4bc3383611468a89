"""Toy sources whose samples say which row they are, and the folder of real data."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster.data.datasets import FOLDER, Source, Task
from securecluster.data.pools import ArrayPool

SIDE = 3
TEST_ROWS = 100_000  # rows of the test pool are numbered from here


def make_toy(
    n: int = 600,
    classes: int = 10,
    test: int | None = None,
    owners: Any = None,
    tasks: tuple[Task, ...] = (),
    seed: int = 0,
) -> Source:
    """Images of 3 × 3 whose pixels are their row plus k/16, k = 0 … 8 the pixel's place."""
    draw = np.random.default_rng(seed)
    place = (np.arange(SIDE * SIDE) / 16).reshape(1, SIDE, SIDE)

    def pool(first: int, count: int, owner: Any = None) -> ArrayPool:
        x = (first + np.arange(count)[:, None, None, None] + place).astype(np.float32)
        y = draw.permutation(np.arange(count) % classes)
        return ArrayPool(
            x, y.astype(np.int64), None if owner is None else np.asarray(owner, dtype=object)
        )

    return Source(
        "toy",
        classes,
        (1, SIDE, SIDE),
        pool(0, n, owners),
        None if test is None else pool(TEST_ROWS, test),
        tasks,
    )


@pytest.fixture(scope="session")
def toy() -> Callable[..., Source]:
    return make_toy


@pytest.fixture
def read_hub(tmp_path: Path) -> Callable[[str, Path], Any]:
    """Run a script in a process of its own, offline, and return the JSON that it prints; `datasets`
    reads a local folder as it reads a repository.
    """
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("the package datasets is not installed")

    def read(script: str, folder: Path) -> Any:
        kept = {k: v for k, v in os.environ.items() if k != FOLDER and not k.startswith("HF_")}
        hub = {
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        }
        command = [sys.executable, "-c", script, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=kept | hub)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return read


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of real image sets, which the environment then names; the test is skipped where
    there is none.
    """
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get(FOLDER) or beside)
    if not (folder / "mnist").is_dir():
        pytest.skip(
            f"no image sets: {FOLDER} is not set to a folder with mnist in it, and {beside} is none"
        )
    monkeypatch.setenv(FOLDER, str(folder))
    return folder

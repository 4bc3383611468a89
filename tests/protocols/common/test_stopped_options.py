"""Runs that keep something between rounds and are stopped end as if they never had been."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import cases
import pytest

from securecluster import Federation
from securecluster.protocols import CFL, FLHC, IFCA, FedAvg, FineTune, Hidden
from securecluster.protocols.conformance import check_resume, example

HEAD: dict[str, Any] = {"local_layers": ("3",), "model": "mlp-32", "participation": 0.5}
BEST: dict[str, Any] = {"keep_best": 0.3, "lr": 3.0}  # rounds are better and worse, in turn
MOMENTUM: dict[str, Any] = {"momentum": 0.9, "lr": 0.05, "keep_momentum": True}
CENTRAL: dict[str, Any] = {"clip": 1.0, "noise": 0.5, "placement": "central"}
OPTIONS: list[tuple[type[Any], dict[str, Any]]] = [
    (CFL, HEAD),
    (FineTune, HEAD),
    (CFL, BEST),
    (IFCA, BEST),
    (CFL, {"tune_rounds": 2}),
    (FedAvg, MOMENTUM),
    (CFL, MOMENTUM),
    (FLHC, {**MOMENTUM, "pre_rounds": 2}),
    (Hidden, {**CENTRAL, "mask": "permutation", "points": "means"}),
    (Hidden, {**CENTRAL, "mask": "permutation", "points": "means", "residuals": True}),
    (Hidden, {**CENTRAL, "mask": "permutation", "points": "labels"}),
    (Hidden, {**CENTRAL, "mask": "permutation", "points": "auto"}),
    (IFCA, {"k": 3, "mask": "permutation", "aggregation": "secagg", "cohort_size": 0}),
]


@pytest.mark.parametrize(("protocol", "options"), OPTIONS, ids=str)
def test_a_stopped_run_goes_on_with_what_it_kept(
    protocol: type[Any], options: dict[str, Any], small: Federation, tmp_path: Path
) -> None:
    params = {"model": "linear", "epochs": 1, **options}
    check_resume(example(partial(cases.build, protocol, **params), small), tmp_path / "run")

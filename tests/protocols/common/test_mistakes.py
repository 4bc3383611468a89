"""Mistakes that newcomers made in Python: each answer says what to do."""

from __future__ import annotations

import pydoc
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from securecluster import CFL, FedAvg, Federation
from securecluster.errors import SecureClusterWarning, UsageError

DRAW = np.random.default_rng(0)
TABLE = pd.DataFrame(DRAW.normal(size=(240, 2)), columns=["a", "b"]).assign(
    site=np.repeat(["old east", "old west", "new"], 80), label=["no"] * 228 + ["yes"] * 12
)


def federation(**changes: Any) -> Federation:
    return Federation.from_frame(
        TABLE.assign(**changes), client="site", label="label", test=0.25, seed=0
    )


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda: FedAvg(epsilon=3.0), "did you mean 'target_epsilon'"),
        (lambda: FedAvg().set_params(round=3), "did you mean 'rounds'"),
        (lambda: FedAvg().fit("patients.csv"), "from_csv"),  # type: ignore[arg-type]
        (lambda: Federation.simulate(clients=4.5, seed=0), "a whole number from 2"),  # type: ignore[arg-type]
        (
            lambda: Federation.from_frame("a.csv", client="site", label="label", seed=0),
            "from_csv reads files",
        ),
        (
            lambda: Federation.from_frame(
                TABLE, client="site", label="label", task="regression", seed=0
            ),
            "choose a label of numbers, or leave the task out",
        ),
        (
            lambda: Federation.from_arrays({"a": {"x": 1}, "b": {"x": 2}}, seed=0),
            "not dict: give the features and the labels apart",
        ),
        (lambda: federation().select(["west"]), "did you mean 'old west'"),
    ],
)
def test_a_mistake_says_what_to_do(mistake: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        mistake()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"label": np.arange(240) % 23 % 12}, None),
        ({"label": [*(np.arange(239) % 11), 11]}, "12 different labels, and 1 has the rarest"),
    ],
)
def test_numbers_of_things_are_doubted_as_classes(
    changes: dict[str, Any], sentence: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    federation(**changes)
    said = [str(warning.message) for warning in recwarn]
    assert not said if sentence is None else any(sentence in text for text in said)


def test_a_client_for_each_row_is_asked_about() -> None:
    with pytest.warns(SecureClusterWarning, match="does another column name the clients"):
        Federation.from_frame(
            TABLE.head(60).assign(site=range(60), label=["no", "yes"] * 30),
            client="site",
            label="label",
            seed=0,
        )


def test_a_class_that_no_model_answers_is_named() -> None:
    rare = federation(site=["x", "y", "z"] * 80, label=["no"] * 216 + ["yes"] * 24)
    with pytest.warns(SecureClusterWarning, match=r"ever answers yes \(\d\), of which there"):
        FedAvg(rounds=30, model="linear").fit(rare)
    few_rounds = FedAvg(rounds=2, model="linear").fit(rare)
    assert few_rounds.warning_ is None


def test_help_names_what_is_done_with_a_result() -> None:
    text = pydoc.plain(pydoc.render_doc(CFL))
    for name in ("predict_samples", "module_of", "export", "to_frame", "join"):
        assert f" {name}: " in text
    assert "kept_: Return" not in text

"""The best round of each client, by its own validation samples, against all rounds' models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from securecluster import Federation, at
from securecluster.errors import UsageError
from securecluster.parties.endpoints import build_client
from securecluster.protocols import FedAvg, Settings
from securecluster.statements.result_json import Subject, result_of

EXACT = Settings(dtype="float64", transcript="full")
# a rate at which rounds are better and worse, in turn
OPTIONS: dict[str, Any] = {
    "rounds": 6, "epochs": 1, "batch_size": 10, "lr": 3.0, "model": "linear", "keep_best": 0.3,
}  # fmt: skip


def models_of_rounds(small: Federation) -> list[dict[str, torch.Tensor]]:
    """Return the shared model after each number of rounds, by runs of that length."""
    client = build_client(FedAvg(**OPTIONS), small, EXACT).client
    models = [client.cohort.model.state_dict(client.cohort.start)]
    for rounds in range(1, OPTIONS["rounds"] + 1):
        models.append(FedAvg(**{**OPTIONS, "rounds": rounds}).fit(small, EXACT).models_[0])
    return models


def test_each_client_ends_with_its_best_round(small: Federation) -> None:
    found = FedAvg(**OPTIONS).fit(small, EXACT)
    models = models_of_rounds(small)
    aside = build_client(FedAvg(**OPTIONS), small, EXACT).client.cohort._aside_on
    best = []
    for k in range(len(small)):
        own = slice(int(aside.offsets[k]), int(aside.offsets[k + 1]))
        assert own.stop - own.start == 12
        losses = []
        for state in models:
            weight, bias = state.values()
            outputs = aside.x[own].flatten(1) @ weight.T + bias
            losses.append(float(nn.functional.cross_entropy(outputs, aside.y[own])))
        best.append(int(np.argmin(losses)))
        for value, known in zip(
            found.model_of(at(k)).values(), models[best[k]].values(), strict=True
        ):
            torch.testing.assert_close(value, known, rtol=0, atol=1e-12)
    assert min(best) < OPTIONS["rounds"]  # not merely the last
    # the cluster's model is the last one
    for value, known in zip(found.models_[0].values(), models[-1].values(), strict=True):
        assert torch.equal(value, known)
    assert "chose the best" in str(result_of(Subject.of(small), found.result_))


def test_nobody_is_told(small: Federation) -> None:
    private = {"clip": 1.0, "noise": 0.7, "dp_unit": "client"}
    found = FedAvg(**OPTIONS, **private).fit(small, EXACT)
    plain = FedAvg(**{**OPTIONS, "keep_best": 0.0}, **private).fit(small, EXACT)
    assert found.ledger_.epsilon == plain.ledger_.epsilon
    assert found.bytes_ == plain.bytes_


def test_a_share_of_all_is_refused(small: Federation) -> None:
    with pytest.raises(UsageError, match="keep_best"):
        FedAvg(**{**OPTIONS, "keep_best": 1.0}).fit(small)

"""Runs that look for clusters and end with one, or with one a client, say what fell short of what,
however few rounds they have.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from securecluster import Federation, Iid, LabelSwap
from securecluster.protocols import (
    CFL,
    FLHC,
    IFCA,
    NSIM,
    SRFCA,
    FedAvg,
    Hidden,
    Local,
    OneShot,
    Settings,
    Signature,
)
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.nsim.protocol import NSIMState

SHORT: dict[str, Any] = {"rounds": 3, "model": "linear", "epochs": 1}
GRADIENT: dict[str, Any] = {"signature": "gradient"}
FLHC_SHORT: dict[str, Any] = {**SHORT, "pre_rounds": 1}
SRFCA_SHORT: dict[str, Any] = {**SHORT, "local_rounds": 2}
NUMBER = r"-?[\d.e+-]+"
# method, and what it says of twelve clients of one group, whose truth nobody knows
CASES: dict[str, tuple[Any, str]] = {
    "signature": (
        Signature(**SHORT),
        f"squared distances of signatures rise .* at most {NUMBER}, and clusters need 1.27",
    ),
    "signature with noise": (
        Signature(**SHORT, signature_noise=3.0),
        f"information criterion .* is {NUMBER} at least, and they need less than {NUMBER}",
    ),
    "sketches": (
        Signature(**SHORT, signature_noise=1.0, signature_blocks="plain"),
        f"largest singular value of signatures is {NUMBER}, and clusters need more than {NUMBER}",
    ),
    "blocks": (
        Signature(**SHORT, signature_noise=0.5, signature_blocks="blocks"),
        f"signatures are {NUMBER} standard deviations of the noise apart, and clusters need",
    ),
    "cfl, few rounds": (
        CFL(**SHORT),
        f"never shorter than {NUMBER} of the longest, and .* shorter than 0.5 .eps1.",
    ),
    "cfl, norms": (
        CFL(**SHORT, criterion="absolute", eps1=1e-9),
        f"never shorter than {NUMBER}, and .* shorter than 1e-09 .eps1.",
    ),
    "cfl, settled": (
        CFL(**SHORT, eps1=1.0, eps2=10.0),
        f"at most {NUMBER} of the longest of any round, and clients pull apart above 10 .eps2.",
    ),
    "cfl, chance": (
        CFL(**SHORT, eps1=1.0, level=1e-9, gamma_max=0.0),
        f"as separated with a probability of {NUMBER}, and a split needs 1e-09 .level.",
    ),
    "cfl, few clients": (CFL(**SHORT, min_size=13), "12 clients are fewer than min_size 13"),
    "cfl of signatures": (CFL(**SHORT, **GRADIENT), "squared distances of signatures rise"),
    "flhc": (
        FLHC(**FLHC_SHORT),
        f"distances rise .* by a factor of at most {NUMBER}, and clusters need 1.4",
    ),
    "flhc, threshold": (
        FLHC(**FLHC_SHORT, threshold=1e9),
        f"merges are at distances of {NUMBER} to {NUMBER}, and those up to 1e.09 .threshold.",
    ),
    "srfca": (
        SRFCA(**SRFCA_SHORT),
        "no cut of the models has sides further apart|explained better",
    ),
    "oneshot": (
        OneShot(**SHORT),
        f"angles of dissimilarity rise .* at most {NUMBER}, and clusters need 0.26",
    ),
    "oneshot, height": (
        OneShot(**SHORT, height=1.0),
        f"merges are at distances of {NUMBER} to {NUMBER}, and those up to 1 .height.",
    ),
}


def digits(shift: Any, clients: int = 12, samples: int = 80) -> Federation:
    return Federation.simulate("digits", scenario=shift, clients=clients, samples=samples, seed=0)


@pytest.fixture(scope="module")
def one_group() -> Federation:
    return replace(digits(Iid()), truth=None)


def said_by(method: Any, federation: Federation) -> str | None:
    warning: str | None = method.fit(federation, Settings(keys_from_seed=True)).warning_
    return warning


@pytest.mark.parametrize("name", CASES)
def test_one_cluster_is_said_with_what_fell_short(name: str, one_group: Federation) -> None:
    method, shortfall = CASES[name]
    said = said_by(method, one_group)
    assert said is not None and "one cluster was found of all 12 clients: " in said
    assert re.search(shortfall, said), said
    # nothing is wrong where the group is known to be one
    known = replace(one_group, truth=(0,) * 12)
    assert "one cluster" not in str(said_by(method, known))


@pytest.mark.parametrize(
    ("method", "shortfall"),
    [
        (FLHC(**FLHC_SHORT, threshold=1e-9), "those up to 1e-09 (threshold) were made"),
        (OneShot(**SHORT, height=0.0), "those up to 0 (height) were made"),
    ],
)
def test_one_cluster_a_client_is_said(method: Any, shortfall: str) -> None:
    said = said_by(method, digits(LabelSwap(4)))
    assert said is not None and "each of the 12 clients is a cluster of its own: " in said
    assert shortfall in said


def test_one_cluster_of_a_given_number_says_why() -> None:
    federation = digits(LabelSwap(4))
    dissolved = said_by(Hidden(**SHORT, minimum_size=12, k=2), federation)
    assert "of all 12 clients, in place of 2: other centres had surely fewer than 12" in str(
        dissolved
    )


def test_models_that_nobody_takes_are_counted() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(20, 4)), np.arange(20) % 2
    federation = Federation.from_arrays(dict.fromkeys("abcd", (x, y)), seed=0)
    together = said_by(IFCA(**SHORT, k=2, starts=1), federation)
    assert "in place of 2: by their losses, clients share 1 of the 2 models" in str(together)


def test_a_threshold_of_models_is_said_beside_their_edges() -> None:
    method = SRFCA(**SRFCA_SHORT, threshold=1e9)
    with pytest.warns(UserWarning, match="one cluster"):
        said = said_by(method, digits(LabelSwap(4)))
    assert re.search(f"models within λ = 1e.09 are joined, and .* {NUMBER} to", str(said))


def test_users_who_are_alike_are_said_beside_their_neighbourhood() -> None:
    similarity = torch.tensor([[1.0, 0.75, 0.5], [0.75, 1.0, 0.5], [0.5, 0.5, 1.0]])
    outbox = PendingUpdates.start(3, fresh=False)
    state = NSIMState([0, 0, 0], outbox, ids=[0, 1, 2], similarity=similarity, eps=0.6)
    assert state.shortfall(NSIM(), []) == (
        "users are neighbours up to 0.6 (eps) of 1 - similarity, which is predicted as 0.25 to 0.5"
    )


@pytest.mark.parametrize(
    "method", [FedAvg(**SHORT), Local(**SHORT), Signature(**SHORT, k=1), OneShot(**SHORT, tasks=1)]
)
def test_nothing_is_said_where_this_was_asked_for(method: Any) -> None:
    assert said_by(method, digits(LabelSwap(4))) is None

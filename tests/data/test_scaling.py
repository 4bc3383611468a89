"""Features on scales that are chosen before a run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from securecluster import Federation
from securecluster.data.scaling import Scaling, chosen_scaling, scaling_options
from securecluster.errors import SecureClusterWarning, UsageError

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(50, 3)) * [1, 30, 1000] + [0, 50, -2000]
Y = np.arange(50) % 2
CLIENTS = {"ann": (X, Y), "bob": (3 * X + 7, Y)}
TEST = {"ann": (X[:5] - 1, Y[:5]), "bob": (X[:5], Y[:5])}


def made(**more: Any) -> Federation:
    return Federation.from_arrays(CLIENTS, seed=0, **{"test": TEST, **more})


def test_each_client_standardises_by_its_own_training_samples() -> None:
    federation = made(scaling="client")
    for name, shard in zip(federation.names, federation.shards, strict=True):
        scaler = StandardScaler().fit(CLIENTS[name][0])
        expected = scaler.transform(CLIENTS[name][0])
        assert np.allclose(shard.x, expected, atol=1e-5) and shard.x.dtype == np.float32
        assert np.allclose(shard.x_test, scaler.transform(TEST[name][0]), atol=1e-5)
    # that the second client is shifted, and on another scale, can no longer be told
    first, second = federation.shards
    assert np.allclose(first.x, second.x, atol=1e-5)
    assert federation.facts.scaling == {"kind": "client"}


def test_what_a_client_holds_out_has_no_part_in_its_scale() -> None:
    federation = Federation.from_arrays(CLIENTS, scaling="client", seed=0)
    plain = Federation.from_arrays({"ann": (X / 1000, Y)}, seed=0)
    scaler = StandardScaler().fit(plain.shards[0].x)
    expected = scaler.transform(plain.shards[0].x_test)
    assert np.allclose(federation.shards[0].x_test, expected, atol=1e-3)


BOUNDS = {"age": (-3, 3), "weight": (-100, 300), "dose": (-6000, 4000)}


def test_bounds_by_column_become_one_and_minus_one() -> None:
    pandas = pytest.importorskip("pandas")
    columns = ["age", "weight", "dose"]
    tables = {"ann": (pandas.DataFrame(X, columns=columns), Y)}
    with pytest.warns(SecureClusterWarning, match="root mean square"):
        plain = Federation.from_arrays(tables, seed=0)
    federation = Federation.from_arrays(tables, scaling=BOUNDS, seed=0)
    low, high = np.transpose([BOUNDS[name] for name in columns])
    scaler = MinMaxScaler((-1, 1)).fit([low, high])
    assert np.allclose(federation.shards[0].x, scaler.transform(plain.shards[0].x), atol=1e-5)
    assert federation.facts.scaling == {
        "kind": "bounds",
        "low": low.tolist(),
        "high": high.tolist(),
    }
    turned = federation.with_features(columns[::-1])
    again = {name: BOUNDS[name] for name in columns[::-1]}
    swapped = {"ann": (tables["ann"][0][columns[::-1]], Y)}
    expected = Federation.from_arrays(swapped, scaling=again, seed=0)
    assert turned.digest() == expected.digest() and turned.facts == expected.facts
    assert turned.shards[0].scale == expected.shards[0].scale


def test_values_beyond_the_bounds_are_cut_off_with_a_warning() -> None:
    said = "values in columns 0, 2 lie beyond the bounds, and are cut off there: 101 of them"
    arrays = {"ann": (np.where(np.arange(3) == 1, 0, X), Y), "bob": (np.zeros((5, 3)), Y[:5])}
    outside = int((np.abs(arrays["ann"][0]) > 0.5).sum())
    with pytest.warns(SecureClusterWarning, match=said.replace("101", str(outside))):
        federation = Federation.from_arrays(arrays, scaling=(-0.5, 0.5), seed=0)
    assert np.abs(federation.shards[0].x).max() == 1
    assert np.abs(federation.shards[1].x).max() == 0


def test_images_have_one_scale() -> None:
    images = DRAW.integers(0, 256, (20, 1, 4, 4))
    clients = {"ann": (images, Y[:20])}
    bounded = Federation.from_arrays(clients, scaling=(0, 255), seed=0).shards[0]
    assert np.allclose(
        np.sort(np.r_[bounded.x, bounded.x_test].ravel()), np.sort(images.ravel()) / 127.5 - 1
    )
    own = Federation.from_arrays(clients, scaling="client", seed=0).shards[0]
    assert abs(own.x.mean()) < 1e-6 and abs(own.x.std() - 1) < 1e-6


def test_a_constant_feature_stays_finite() -> None:
    federation = Federation.from_arrays(
        {"ann": (np.ones((10, 2)), Y[:10])}, scaling="client", seed=0
    )
    assert np.abs(federation.shards[0].x).max() == 0


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        ("auto", "give 'none', 'client', bounds"),
        ((3, 1), "are 3 and 1: the first is the lower"),
        ((1, np.inf), "the first is the lower"),
        (5, r"a pair \(low, high\), not 5"),
        ({0: (0, 1)}, "bounds lack 1, 2: give a pair for each feature"),
        ({0: (0, 1), 1: (0, 1), 2: (0, 1), 3: (0, 1)}, "bounds have 3 besides"),
        ({0: (0, 1), 1: "ab", 2: (0, 1)}, "bounds of column 1 are a pair"),
    ],
)
def test_what_is_no_scaling_is_refused(scaling: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        made(scaling=scaling)


def test_none_changes_nothing() -> None:
    with pytest.warns(SecureClusterWarning):
        assert made(scaling="none").digest() == made().digest()
    with pytest.warns(SecureClusterWarning):
        assert made().facts.scaling is None


@pytest.mark.parametrize(
    "scaling",
    [
        "client",
        (0.0, 255.0),
        {"a": (-1.5, 2.0), "b=c": (0.0, 1e9)},
        ("shared", {"a": (-1.5, 2.0)}),
        ("shared-quantiles", (0.0, 255.0)),
    ],
)
def test_options_of_the_command_line_say_the_same(scaling: Any) -> None:
    options = scaling_options(scaling)
    assert chosen_scaling(options["scaling"], options.get("bounds")) == scaling


@pytest.mark.parametrize(
    ("scaling", "bounds", "sentence"),
    [
        ("bounds", None, "scaling bounds needs public bounds"),
        ("client", ("0:1",), "bounds are for scaling='bounds', not client"),
        ("auto", None, "scaling='auto': give one of none, client, bounds"),
        (None, ("a=0",), r"bounds of column 'a' are a pair \(low, high\)"),
        (None, ("x",), "bounds of all features are a pair"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    scaling: str | None, bounds: tuple[str, ...] | None, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        chosen_scaling(scaling, bounds)


def test_a_scaling_is_read_as_it_was_told() -> None:
    for scaling in (Scaling("client"), Scaling("bounds", (0.0, 1.0), (2.0, 3.0))):
        assert Scaling.read(json.loads(json.dumps(scaling.as_json()))) == scaling
    assert Scaling.read(None) is None
    for wrong in ({"kind": "auto"}, {"kind": "bounds", "low": [1], "high": []}):
        with pytest.raises(ValueError, match="no scaling"):
            Scaling.read(wrong)

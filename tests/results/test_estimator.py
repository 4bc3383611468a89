"""A protocol as a scikit-learn classifier: cross-validation, searches, and its own checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from sklearn.datasets import load_wine
from sklearn.model_selection import (
    GridSearchCV,
    GroupKFold,
    StratifiedKFold,
    cross_val_predict,
    cross_val_score,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import _num_samples

from securecluster import IFCA, ClusteredClassifier, FedAvg, Local, Settings
from securecluster.errors import UsageError

FAST = {"model": "linear", "epochs": 3, "lr": 0.1}
TWO = {**FAST, "k": 2, "rounds": 8, "starts": 3, "start_rounds": 1}
SITES = 6


class Dealt(ClusteredClassifier):
    """Deals samples to two sites where none are given, as scikit-learn's checks give none."""

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:  # noqa: N803
        if groups is None and (hasattr(X, "__array__") or hasattr(X, "__len__")):
            groups = np.arange(_num_samples(X)) % 2
        return super().fit(X, y, groups)


def expected_failures(estimator: Any) -> dict[str, str]:
    return {"check_fit2d_1sample": "one sample is one site, and clustering needs two"}


# Every check of scikit-learn runs but the one above, and those that it skips by itself.
@parametrize_with_checks(
    [Dealt(FedAvg(rounds=5, mask="none", model="linear", lr=0.05))],
    expected_failed_checks=expected_failures,
)
@pytest.mark.filterwarnings("ignore::securecluster.errors.SecureClusterWarning")
def test_scikit_learn_s_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture
def routing() -> Iterator[None]:
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def wines() -> tuple[pd.DataFrame, Any, Any]:
    """Return wines by name of their kind, in six sites of which three swap two of the names."""
    X, numbers = load_wine(return_X_y=True, as_frame=True)
    X = (X - X.mean()) / X.std()
    sites = np.random.default_rng(0).permutation(len(X)) % SITES
    swapped = np.array([1, 0, 2])[numbers]
    numbers = np.where(sites % 2, swapped, numbers)
    return X, np.array(["barbera", "barolo", "grignolino"])[numbers], sites


def test_sites_of_the_fit_are_answered_by_their_own_models() -> None:
    X, y, sites = wines()
    made = ClusteredClassifier(IFCA(**TWO), random_state=0).fit(X, y, sites)
    assert made.classes_.tolist() == ["barbera", "barolo", "grignolino"]
    assert made.groups_.tolist() == [str(k) for k in range(SITES)]
    # the truth: sites of even and odd numbers
    assert len(set(made.protocol_.labels_[::2])) == len(set(made.protocol_.labels_[1::2])) == 1
    assert made.score(X, y, sites) > 0.95
    # without sites the two clusters contradict each other
    assert made.score(X, y) < 0.8
    shares = made.predict_proba(X, sites)
    for k in range(SITES):
        mine = sites == k
        module = made.protocol_.module_of(str(k))
        logits = module(tensor_of(X[mine])).detach().double().numpy()
        expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        np.testing.assert_allclose(shares[mine], expected, atol=1e-6)


def tensor_of(table: pd.DataFrame) -> torch.Tensor:
    return torch.tensor(table.to_numpy(np.float32))


def test_other_sites_are_answered_by_the_mean_of_the_clusters() -> None:
    X, y, sites = wines()
    made = ClusteredClassifier(IFCA(**TWO), random_state=0)
    made.fit(X[sites > 0], y[sites > 0], sites[sites > 0])
    new = X[sites == 0]
    shares = made.predict_proba(new, ["a new one"] * len(new))
    np.testing.assert_array_equal(shares, made.predict_proba(new))
    sizes = np.bincount(made.protocol_.labels_)
    expected = np.zeros_like(shares)
    for c, size in enumerate(sizes):
        logits = made.protocol_.module_of(cluster=c)(tensor_of(new)).detach().double().numpy()
        expected += size * np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(shares, expected / sizes.sum(), atol=1e-6)


@pytest.mark.usefixtures("routing")
def test_groups_reach_fits_scores_and_splits() -> None:
    X, y, sites = wines()
    made = ClusteredClassifier(IFCA(**TWO), random_state=0)
    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    seen = cross_val_score(made, X, y, params={"groups": sites}, cv=folds)
    assert seen.min() > 0.85
    unseen = cross_val_score(made, X, y, params={"groups": sites}, cv=GroupKFold(3))
    assert unseen.max() < 0.85 < seen.min()
    search = GridSearchCV(made, {"protocol__rounds": [4, 8], "protocol__k": [1, 2]}, cv=folds)
    search.fit(X, y, groups=sites)
    assert search.best_params_["protocol__k"] == 2 and search.best_score_ > 0.85
    assert search.score(X, y, groups=sites) > 0.95
    # the protocol that was given is not fitted itself
    assert made.protocol.k == 2 and "result_" not in vars(made.protocol)


@pytest.mark.usefixtures("routing")
def test_a_pipeline_hands_groups_on() -> None:
    X, y, sites = wines()
    made = make_pipeline(StandardScaler(), ClusteredClassifier(IFCA(**TWO), random_state=0))
    made.fit(100 * X, y, groups=sites)
    assert made.score(100 * X, y, groups=sites) > 0.95


def test_a_column_of_sites_needs_no_routing() -> None:
    X, y, sites = wines()
    table = X.assign(winery=[f"winery {k}" for k in sites])
    made = ClusteredClassifier(IFCA(**TWO), group_column="winery", random_state=0)
    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    assert cross_val_score(made, table, y, cv=folds, scoring="accuracy").min() > 0.85
    assert (cross_val_predict(made, table, y, cv=folds) == y).mean() > 0.85
    scores = cross_val_score(made, table, y, cv=GroupKFold(3), groups=sites)
    assert scores.max() < 0.85
    search = GridSearchCV(made, {"protocol__k": [1, 2]}, cv=folds).fit(table, y)
    assert search.best_params_ == {"protocol__k": 2}
    assert search.best_estimator_.feature_names_in_.tolist() == X.columns.tolist()
    with pytest.raises(UsageError, match="sites are given twice"):
        made.fit(table, y, groups=sites)
    with pytest.raises(UsageError, match="X has no column 'winery'"):
        made.fit(X, y)


def test_images_seeds_and_settings() -> None:
    generator = np.random.default_rng(0)
    X = generator.random((40, 1, 8, 8))
    y = generator.integers(0, 2, 40)
    sites = np.arange(40) % 4
    made = ClusteredClassifier(
        FedAvg(rounds=1, mask="none", model="cnn-briggs"), settings=Settings(dtype="float64")
    )
    seeded = [
        sklearn.clone(made).set_params(random_state=state).fit(X, y, sites).predict_proba(X)
        for state in (3, 3, np.random.RandomState(3), None)
    ]
    assert seeded[0].shape == (40, 2)
    np.testing.assert_array_equal(seeded[0], seeded[1])
    assert not np.allclose(seeded[0], seeded[2]) and not np.allclose(seeded[0], seeded[3])


def test_bad_input_is_refused_in_one_sentence() -> None:
    X, y, sites = wines()
    made = ClusteredClassifier(FedAvg(rounds=1, **FAST))
    with pytest.raises(UsageError, match="needs the site of each sample"):
        made.fit(X, y)
    with pytest.raises(UsageError, match=r"nan.* is no client's name"):
        made.fit(X, y, np.where(sites, sites, np.nan))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        made.fit(X, y, sites[:-1])
    made.fit(X, y, sites)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        made.predict(X, sites[:-1])
    private = Local(rounds=1, clip=1.0, noise=1.0, **FAST)
    alone = ClusteredClassifier(private, classes=np.unique(y)).fit(X, y, sites)
    assert len(alone.predict(X, sites)) == len(X)
    with pytest.raises(UsageError, match="no cluster shares a model, so only sites of the fit"):
        alone.predict(X)

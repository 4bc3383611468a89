"""A clustering protocol as a scikit-learn classifier, with a site for each sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from securecluster.core.client_names import name_of
from securecluster.data.federation import Federation
from securecluster.errors import UsageError
from securecluster.results.predictions import outputs_of, probabilities, read_samples
from securecluster.runtime.settings import Settings

SEEDS = 2**31 - 1
Shares = NDArray[np.float64]


class ClusteredClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classifier whose samples belong to sites, which a protocol clusters.

    Each site is a client, with all of its samples to train on. A site of the fit is answered by its
    own model. Any other sample is answered by the mean of the clusters' probabilities, weighted by
    their numbers of clients: no label says yet where a new site belongs.

    Sites are given as `groups`, which `fit`, `predict`, `predict_proba` and `score` request where
    scikit-learn routes metadata (`sklearn.set_config(enable_metadata_routing=True)`), or as a
    column of X.

    Args:
        protocol: with its hyper-parameters, which `protocol__rounds` and the like set; a copy of it
            is fitted.
        group_column: name of the column of X that has the sites, which is no feature; then X is a
            table, and groups are left out.
        classes: labels that are public, of which y may lack some; None takes those of y, which
            protocols with noise refuse.
        settings: of the run.
        random_state: seed of the run, or a `numpy.random.RandomState` that draws it; None takes
            one from the operating system.

    Attributes:
        protocol_: the fitted protocol, with `labels_`, `ledger_` and all else.
        classes_: the labels, (classes,).
        groups_: names of the sites, (m,), in the order of `protocol_.labels_`.
        n_features_in_: number of features, or of the first axis of a sample.
        feature_names_in_: names of the features, where X is a table.
    """

    # scikit-learn routes groups to these methods, unless the user says otherwise
    __metadata_request__fit: ClassVar[dict[str, bool]] = {"groups": True}
    __metadata_request__predict: ClassVar[dict[str, bool]] = {"groups": True}
    __metadata_request__predict_proba: ClassVar[dict[str, bool]] = {"groups": True}
    __metadata_request__score: ClassVar[dict[str, bool]] = {"groups": True}

    def __init__(
        self,
        protocol: Any,
        *,
        group_column: str | None = None,
        classes: Any = None,
        settings: Settings | None = None,
        random_state: Any = None,
    ) -> None:
        self.protocol = protocol
        self.group_column = group_column
        self.classes = classes
        self.settings = settings
        self.random_state = random_state

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:  # noqa: N803
        """Run the protocol on the sites.

        Args:
            X: n samples (n, …).
            y: their labels (n,), of any type.
            groups: the site of each sample (n,), text or numbers.

        Raises:
            UsageError: no sites, or a run that is not possible with them.
            ValueError: samples or labels that scikit-learn refuses.
        """
        X, names = self._separated(X, groups)
        X, y = validate_data(self, X, y, allow_nd=True)
        check_classification_targets(y)
        if names is None:
            raise UsageError(
                "a classifier of sites needs the site of each sample: fit(X, y, groups=sites), or "
                "group_column"
            )
        check_consistent_length(X, names)
        self.classes_ = np.unique(y if self.classes is None else self.classes)
        labels = self._numbered(y)
        self.groups_, members = np.unique(names, return_inverse=True)
        sites = {}
        held_out = {}
        for k, name in enumerate(self.groups_.tolist()):
            mine = members == k
            sites[name] = X[mine], labels[mine]
            # whoever cross-validates has held samples out already
            held_out[name] = X[:0], labels[:0]
        federation = Federation.from_arrays(
            sites, test=held_out, classes=len(self.classes_), seed=self._seed()
        )
        federation = replace(federation, classes_counted=self.classes is None)
        self.protocol_ = clone(self.protocol).fit(federation, self.settings)
        return self

    def predict(self, X: Any, groups: Any = None) -> NDArray[Any]:  # noqa: N803
        """Return the label of each sample, (n,).

        Args:
            X: n samples (n, …).
            groups: the site of each sample (n,); None knows none.
        """
        shares = self.predict_proba(X, groups)
        labels: NDArray[Any] = self.classes_[shares.argmax(1)]
        return labels

    def predict_proba(self, X: Any, groups: Any = None) -> Shares:  # noqa: N803
        """Return the probability of each label, (n, classes), in the order of `classes_`.

        Args:
            X: n samples (n, …).
            groups: the site of each sample (n,); None knows none.

        Raises:
            UsageError: samples of other sites, where no cluster shares a model.
        """
        check_is_fitted(self)
        X, names = self._separated(X, groups)
        X = validate_data(self, X, reset=False, allow_nd=True)
        if names is None:
            return self._by_clusters(X)
        check_consistent_length(X, names)
        shares = np.empty((len(X), len(self.classes_)))
        known = set(self.groups_.tolist())
        unknown = np.array([name not in known for name in names], bool)
        for name in known.intersection(names.tolist()):
            mine = names == name
            shares[mine] = self.protocol_.predict_proba(name, X[mine])
        if unknown.any():
            shares[unknown] = self._by_clusters(X[unknown])
        return shares

    def score(
        self,
        X: Any,  # noqa: N803
        y: Any,
        groups: Any = None,
        sample_weight: Any = None,
    ) -> float:
        """Return the accuracy.

        Args:
            X: n samples (n, …).
            y: their labels (n,).
            groups: the site of each sample (n,); None knows none.
            sample_weight: weight of each sample (n,); None weights all alike.
        """
        predicted = self.predict(X, groups)
        return float(accuracy_score(y, predicted, sample_weight=sample_weight))

    def _separated(self, X: Any, groups: Any) -> tuple[Any, NDArray[Any] | None]:  # noqa: N803
        """Return samples without the sites' column, and the name of each sample's site, if any."""
        if self.group_column is not None:
            if groups is not None:
                raise UsageError("sites are given twice: leave out groups, or group_column")
            if self.group_column not in getattr(X, "columns", ()):
                raise UsageError(
                    f"X has no column {self.group_column!r}, which group_column says has the sites"
                )
            groups = X[self.group_column]
            X = X.drop(columns=self.group_column)
        if groups is None:
            return X, None
        return X, np.array([name_of(site) for site in groups])

    def _by_clusters(self, X: NDArray[Any]) -> Shares:  # noqa: N803
        """Return the mean of the clusters' probabilities (n, classes), weighted by their clients.

        Raises:
            UsageError: no cluster shares a model.
        """
        run = self.protocol_
        sizes = np.bincount(run.labels_)
        shared = [c for c in range(len(sizes)) if c not in run.unshared_labels_]
        if not shared:
            raise UsageError(
                "no cluster shares a model, so only sites of the fit have predictions: give groups"
            )
        objective = run.network_.objective
        x = read_samples(X, run.kept_)
        total = np.zeros((len(X), len(self.classes_)))
        for c in shared:
            outputs = outputs_of(run.module_of(cluster=c), x)
            total += sizes[c] * probabilities(outputs, run.classes_, objective)
        mean: Shares = total / sizes[shared].sum()
        return mean

    def _numbered(self, y: Any) -> NDArray[np.int64]:
        """Return the position of each label (n,) among the classes.

        Raises:
            UsageError: a label that is none of the classes.
        """
        known = np.isin(y, self.classes_)
        if not known.all():
            label = y[~known][:1].tolist()[0]
            raise UsageError(f"label {label!r} is none of the classes: add it to classes")
        numbers: NDArray[np.int64] = np.searchsorted(self.classes_, y).astype(np.int64)
        return numbers

    def _seed(self) -> int:
        """Return the seed of the run."""
        if self.random_state is None:
            return int(np.random.default_rng().integers(SEEDS))
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(self.random_state.randint(SEEDS))

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn's checks may assume."""
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

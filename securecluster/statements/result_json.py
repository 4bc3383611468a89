"""The content of result.json, which says of a run what reports show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

import securecluster
from securecluster.clustering.metrics import mean, share_at
from securecluster.folders.run_folder import SCHEMA
from securecluster.folders.schemas import Result
from securecluster.models.objectives import Objective
from securecluster.parties.derived import CHOSEN
from securecluster.parties.labels import UNKNOWN_LABEL
from securecluster.results.declared import own_fields
from securecluster.statements.chance_warning import below_baseline
from securecluster.statements.privacy_section import section

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.results.fitted import FittedRun

NO_AGREEMENT = {"ari": None, "nmi": None, "purity": None, "exact": None}
Entries = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """Subject of a result: the clients, as far as whoever writes it knows them.

    Args:
        names: of the clients.
        seed: of the run.
        objective: what the networks are trained for.
        data: name of the data.
        scenario: how the clients differ.
        truth: each client's true cluster; None where nobody here knows it.
        observer: True if scores of all clients' data were computed outside the protocol.
    """

    names: tuple[str, ...]
    seed: int
    objective: Objective
    data: str = "the nodes' own data"
    scenario: str = "not known"
    truth: Sequence[Any] | None = None
    observer: bool = False

    @classmethod
    def of(cls, federation: Federation) -> Subject:
        """Return the subject of a run in one process.

        Args:
            federation: the clients and their data.
        """
        return cls(
            tuple(federation.names),
            federation.seed,
            federation.objective,
            federation.data,
            federation.scenario,
            federation.truth,
            observer=True,
        )


def result_of(subject: Subject, fitted: FittedRun) -> Result:
    """Return the content of result.json.

    The parameter tree of the server's final state, where it has one, gives each cluster's leaf
    (`leaves`), and the node whose model each cluster has at the end with the validation losses that
    decided it (`fallback`).

    Args:
        subject: the clients.
        fitted: the result of the run.
    """
    method = fitted.method
    learned = fitted.kept_.learned
    settings = learned.settings
    state = fitted.state_
    labels = [int(label) for label in fitted.labels_]
    truth = None
    if subject.truth is not None:
        truth = list(subject.truth)
    dropped = {}
    for client, rounds in fitted.dropped_.items():
        dropped[subject.names[client]] = rounds
    content = {
        **method.report_fields(state),
        "schema": SCHEMA,
        "protocol": method.name,
        "data": subject.data,
        "scenario": subject.scenario,
        "model": learned.config["model"],
        # where keys and noise follow from it, it stays in config.json
        "seed": None if settings.keys_from_seed else subject.seed,
        "device": fitted.device_,
        "version": securecluster.__version__,
        "clients": len(subject.names),
        "names": list(subject.names),
        "clusters": len(set(labels) - {UNKNOWN_LABEL}),
        "labels": labels,
        "truth": truth,
        "dropped": dropped,
        "rounds": method.rounds,
        "metrics": _metrics(settings.target, subject, fitted, labels),
        "metric": fitted.metric_,
        "unit": subject.objective.unit,
        "target": settings.target,
        **_nodes(state, max(labels) + 1),
        **_unseen(subject, fitted),
        "observer": subject.observer,
        "bytes": fitted.bytes_,
        "privacy": section(fitted),
        "seconds": round(fitted.seconds_, 3),
    }
    content |= stopped(fitted) | _of_packages(fitted)
    if learned.power is not None:
        content["power"] = learned.power
    # what a target chose, and names that the data came with, if any
    for name in (CHOSEN, "class_names", "feature_names"):
        if name in learned.config:
            content[name] = learned.config[name]
    if fitted.warning_ is not None:
        content["warning"] = fitted.warning_
    if fitted.refused_:
        content["refused"] = {
            subject.names[client]: codes for client, codes in fitted.refused_.items()
        }
    return cast(Result, content)


def stopped(fitted: FittedRun) -> Entries:
    """Return after which round a run was stopped, and why; nothing where it was not.

    Args:
        fitted: the result of the run.
    """
    stop = fitted.kept_.learned.stopped
    if stop is None:
        return {}
    return {"stopped": {"round": fitted.history_[-1]["round"], "reason": stop.reason}}


def _of_packages(fitted: FittedRun) -> Entries:
    """Return the report fields that packages declare; nothing where there are none."""
    fields = own_fields(fitted)
    return {"fields": fields} if fields else {}


def _unseen(subject: Subject, fitted: FittedRun) -> Entries:
    """Return the rounds of releases that nobody saw, by client; nothing where there are none."""
    rounds = fitted.ledger_.unseen()
    clients = enumerate(subject.names)  # newcomers are in no result
    by_name = {name: rounds[client] for client, name in clients if client in rounds}
    return {"never_seen": by_name} if by_name else {}


def _metrics(target: float, subject: Subject, fitted: FittedRun, labels: list[int]) -> Entries:
    """Return agreement with the true clusters, and the metric on test samples.

    Args:
        target: score that clients are to reach.
        subject: the clients.
        fitted: the result of the run.
        labels: each client's cluster, (m,).
    """
    at_target = None
    # a target is a score to reach; losses and errors have none
    has_scores = not np.isnan(fitted.scores_).all()
    if subject.objective.higher and (subject.observer or has_scores):
        at_target = share_at(fitted.scores_, target)
    return {
        **(fitted.agreement_ or NO_AGREEMENT),
        fitted.metric_: _scores(fitted, labels) | _baselines(fitted, labels),
        "at_target": at_target,
    }


def _nodes(state: Any, cluster_count: int) -> Entries:
    """Return the entries of result.json for a parameter tree; nothing where there is none.

    Args:
        state: the server's final state.
        cluster_count: number of clusters.
    """
    entries: Entries = {}
    tree = getattr(state, "tree", None)
    if tree is not None:
        entries["leaves"] = [tree.leaf(cluster) for cluster in range(cluster_count)]
    models = getattr(state, "fallback_models", None)
    if models is not None:
        entries["fallback"] = {"nodes": models.nodes, "losses": models.losses}
    return entries


def _scores(fitted: FittedRun, labels: list[int]) -> Entries:
    """Return the metric before the first clusters, at the end, and in each cluster at the end.

    Args:
        fitted: the result of the run.
        labels: each client's cluster, (m,).
    """
    return {
        "before": _score_before_clusters(fitted),
        "after": mean(fitted.scores_),
        "per_cluster": _means(fitted.scores_, labels),
    }


def _baselines(fitted: FittedRun, labels: list[int]) -> Entries:
    """Return the metric of answers that know each client's training targets alone.

    Args:
        fitted: the result of the run.
        labels: each client's cluster, (m,).

    Returns:
        Nothing where nobody measures it.
    """
    learned = fitted.kept_.learned
    baselines = np.asarray(learned.baselines, dtype=np.float64)
    if np.isnan(baselines).all():
        return {}
    return {
        "baseline": mean(baselines),
        "baseline_per_cluster": _means(baselines, labels),
        "below_baseline": [learned.names[k] for k in below_baseline(fitted)],
    }


def _means(values: NDArray[np.float64], labels: list[int]) -> list[float | None]:
    """Return the mean of each cluster's clients.

    Args:
        values: one a client, (m,).
        labels: each client's cluster, (m,).
    """
    cluster_of = np.asarray(labels)
    return [mean(values[cluster_of == cluster]) for cluster in range(max(labels) + 1)]


def _score_before_clusters(fitted: FittedRun) -> Any:
    """Return the metric of the last model that all clients shared; None where there is none.

    That is the metric in the round of the first split, else in the last round of one cluster.
    """
    metric = fitted.metric_
    for line in fitted.history_:
        if line.get("splits"):
            if line.get(metric) is not None:
                return line[metric]
            break  # that round was not evaluated
    before = None
    for line in fitted.history_:
        if line["clusters"] != 1:
            break
        before = line.get(metric)
    return before

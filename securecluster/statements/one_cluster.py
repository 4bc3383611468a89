"""Sentences on runs that look for clusters and end with one, or with one for each client.

Which statistic fell short of which bound is said by the method's state (`shortfall`), from what the
run released.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from securecluster.results.fitted import FittedRun

NUMBERS = ("k", "tasks")  # options that give the number of clusters
MORE = "try more samples for each client, more epochs or more rounds"


def looked_for_clusters(history: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a method looked for clusters, as its history says.

    Args:
        history: a line for each round.
    """
    return any(line.get("split_tests") or line.get("clustered") for line in history)


def one_or_all_note(fitted: FittedRun, truth: Sequence[int] | None) -> str | None:
    """Return a sentence on a run that looked for clusters and found one, or one for each client.

    Args:
        fitted: the result of the run.
        truth: the true clusters, where they are known.

    Returns:
        None of any other run, where this is the number that was asked for, and where it is right.
    """
    clients = len(fitted.labels_)
    count = len(set(fitted.labels_.tolist()))
    options = fitted.method.get_params()
    told = [options[name] for name in NUMBERS if options.get(name) is not None]
    right = truth is not None and len(set(truth)) == count
    if clients < 2 or count not in (1, clients) or right or count in told:
        return None
    shortfall = getattr(fitted.state_, "shortfall", None)
    why = shortfall and shortfall(fitted.method, fitted.history_)
    if not (why or looked_for_clusters(fitted.history_)):
        return None
    reason = f": {why}" if why else ""
    if count > 1:
        return (
            f"each of the {clients} clients is a cluster of its own{reason}; if some belong "
            f"together, {MORE}, or a protocol that is given the number of clusters, such as ifca"
        )
    if told:
        return (
            f"one cluster was found of all {clients} clients, in place of {told[0]}{reason}; if "
            f"there are more, {MORE}, or another seed"
        )
    return (
        f"one cluster was found of all {clients} clients{reason}; if there are more, {MORE}; a "
        "protocol that is given the number of clusters, such as ifca, needs fewer"
    )

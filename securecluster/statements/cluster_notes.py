"""Sentences that warn of clusters that a user should not trust, with advice.

They come from what the run released or evaluated. A run with noise adds no look at clients' data:
its sentences follow from labels, from the history, and from scores that it has in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.labels import members as clusters_of
from securecluster.core.lazy_torch import torch
from securecluster.core.option_groups import option_groups
from securecluster.errors import SecureClusterWarning
from securecluster.messaging.messages import Rows
from securecluster.parties.derived import adds_noise
from securecluster.parties.power_check import CARRIES, DOUBTFUL, DROWNED
from securecluster.results.fitted_state import UNTUNED
from securecluster.statements.cluster_differences import MOST_CLUSTERS, Gain, alike, clients_differ
from securecluster.statements.one_cluster import looked_for_clusters, one_or_all_note

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.results.fitted import FittedRun

FEW_A_CLASS = 5  # samples of a class that a client has; with fewer its updates are mostly chance
SMALL = 4  # clients; with few samples each, clusters that are smaller are mostly chance

Scores = NDArray[np.float64]
Scored = Callable[[Rows], Scores]
Tuned = Callable[[Rows], Rows]


def cluster_note(
    fitted: FittedRun, federation: Federation, scored: Scored, tuned: Tuned, trained: bool
) -> str | None:
    """Return a warning on the clusters of a run; None where there is nothing to say.

    Args:
        fitted: the result of the run.
        federation: the clients and their data.
        trained: whether the models are trained far enough to tell clusters by; otherwise only a run
            with one cluster, or one for each client, says so.
        scored: returns each client's score on its held-out samples, (m,), with its model of (m, d).
        tuned: returns each client's model, (m, d), after a round of training it alone.
    """
    if trained:
        text = _text(fitted, federation, scored, tuned)
    else:
        text = one_or_all_note(fitted, federation.truth)
        text = text and text + reason_of_noise(fitted, "clusters")
    if text is None:
        return None
    # with options as they are written here: in Python, or on the command line
    return str(SecureClusterWarning(text))


def _text(fitted: FittedRun, federation: Federation, scored: Scored, tuned: Tuned) -> str | None:
    """Return the sentence of `cluster_note`, with options as the command line has them."""
    # of methods whose state says how far the run's own clusters can be trusted
    doubt = getattr(fitted.state_, "doubt", None)
    text = None if doubt is None else doubt(fitted.method)
    if text is not None:
        return str(text)
    labels = fitted.labels_.tolist()
    count = len(set(labels))
    ceiling = _ceiling(fitted)
    if ceiling is not None and count >= ceiling:
        return (
            f"the number of clusters that is found stands at its ceiling of {ceiling}: there may "
            "be more; give it where it is known (--k)"
        )
    noisy = adds_noise(fitted.method, fitted.kept_.learned.config)
    if not federation.objective.higher:
        note = one_or_all_note(fitted, federation.truth)
        return note and note + reason_of_noise(fitted, "clusters")
    if count > 1:
        alone = one_or_all_note(fitted, federation.truth)
        if noisy:
            return _chance_clusters(fitted, federation, count) or alone
        return alone or _alike_text(fitted, federation, scored) or _lone_text(labels, federation)
    note = one_or_all_note(fitted, federation.truth)
    gain = None
    if looked_for_clusters(fitted.history_):
        gain = _gain_alone(fitted, scored, tuned, noisy)
    few = _reason(fitted, federation) if noisy else _few_samples(federation)
    return _one_cluster_text(len(labels), note, gain, few)


def _alike_text(fitted: FittedRun, federation: Federation, scored: Scored) -> str | None:
    """Return a sentence on two clusters of a run without noise that look like one, or None.

    Args:
        fitted: the result of the run.
        federation: the clients and their data.
        scored: as for `cluster_note`.
    """
    labels = fitted.labels_.tolist()
    if len(set(labels)) > min(MOST_CLUSTERS, len(labels) // 2):
        return None
    scores = np.stack([scored(_everywhere(model, len(labels))) for model in _models(fitted)])
    pair = alike(labels, scores)
    if pair is None:
        return None
    first, second, pair_gain = pair
    return (
        f"clusters {first} and {second} look like one: on held-out samples their clients score "
        f"{pair_gain.after:.3f} with the model of their own cluster and {pair_gain.before:.3f} "
        "with that of the other: a smaller number of clusters, or more samples for each client, "
        f"may do better{_few_samples(federation)}"
    )


def _lone_text(labels: list[int], federation: Federation) -> str | None:
    """Return a sentence on clients that are alone with few samples in a run without noise, or None.

    Their updates are mostly chance, by which they may be put apart from their cluster.

    Args:
        labels: of the clients.
        federation: the clients and their data.
    """
    if len(set(labels)) > len(labels) // 2:
        return None
    sizes = [len(shard.y) for shard in federation.shards]
    few = min(np.median(sizes) / 2, FEW_A_CLASS * federation.classes)
    lone = [members[0] for members in clusters_of(labels) if len(members) == 1]
    small = [client for client in lone if sizes[client] < few]
    if not small:
        return None
    names = ", ".join(f"{federation.names[client]} ({sizes[client]})" for client in small)
    return (
        f"few samples may be why a client is alone in its cluster: {names}, where the median "
        f"client has {np.median(sizes):.0f}: try its score with another cluster's model, or more "
        "samples"
    )


def _ceiling(fitted: FittedRun) -> int | None:
    """Return the largest number of clusters that the run could find; None where there is none."""
    config = fitted.kept_.learned.config
    ceilings = []
    for options in option_groups(fitted.method):
        ceiling = options.most_clusters(fitted.method, config)
        if ceiling is not None and ceiling < len(fitted.labels_):
            ceilings.append(ceiling)
    return min(ceilings, default=None)


def _gain_alone(fitted: FittedRun, scored: Scored, tuned: Tuned, noisy: bool) -> Gain | None:
    """Return the gain by training alone if it says that clients differ.

    Args:
        fitted: the result of the run.
        scored: as for `cluster_note`.
        tuned: as for `cluster_note`.
        noisy: whether the run adds noise, so that nothing more is read of clients' data.
    """
    if fitted.method.training.tuning(fitted.method):
        # both means are in the result in any case
        before = np.full(len(fitted.scores_), float(fitted.history_[-1][fitted.metric_]))
        return clients_differ(before, fitted.scores_)
    if noisy:
        return None
    return clients_differ(fitted.scores_, scored(tuned(fitted.client_models_)))


def _one_cluster_text(clients: int, note: str | None, gain: Gain | None, few: str) -> str | None:
    """Return the sentence on a run with one cluster.

    Args:
        clients: their number.
        note: the sentence on a run that looked for clusters and found one, or None.
        gain: by training alone, where it says that clients differ.
        few: a remark on few samples or on noise, or nothing.
    """
    if gain is not None:
        return (
            f"no split was found, so all {clients} clients are in one cluster, and they differ: "
            f"training alone raises their accuracy on held-out samples from {gain.before:.3f} to "
            f"{gain.after:.3f}; let each tune its model (--tune-rounds 3), try more samples or "
            f"rounds, or a protocol that is given the number of clusters, such as ifca{few}"
        )
    if note is None or not few:
        return note
    return f"{note}{few}"


def reason_of_noise(fitted: FittedRun, use: str) -> str:
    """Return what the power check says of noise as the reason why something was not found.

    Args:
        fitted: the result of the run.
        use: "clusters" or "training".

    Returns:
        The end of a sentence; nothing where noise is hardly the reason, or there is none.
    """
    reasons = {
        DROWNED: f"; noise is the likeliest reason, since the power check took {use} for lost",
        DOUBTFUL: f"; noise may be the reason: the power check was in doubt about {use}",
    }
    return reasons.get(_verdict(fitted, use), "")


def _verdict(fitted: FittedRun, use: str) -> str:
    """Return the verdict of the power check on a use; nothing where it has none."""
    power = fitted.kept_.learned.power
    return "" if power is None else str(power[use] or "")


def _reason(fitted: FittedRun, federation: Federation) -> str:
    """Return the likeliest reason why a run with noise found no clusters, from public quantities.

    Args:
        fitted: the result of the run.
        federation: the clients, of whose data the number of classes alone is read.
    """
    if _verdict(fitted, "clusters") != CARRIES:
        return reason_of_noise(fitted, "clusters")
    readable = "the power check took clusters for readable"
    public_samples = _public_samples(fitted, federation)
    if public_samples is None:
        return (
            f"; noise is hardly the reason, since {readable}: there may be no clusters, or too few "
            "samples to tell them"
        )
    of_classes, few = public_samples
    if few:
        return f"; too few samples are the likeliest reason ({of_classes}), since {readable}"
    return (
        f"; noise and samples are hardly the reason, since {readable}, and {of_classes}, mostly "
        "suffice: there may be no other clusters, or some that sparse samples (counts of words, "
        "say) or this method hardly show"
    )


def _public_samples(fitted: FittedRun, federation: Federation) -> tuple[str, bool] | None:
    """Return in words how many samples clients have, and whether they are few.

    Args:
        fitted: the result of a run with noise.
        federation: the clients, of whose data the number of classes alone is read.

    Returns:
        None where the run did not make numbers of samples public.
    """
    sizes = fitted.kept_.learned.config.get("sizes")
    if not sizes or not federation.classes:
        return None
    median = float(np.median(sizes))
    few = median < FEW_A_CLASS * federation.classes
    return f"{median:.0f} samples of {federation.classes} classes, a client's median", few


def _chance_clusters(fitted: FittedRun, federation: Federation, count: int) -> str | None:
    """Return a sentence on clusters that a run with noise has by chance; None where they may be
    right.

    Args:
        fitted: the result of the run.
        federation: the clients, of whose data the number of classes alone is read.
        count: of clusters.
    """
    if _verdict(fitted, "clusters") == DROWNED:
        return (
            f"the {count} clusters of this run are most likely of noise alone, since the power "
            "check took clusters for lost: try less noise, or what the power check says"
        )
    public_samples = _public_samples(fitted, federation)
    if public_samples is None or not public_samples[1] or count * SMALL <= len(fitted.labels_):
        return None
    return (
        f"the {count} clusters of this run have fewer than {SMALL} clients on average, and too few "
        f"samples are the likeliest reason ({public_samples[0]}): try more of them, or give the "
        "number of clusters where it is known (--k)"
    )


def _few_samples(federation: Federation) -> str:
    """Return a remark on few samples a client; nothing where there are enough.

    Args:
        federation: of a run without noise, whose clients' numbers of samples may be said.
    """
    if not federation.classes:
        return ""
    median = float(np.median([len(shard.y) for shard in federation.shards]))
    if median >= FEW_A_CLASS * federation.classes:
        return ""
    return (
        f"; {median:.0f} samples of {federation.classes} classes, a client's median, are few to "
        "read clusters from"
    )


def _models(fitted: FittedRun) -> list[torch.Tensor]:
    """Return the clusters' models before any tuning, (d,) each."""
    untuned = fitted.kept_.clients.extra.get(UNTUNED)
    if untuned is not None:
        return list(untuned)
    clusters = clusters_of(fitted.labels_.tolist())
    return [fitted.client_models_.row(members[0]) for members in clusters]


def _everywhere(model: torch.Tensor, clients: int) -> Rows:
    """Return one model of all clients, (m, d)."""
    return Rows(model[None], (0,) * clients)

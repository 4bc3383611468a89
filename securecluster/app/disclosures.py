"""Disclosures of a finished run: which fields reached which reader, and which files ε leaves out.

Everything here is derived from the ledger's events, the declarations of client methods, the
pipeline and what the run recorded, so that a report cannot say less than what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from securecluster.app.number_format import enumerated, times
from securecluster.privacy.dp.ledger import Event, Row
from securecluster.privacy.pipeline import Kind, Pipeline
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.serialization import (
    CLIENTS,
    LEARNED,
    MODELS,
    SHARED,
    FittedSummary,
)
from securecluster.runtime.endpoint import PAIRS, SUM, release_of

CLIENT = "client"  # the reader of what is sealed: other clients
READ_BY_SERVER = {
    SUM: " (the plain sum reads every reply)",
    PAIRS: " (the plain pairs read the rows)",
}
IN_CLEAR = "as they are: no mask covers them"
SHUFFLED = ("permutation", "signed-permutation")


@dataclass(frozen=True)
class Disclosure:
    """One field of one method's replies, as it reached its reader.

    Args:
        reader: "server", "lps" (the client's local parameter server) or "client" (only other
            clients can open it).
        mechanism: of the ledger: "exact", "gaussian" or "free".
        derived: whether it was made of earlier releases alone.
        masked: whether a mask covers it.
        central: whether the server that reads it adds its noise.
    """

    method: str
    field: str
    verb: str
    reader: str
    mechanism: str
    derived: bool
    masked: bool
    central: bool

    @property
    def name(self) -> str:
        """Return the field and its method."""
        return f"{self.field} of {self.method}"

    @property
    def noised(self) -> bool:
        """Return whether its reader sees it with noise only."""
        return self.mechanism == "gaussian" and not self.central

    @property
    def plain(self) -> bool:
        """Return whether its reader sees the exact values.

        They are neither masked nor noised, nor made of values that were.
        """
        return not self.masked and not self.noised and self.mechanism != "free"

    def sentence(self, shows: str) -> str:
        """Return what the reader saw of it, in words.

        Args:
            shows: what the run's mask leaves visible.
        """
        whose = "each of its clients" if self.reader == "lps" else "every client"
        reply = f"{self.field} of {whose} in every {self.method} call, {self._noise()}"
        if self.reader == CLIENT:
            return f"{reply}, sealed"
        also_read = READ_BY_SERVER.get(self.verb, "")
        if self.masked:
            return f"{reply}: {shows}{also_read}"
        if self.noised:
            return f"{reply}, unmasked{also_read}"
        return f"{reply}, {IN_CLEAR}{also_read}"

    def _noise(self) -> str:
        """Return in words how noise protects it."""
        if self.derived:
            return "made of earlier releases"
        if self.mechanism == "free":
            return "made of what is priced elsewhere, or public"
        if self.mechanism == "exact":
            return "without noise"
        if self.central:
            return "clipped, before the server adds its noise"
        return "with noise"


def disclosures(fitted: ClusteringProtocol) -> list[Disclosure]:
    """Return every private field of every reply of a run, in the order of the first such reply."""
    config = fitted.kept_.learned.config
    pipeline = fitted.with_fitted_params().pipeline(config)
    central = fitted.per_client and config["placement"] == "central"
    # these fields have noise of their own, which clients add
    noised_by_clients = set(fitted.multipliers(config))
    found: dict[Disclosure, None] = {}  # a set that keeps its order
    for event in fitted.ledger_.events:
        curated = central and event.mechanism == "gaussian"
        for name in event.fields:
            by_server = curated and name not in noised_by_clients
            found[_disclosure(fitted, pipeline, event, name, by_server)] = None
    return list(found)


def _disclosure(
    fitted: ClusteringProtocol, pipeline: Pipeline, event: Event, name: str, central: bool
) -> Disclosure:
    """Return one field of an event, with the protection that its method declares."""
    release = release_of(getattr(fitted.client, event.method))
    sealed = pipeline.seal is not None and name in release.sealed
    masked = False
    if name in release.through and not sealed:
        masked = any(stage.kind is Kind.MASK for stage in pipeline.of(name).stages)
    return Disclosure(
        method=event.method,
        field=name,
        verb=event.verb,
        reader=CLIENT if sealed else event.reader,
        mechanism=event.mechanism,
        derived=release.derived,
        masked=masked,
        central=central,
    )


def unseen(fitted: ClusteringProtocol, found: Sequence[Disclosure]) -> list[str]:
    """Return what the server did not see, as far as it follows from how replies left.

    Args:
        fitted: the protocol of the run.
        found: all disclosures of the run.
    """
    by_server = [field for field in found if field.reader == "server"]
    names_read = {field.name for field in by_server}
    hidden = [_hidden_from_server(field) for field in found if field.name not in names_read]
    if not by_server:
        return ["anything that depends on a client's data", *hidden]
    noised = _names(field for field in by_server if field.noised)
    if noised:
        hidden.append(f"{noised} without noise")
    if any(event.mechanism == "dp-sgd" for event in fitted.ledger_.events):
        hidden.append("what clients' training would have led to without its noise")
    masked = _names(field for field in by_server if field.masked)
    # a part of the model in the clear would tell where the rest is
    if masked and not fitted.client.clear:
        hidden.append(f"{_hidden_by_mask(fitted.mask)} in {masked}")
    return hidden or ["nothing is hidden from it: no mask, seal or noise covers what it read"]


def _hidden_by_mask(mask: str) -> str:
    if mask in SHUFFLED:
        return "which coordinate is which"
    return "single coordinates, which are mixed,"


def unprotected(found: Sequence[Disclosure]) -> list[str]:
    """Return what the server read without mask or noise.

    A client's data may follow from it.
    """
    plain = _names(field for field in found if field.reader == "server" and field.plain)
    if not plain:
        return []
    return [f"{plain} went without mask or noise: a client's data, or much of them, may follow"]


def _hidden_from_server(field: Disclosure) -> str:
    if field.reader == CLIENT:
        return f"{field.name}, which is sealed for other clients"
    return f"{field.name}, which only the client's local parameter server reads"


def _names(found: Iterable[Disclosure]) -> str:
    """Return the names of some disclosures, each once."""
    return ", ".join(dict.fromkeys(field.name for field in found))


def free(found: Sequence[Disclosure], rows: Sequence[Row]) -> list[str]:
    """Return why releases that the ledger has for free cost nothing."""
    derived = {field.name for field in found if field.derived}
    reasons = []
    for row in rows:
        if row.mechanism != "free":
            continue
        name = f"{row.field} of {row.method}"
        made = "made of what is priced elsewhere (other releases, training with noise), or public"
        if name in derived:
            made = "made of earlier releases"
        reasons.append(f"{name}, {times(row.count)}: {made}, so it costs nothing")
    return reasons


def uncovered(fitted: ClusteringProtocol) -> list[str]:
    """Return a sentence for everything that the run recorded and that ε does not cover.

    Each begins with the file that holds it.
    """
    learned = fitted.kept_.learned
    return [
        *_observed(fitted),
        *_transcript(fitted),
        *_models_without_noise(fitted),
        *_sample_counts(learned),
        "config.json: a digest of all clients' data, by which a guess of all of them can be "
        "checked",
        f"{CLIENTS}: every client's model, without noise where it was trained alone, and its keys: "
        "for its owner alone",
    ]


def _observed(fitted: ClusteringProtocol) -> list[str]:
    """Return what the observer computed from test samples, training data and true clusters."""
    metric = fitted.metric_
    observed = []
    if not np.isnan(fitted.scores_).all():
        files = f"result.json, history.jsonl, {LEARNED} and {metric}.png"
        scores = f"{files}: {metric} on clients' own test samples, without noise"
        if fitted.kept_.learned.local:
            scores += ", also of models that were trained alone"
        observed.append(scores)
    if fitted.agreement_ is not None:
        observed.append(
            "result.json, history.jsonl and pictures: the true clusters and agreement with them, "
            "which no server knows"
        )
    keys = _observed_keys(fitted)
    if keys:
        source = "made of clients' training data or true clusters, without noise"
        observed.append(f"history.jsonl and pictures: {', '.join(keys)}, {source}")
    return observed


def _models_without_noise(fitted: ClusteringProtocol) -> list[str]:
    labels = _shown_alone(fitted)
    if not labels:
        return []
    clusters = enumerated("cluster", labels)
    return [f"{MODELS}: the model of {clusters}, which one client trained alone, without noise"]


def _sample_counts(learned: FittedSummary) -> list[str]:
    if not learned.network.ledger.samples:
        return []
    files = LEARNED
    if "sizes" in learned.config:
        files = f"config.json, {LEARNED}"
    return [f"{files}: each client's number of samples"]


def _shown_alone(fitted: ClusteringProtocol) -> list[int]:
    """Return the clusters whose model in the results one client trained alone, without noise."""
    learned = fitted.kept_.learned
    if fitted.keeps_local_models(learned.config) or SHARED in fitted.kept_.clients.extra:
        return []
    # the results show each cluster by the model of its first client
    first: dict[int, int] = {}
    for client, label in enumerate(learned.labels):
        first.setdefault(label, client)
    return sorted(label for label, client in first.items() if client in learned.local)


def _observed_keys(fitted: ClusteringProtocol) -> list[str]:
    """Return the keys of the history that an observer computed from clients' data or the truth.

    The metric and ari are named apart from them.
    """
    keys: set[str] = set()
    for line in fitted.history_:
        keys.update(name for name, value in line.items() if value is not None)
    return sorted(name for name in keys if name == "gap" or name.endswith("_real"))


def _transcript(fitted: ClusteringProtocol) -> list[str]:
    """Return what a transcript shows beyond replies with their noise."""
    learned = fitted.kept_.learned
    mode = learned.settings.transcript
    if mode == "none":
        return []
    if mode == "sizes":
        return ["transcript/: who was asked and replied in which round, and how many bytes"]
    if learned.config["placement"] == "central" and fitted.per_client:
        raw = "the clipped updates that a trusted server reads before it adds noise"
        return [f"transcript/: {raw}, so that no epsilon covers it; it is for its owner alone"]
    return [
        "transcript/: every frame as its reader had it; epsilon covers replies, and not who was "
        "asked and replied in which round"
    ]

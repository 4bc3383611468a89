"""What the replies of a finished run showed to whom, and what its files hold that ε does not cover.

Everything here is derived from the ledger's events, the declarations of client methods, the
pipeline and what the run recorded, so that a report cannot say less than what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from securecluster.privacy.dp.ledger import Event, Row
from securecluster.privacy.pipeline import Kind, Pipeline
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.serialization import CLIENTS, LEARNED, MODELS, SHARED
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
        """Return whether its reader sees the exact values, neither masked nor noised nor made of
        what was.
        """
        return not self.masked and not self.noised and self.mechanism != "free"

    def sentence(self, shows: str) -> str:
        """Return what the reader saw of it, in words.

        Args:
            shows: what the run's mask leaves visible.
        """
        whose = "each of its clients" if self.reader == "lps" else "every client"
        read = "" if self.reader == CLIENT else READ_BY_SERVER.get(self.verb, "")
        seen = f": {shows}" if self.masked else ", unmasked" if self.noised else f", {IN_CLEAR}"
        if self.reader == CLIENT:
            seen = ", sealed"
        return f"{self.field} of {whose} in every {self.method} call, {self._noise()}{seen}{read}"

    def _noise(self) -> str:
        if self.derived:
            return "made of earlier releases"
        if self.mechanism == "free":
            return "made of what is priced elsewhere, or public"
        if self.mechanism == "exact":
            return "without noise"
        return "clipped, before the server adds its noise" if self.central else "with noise"


def disclosures(fitted: ClusteringProtocol) -> list[Disclosure]:
    """Return every private field of every reply of a run, in the order of the first such reply."""
    config = fitted.kept_.learned.config
    pipeline = fitted.with_fitted_params().pipeline(config)
    central = fitted.per_client and config["placement"] == "central"
    own = set(fitted.multipliers(config))
    found: dict[Disclosure, None] = {}
    for event in fitted.ledger_.events:
        for name in event.fields:
            curated = central and event.mechanism == "gaussian" and name not in own
            found[_disclosure(fitted, pipeline, event, name, curated)] = None
    return list(found)


def _disclosure(
    fitted: ClusteringProtocol, pipeline: Pipeline, event: Event, name: str, central: bool
) -> Disclosure:
    release = release_of(getattr(fitted.client, event.method))
    stages = pipeline.of(name).stages if name in release.through else ()
    sealed = pipeline.seal is not None and name in release.sealed
    return Disclosure(
        method=event.method,
        field=name,
        verb=event.verb,
        reader=CLIENT if sealed else event.reader,
        mechanism=event.mechanism,
        derived=release.derived,
        masked=not sealed and any(stage.kind is Kind.MASK for stage in stages),
        central=central,
    )


def unseen(fitted: ClusteringProtocol, found: Sequence[Disclosure]) -> list[str]:
    """Return what the server did not see, as far as it follows from how replies left.

    Args:
        fitted: the protocol of the run.
        found: all disclosures of the run.
    """
    mine = [own for own in found if own.reader == "server"]
    others = [own for own in found if own.reader != "server"]
    told = [
        _hidden_from_server(own) for own in others if own.name not in {each.name for each in mine}
    ]
    if not mine:
        return ["anything that depends on a client's data", *told]
    noised = _names(own for own in mine if own.noised)
    if noised:
        told.append(f"{noised} without noise")
    if any(event.mechanism == "dp-sgd" for event in fitted.ledger_.events):
        told.append("what clients' training would have led to without its noise")
    masked = _names(own for own in mine if own.masked)
    # else a part of the model in the clear tells where the rest is
    if masked and not fitted.client.clear:
        hidden = (
            "which coordinate is which"
            if fitted.mask in SHUFFLED
            else "single coordinates, which are mixed,"
        )
        told.append(f"{hidden} in {masked}")
    return told or ["nothing is hidden from it: no mask, seal or noise covers what it read"]


def unprotected(found: Sequence[Disclosure]) -> list[str]:
    """Return what the server read without mask or noise, so that a client's data may follow from
    it.
    """
    plain = _names(own for own in found if own.reader == "server" and own.plain)
    return (
        [f"{plain} went without mask or noise: a client's data, or much of them, may follow"]
        if plain
        else []
    )


def _hidden_from_server(own: Disclosure) -> str:
    if own.reader == CLIENT:
        return f"{own.name}, which is sealed for other clients"
    return f"{own.name}, which only the client's local parameter server reads"


def _names(found: Iterable[Disclosure]) -> str:
    """Return the names of some disclosures, each once."""
    return ", ".join(dict.fromkeys(own.name for own in found))


def free(found: Sequence[Disclosure], rows: Sequence[Row]) -> list[str]:
    """Return why releases that the ledger has for free cost nothing."""
    derived = {own.name for own in found if own.derived}
    told = []
    for row in rows:
        name = f"{row.field} of {row.method}"
        if row.mechanism != "free":
            continue
        made = "made of earlier releases"
        if name not in derived:
            made = (
                "made of what is priced elsewhere (other releases, training with noise), or public"
            )
        told.append(
            f"{name}, {'once' if row.count == 1 else f'{row.count} times'}: {made}, so it costs "
            "nothing"
        )
    return told


def uncovered(fitted: ClusteringProtocol) -> list[str]:
    """Return a sentence for everything that the run recorded and that ε does not cover, with the
    file that holds it.
    """
    learned, metric = fitted.kept_.learned, fitted.metric_
    found = []
    if not np.isnan(fitted.scores_).all():
        places = f"result.json, history.jsonl, {LEARNED} and {metric}.png"
        also = ", also of models that were trained alone" if learned.local else ""
        found.append(f"{places}: {metric} on clients' own test samples, without noise{also}")
    if fitted.agreement_ is not None:
        found.append(
            "result.json, history.jsonl and pictures: the true clusters and agreement with them, "
            "which no server knows"
        )
    looks = _looked_up(fitted)
    if looks:
        made = "made of clients' training data or true clusters, without noise"
        found.append(f"history.jsonl and pictures: {', '.join(looks)}, {made}")
    found += _transcript(fitted)
    alone = _shown_alone(fitted)
    if alone:
        which = ", ".join(map(str, alone[:20])) + (f" … ({len(alone)})" if len(alone) > 20 else "")
        word = "cluster" if len(alone) == 1 else "clusters"
        found.append(
            f"{MODELS}: the model of {word} {which}, which one client trained alone, without noise"
        )
    if learned.network.ledger.samples:
        places = f"config.json, {LEARNED}" if "sizes" in learned.config else LEARNED
        found.append(f"{places}: each client's number of samples")
    found.append(
        "config.json: a digest of all clients' data, by which a guess of all of them can be checked"
    )
    found.append(
        f"{CLIENTS}: every client's model, without noise where it was trained alone, and its keys: "
        "for its owner alone"
    )
    return found


def _shown_alone(fitted: ClusteringProtocol) -> list[int]:
    """Return the clusters whose model in the results is one that a client trained alone, without
    noise.
    """
    learned = fitted.kept_.learned
    if fitted.keeps_local_models(learned.config) or SHARED in fitted.kept_.clients.extra:
        return []
    first: dict[int, int] = {}
    for client, label in enumerate(learned.labels):
        first.setdefault(label, client)
    return sorted(label for label, client in first.items() if client in learned.local)


def _looked_up(fitted: ClusteringProtocol) -> list[str]:
    """Return the keys of the history that an observer computed from clients' data or the truth,
    beside the metric and ari.
    """
    keys = {name for line in fitted.history_ for name, value in line.items() if value is not None}
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

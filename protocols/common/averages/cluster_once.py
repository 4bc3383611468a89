"""Clustering once, by a signature that each client sends before any training, then FedAvg.

The server collects the signatures, clusters the clients, and averages within clusters in all
rounds. Newcomers send a signature under the mask of the others', and join the cluster that the
method assigns.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from securecluster.clustering.labels import largest
from securecluster.clustering.labels import members as clusters_of
from securecluster.clustering.noisy_rows import NoisyBlocks
from securecluster.core.lazy_torch import torch
from securecluster.core.option_groups import group, grouped
from securecluster.errors import UpdateError, UsageError
from securecluster.messaging.messages import Empty
from securecluster.parties.labels import check_numbering, checked_labels
from securecluster.privacy.masking.masks import build
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.averages import averaging
from securecluster.protocols.common.averages.pending_updates import PendingUpdates, flush
from securecluster.protocols.common.averages.sampling import TRIES
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.comparison import signature_collection
from securecluster.protocols.common.comparison.gradient_signatures import SignatureSender
from securecluster.protocols.common.disclosures import Disclosures
from securecluster.protocols.common.newcomers import check_newcomers
from securecluster.protocols.common.options.signature_options import (
    GRADIENT,
    GradientSignatureOptions,
)
from securecluster.runtime.endpoint import GATHER, message_types
from securecluster.runtime.run import Run

if TYPE_CHECKING:
    from securecluster.data.facts import Facts
    from securecluster.runtime.server_channel import ServerChannel

OWN = "own"


@dataclass(frozen=True)
class Signatures(signature_collection.Collected):
    """The signatures of a run's clients, and the clusters that follow from them."""

    labels: list[int]  # (m,) each client's cluster


@dataclass
class ClusterOnceState(averaging.AveragingState):
    """The state of the server's loop, with the signatures for newcomers."""

    signatures: Signatures | None = None

    def doubt(self, method: ClusteringProtocol) -> str | None:
        """Return a sentence where clients' shares of classes contradict the clusters."""
        return None if self.signatures is None else self.signatures.doubt(self.labels)

    def shortfall(self, method: Any, history: Any) -> str | None:
        """Return how far gradient signatures that are one cluster are from several; None of others.

        Args:
            method: the `ClusterOnce` of the run.
            history: of the run, which is not read.
        """
        if self.signatures is None or not method.signatures.by_gradients:
            return None
        return self.signatures.shortfall()


@dataclass(kw_only=True)
class ReplacedSignatures(GradientSignatureOptions):
    """Options of gradient signatures that replace a method's own."""

    choices: ClassVar[tuple[str, ...]] = (OWN, GRADIENT)
    offers_blocks: ClassVar[bool] = False  # `cluster` works on rows


@grouped
class ClusterOnce(ClusteringProtocol):
    """Base class of methods that cluster once and then average within clusters.

    A method defines `signature_method`, `cluster` and `assign_signatures`. Where it clusters rows
    by their distances, and its clients derive from `SignatureClient`, it can say so in
    `clusters_rows`: then `signature="gradient"` gives it private signatures in place of its own.
    """

    signatures: GradientSignatureOptions = group(ReplacedSignatures)
    signature: str = OWN
    """what clients are clustered by: own (what the method's clients send) or gradient (a private
    signature of about a kilobyte that each client sends once)
    """

    signature_method: ClassVar[Callable[..., Any] | None] = None
    """Client method that returns the signature: gathered, with `Empty` as query, and a reply of one
    tensor, which is named in `through`."""
    noises_signatures: ClassVar[bool] = True
    """Whether signatures are clipped, and get noise, as updates do."""
    clusters_rows: ClassVar[bool] = False
    """Whether `cluster` and `assign_signatures` work on any rows (r, q) that are alike within
    clusters."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Check that a class does not name its client method as the option is named.

        Raises:
            UsageError: `signature` is set to a method.
        """
        super().__init_subclass__(**keywords)
        if not isinstance(vars(cls).get("signature", OWN), str):
            raise UsageError(
                f"{cls.__name__}.signature is the option that says what clients are clustered by: "
                "name the client method `signature_method`"
            )

    @abstractmethod
    def cluster(self, signatures: torch.Tensor, seed: int) -> Sequence[int]:
        """Return the cluster of each signature, numbered from 0.

        Args:
            signatures: (r, ...) of the clients that replied, under one mask.
            seed: for clusterings that draw random numbers.

        Returns:
            (r,)
        """

    @abstractmethod
    def assign_signatures(
        self, newcomers: torch.Tensor, signatures: torch.Tensor, labels: Sequence[int]
    ) -> Sequence[int]:
        """Return the cluster of each newcomer.

        Args:
            newcomers: (n, ...) their signatures, under the mask of the run's.
            signatures: (r, ...) of the run's clients.
            labels: (r,) their clusters.

        Returns:
            (n,)
        """

    def run_server(self, net: ServerChannel, run: Run) -> ClusterOnceState:
        """Cluster the clients, then run FedAvg in each cluster.

        Args:
            net: client ids and the verbs by which the server calls clients.
            run: gives the numbers of rounds, and stores checkpoints and history.
        """
        signatures = run.once("cluster", partial(self._cluster_clients, net), Signatures)
        # Under fresh masks the server cannot add the averages that a silent client missed.
        outbox = PendingUpdates.start(len(net.clients), fresh=self.mask != "none")
        state = ClusterOnceState(signatures.labels, outbox, signatures)
        for t in run.rounds("train", state, self.rounds):
            averaging.average_clusters(net, state, self.participation, t)
            # The clusters never change again: one line of the history tells them.
            if t == 1:
                run.note(clustered=clusters_of(signatures.labels))
        flush(net, run, state)
        return state

    def _cluster_clients(self, net: ServerChannel) -> Signatures:
        """Collect signatures and cluster them; silent clients join the largest cluster.

        Raises:
            UpdateError: fewer than two clients sent a signature.
            UsageError: `cluster` returned labels that are none.
        """
        collected = self.collect_signatures(net, net.clients)
        rows = collected.rows
        seed = net.randomness.integer("server", "clusterer")
        # Authors write this function: what it returns is checked, and errors name it.
        name = f"{type(self).__name__}.cluster"
        labels = checked_labels(name, self.cluster(self._rows(rows, rows), seed), len(rows))
        check_numbering(name, labels)
        label_of = dict(zip(collected.ids, labels, strict=True))
        # A client without a signature needs a model, and most clients share this one.
        default = largest(labels)
        all_labels = [label_of.get(i, default) for i in net.clients]
        own = {
            field.name: getattr(collected, field.name) for field in dataclasses.fields(collected)
        }
        return Signatures(**own, labels=all_labels)

    def collect_signatures(
        self,
        net: ServerChannel,
        to: Sequence[int],
        run_signatures: signature_collection.Collected | None = None,
    ) -> signature_collection.Collected:
        """Return the signatures of clients, or of newcomers under the mask of the run's.

        Args:
            net: client ids and the verbs by which the server calls clients.
            to: the clients' numbers.
            run_signatures: the signatures of the run, for newcomers.

        Raises:
            UpdateError: fewer than two clients of the run sent a signature, or a newcomer does not
                reply.
        """
        if self.signatures.by_gradients:
            collected = signature_collection.collect_gradient_signatures(net, to, run_signatures)
        else:
            collected = self._collect_own(net, to, run_signatures)
        if run_signatures is None:
            check_enough(len(collected.ids))
        else:
            check_newcomers(to, collected.ids)
        return collected

    def _collect_own(
        self,
        net: ServerChannel,
        to: Sequence[int],
        run_signatures: signature_collection.Collected | None,
    ) -> signature_collection.Collected:
        """Return the method's own signatures."""
        step = None if run_signatures is None else run_signatures.step
        replies = net.gather(self._method(), Empty(), to=to, step=step, tries=TRIES)
        if not replies.ids:
            return signature_collection.Collected([], torch.zeros(0), replies.step)
        rows = getattr(replies.rows, self.signature_field).values.cpu()
        return signature_collection.Collected(list(replies.ids), rows, replies.step)

    def assign_newcomers(
        self, net: ServerChannel, state: ClusterOnceState, to: Sequence[int]
    ) -> list[int]:
        """Return the clusters of newcomers, from their signatures under the run's mask.

        Args:
            net: a channel to the newcomers.
            state: the final state of the run.
            to: the newcomers' numbers.

        Raises:
            UpdateError: a newcomer does not reply.
        """
        signatures = state.signatures
        assert signatures is not None
        collected = self.collect_signatures(net, to, signatures)
        rows = collected.rows
        labels = [signatures.labels[i] for i in signatures.ids]
        reference = signatures.rows
        assigned = self.assign_signatures(
            self._rows(rows, reference), self._rows(reference, reference), labels
        )
        name = f"{type(self).__name__}.assign_signatures"
        # No newcomer founds a cluster: it would have no model.
        clusters = checked_labels(name, assigned, len(rows), existing=max(labels) + 1)
        cluster_of = dict(zip(collected.ids, clusters, strict=True))
        return [cluster_of[i] for i in to]

    def _rows(self, rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """Return what `cluster` and `assign_signatures` get of signatures.

        Args:
            rows: (r, ...) as they were collected.
            reference: (m, ...) those of the run's clients.
        """
        if not self.signatures.by_gradients:
            return rows
        compared = signature_collection.comparable(rows, reference)
        assert not isinstance(compared, NoisyBlocks)
        return torch.from_numpy(compared.values)

    def _method(self) -> Callable[..., Any]:
        """Return the client method of the signature.

        Raises:
            UsageError: the class names none, or one that its clients do not have.
        """
        method = type(self).signature_method
        name = type(self).__name__
        if method is None:
            raise UsageError(
                f"{name} names no signature: set `signature_method` to the client method that "
                "returns what clients are clustered by"
            )
        release = getattr(method, "__release__", None)
        if release is None or GATHER not in release.via:
            raise UsageError(
                f"{name}.signature_method is no client method that can be gathered: decorate the "
                "method with @answers(GATHER, ...)"
            )
        if getattr(self.client, method.__name__, None) is None:
            raise UsageError(
                f"{name}.signature_method is {method.__qualname__}, which {self.client.__name__} "
                "lacks: set `client` to the class that has it"
            )
        return method

    @property
    def signature_field(self) -> str:
        """Return the name of the signature in its message.

        Raises:
            UsageError: the reply has no field, or several.
        """
        method = self._method()
        _, reply = message_types(self.client, method.__name__)
        names = [field.name for field in dataclasses.fields(reply)]
        if len(names) != 1:
            raise UsageError(
                f"{reply.__name__} has {len(names)} fields ({', '.join(names)}): a signature is "
                "one tensor"
            )
        return names[0]

    def signature_width(self, facts: Facts) -> int:
        """Return the length of a signature's last axis, along which it is masked.

        By default it is the number of values in a sample.

        Args:
            facts: of the clients and their data.
        """
        return int(np.prod(facts.shape))

    def shared_facts(self, facts: Facts) -> dict[str, Any]:
        """Add the length of signatures.

        Args:
            facts: of the clients and their data.
        """
        return {**super().shared_facts(facts), "width": self.signature_width(facts)}

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the length of signatures, as "width".

        Args:
            config: the run's configuration.
        """
        return {**super().frame_sizes(config), "width": int(config["width"])}

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """Return the stages of updates, and of signatures, whose mask has their own length.

        Args:
            config: the run's configuration.
        """
        updates = super().pipeline(config)
        if self.signatures.by_gradients:
            return updates
        mask = build(self.mask, config["width"])
        signatures = Pipeline(mask)
        if self.noises_signatures:
            signatures = Pipeline([*self.privacy.stages(config), *mask])
        fields = {**updates.fields, self.signature_field: signatures}
        return Pipeline(updates.stages, updates.seal, fields, updates.common)

    def disclosures(self) -> Disclosures:
        """Return what the server sees of all signatures together, and of averages."""
        views = self.signatures.views
        if not self.signatures.by_gradients:
            views = [f"norms and inner products of all clients' {self.signature_field}"]
        return Disclosures(
            server=[
                *views,
                "the clusters, and each client's cluster",
                *averaging.visible_sample_counts(weighted=not self.privacy.per_client),
            ],
            not_covered=self.signatures.assumptions(self.privacy),
        )

    def check(self, clients: int) -> None:
        """Check that gradient signatures can replace the method's own.

        Args:
            clients: m.

        Raises:
            UsageError: they cannot.
        """
        super().check(clients)
        if self.signatures.by_gradients:
            self._check_replaceable()

    def _check_replaceable(self) -> None:
        """Raise UsageError where gradient signatures cannot replace the method's own."""
        name = type(self).__name__
        if not self.clusters_rows:
            raise UsageError(
                f"{name} works on what its own clients send, and not on any rows: take signature "
                "own"
            )
        if not issubclass(self.client, SignatureSender):
            raise UsageError(
                f"{self.client.__name__} sends no gradient signatures: derive it from "
                "SignatureClient, or take signature own"
            )
        if self.signatures.signature_blocks == "blocks":
            raise UsageError(
                f"class blocks are compared pair by pair, and {name} clusters rows: take "
                "signature_blocks plain"
            )


def check_enough(replied: int) -> None:
    """Raise UpdateError unless two clients or more sent a signature.

    Args:
        replied: number of clients that did.
    """
    if replied < 2:
        raise UpdateError(
            f"{replied} client(s) sent a signature, and clustering needs two or more: run "
            "it anew, with another seed"
        )

"""Hidden assignment: clusters that clients find by noisy sums, and assign themselves to.

The server holds no update, no point and no label of a client. In four sums it learns the mean of
all clients' points, their leading directions, a small set of cells that describes them there, and
one step of Lloyd's algorithm (`clustering.noisy_centres`). Each client then takes the nearest
centre, and tells nobody. In every round it adds k blocks of d numbers to a sum: its update in the
block of its cluster, and zeros in the others. All clients receive all k averages, of which each
applies its own: a server that does not know a client's cluster cannot send it that one alone.

Noise that each of these sums has covers what a server could learn from it about one client, also
by subtracting two sums. No other number depends on data: points have norm 1, so that no clip norm
is to be chosen, and they are functions of the data and of a public sketch, without any training.

Fields of a sum may have a clip norm and noise of their own (`row_noises`), added by whichever party
adds that of updates. The sums of clustering divide their share of the budget by 1/z², and
clipped blocks are divided by sizes that follow from a noisy sum. Noise covers rows that are alone
in a block. Without it counts come first in secure sums (`common.counted_blocks`, `clustering`), and
small clusters are dissolved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np

from securecluster.clustering import label_maps, noisy_centres
from securecluster.clustering.labels import check_clusters
from securecluster.core.lazy_torch import torch
from securecluster.privacy.dp.gaussian_mechanism import Clip, RowNoise
from securecluster.privacy.pipeline import Kind, Stage
from securecluster.protections.registry import ADVISED
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.averages import counted_blocks
from securecluster.protocols.common.averages.blocks import BlockStage
from securecluster.protocols.common.disclosures import OfHiddenSums
from securecluster.protocols.common.options.privacy_options import LOCAL
from securecluster.protocols.common.options.sum_options import DEVIATIONS, ROUNDING, CountedSums
from securecluster.protocols.hidden import label_search
from securecluster.protocols.hidden.class_means import ClassMeans
from securecluster.protocols.hidden.client import BlockAverages, ClusterBlocks, HiddenClient
from securecluster.protocols.hidden.clustering import Centres, find_clusters
from securecluster.protocols.hidden.separation import separation_warning

# fields of the sums of clustering, in their order, with their shares of its budget
CLUSTERING = dict(zip(("point", "moments", "cells", "steps"), noisy_centres.SHARES, strict=True))
WITH_PARTS = dict(zip(("parts", *CLUSTERING), noisy_centres.SHARES_WITH_PARTS, strict=True))
# ways of finding clusters
MEANS, LABELS = "means", "labels"
QUIET_NETWORK = "linear"  # what model auto is under noise
# Numbers of a point per cluster. Fewer lose what rare classes tell, more add noise to the leading
# directions. Chosen by trial.
POINT_SIZE = 5


@dataclass
class Assigned:
    """The clients that have assigned themselves."""

    ids: list[int] = field(default_factory=list)


@dataclass
class HiddenState:
    """The state of the server's loop, as checkpoints store it."""

    labels: list[int]  # (m,) zeros: the server knows one cluster of all clients
    outbox: fl.PendingUpdates
    centres: Centres
    assigned: Assigned

    def doubt(self, method: Any) -> str | None:
        """Return a sentence if the clusters found are hardly told apart.

        Args:
            method: the `Hidden` of the run.
        """
        if self.centres.places:
            return label_search.labels_warning(
                self.centres, len(self.centres.places), method.privacy.noisy
            )
        return separation_warning(method, self)

    def shortfall(self, method: Any, history: Any) -> str:
        """Return how many places for clusters clients could choose from.

        Args:
            method: the `Hidden` of the run.
            history: of the run, which is not read.
        """
        offered = len(self.centres.sizes)
        if offered > 1:
            return f"all are nearest to one of {offered} centres"
        return (
            f"other centres had surely fewer than {method.minimum_size} clients (minimum_size), "
            "and were dissolved"
        )


@dataclass(kw_only=True)
class ClusteringNoise(fl.PrivacyOptions):
    """Options of differential privacy, with the noise of the sums of clustering."""

    def row_noises(self, method: Any, config: Mapping[str, Any]) -> dict[str, RowNoise]:
        """Return the noise of the sums of clustering, whose rows have norm 1."""
        if not (self.per_client and config["noise"]):
            return {}
        noise = float(config["noise"])
        return {name: RowNoise(1.0, noise * method.privacy_factor(name)) for name in method.shares}


@dataclass(kw_only=True)
class TrainingOfBlocks(fl.TrainingOptions):
    """Options of local training, whose default network depends on the noise."""

    def network(self, method: Any) -> Any:
        """Return the network, which is the linear one by default where updates have noise.

        Every number of an update has the same noise, so that a network with fewer loses less.

        Args:
            method: whose options they are.
        """
        from securecluster.models.architectures import AUTO  # which loads torch

        if method.model == AUTO and method.privacy.noisy:
            return QUIET_NETWORK
        return method.model


@dataclass(kw_only=True)
class SumsOfBlocks(CountedSums):
    """Options of sums of rows of clustering, and of blocks, one for each cluster."""

    other_than_plain: ClassVar[str] = (
        "secure sums of hidden without noise find centres by counts, and plain ones by sums"
    )

    def weights_updates(self, method: Any) -> bool:
        """Return whether updates are weighted by numbers of samples, which then go into sums.

        Sums of them by cluster tell how many samples of the sum's clients are in each: without
        noise, no exact number is sent that only tells clusters.
        """
        return not method.privacy.per_client and (method.exact_weights or not self.hide_replies)

    def check_sizes(self, method: Any, clients: int) -> None:
        """Check that there are clients for all blocks of a sum.

        Args:
            method: whose options they are.
            clients: m.

        Raises:
            UsageError: there are not, or a cohort has too few.
        """
        if not self.counts_first(method):
            return
        needed = self.least_cohort(method)
        if clients < needed:
            largest_k = clients // self.least_choosers
            more = "" if largest_k > 1 else " and more clients"
            raise fl.UsageError(
                f"{clients} clients do not fill {method.k} clusters of {self.least_choosers} "
                f"(least_choosers), and sums over fewer show single clients: take k = "
                f"{max(largest_k, 2)}{more}, or IFCA (ifca)"
            )
        if self.cohort_size and self.cohort_size < needed:
            raise fl.UsageError(
                f"cohort_size = {self.cohort_size} does not fill {method.k} clusters of "
                f"{self.least_choosers} clients: give {needed} or more, or leave it out"
            )

    def check_noise(self, method: Any, config: Mapping[str, Any], pipeline: fl.Pipeline) -> None:
        """Check that every sum has room for its noise."""
        noise = method.privacy.sum_noise(config)
        if noise is not None:
            width = pipeline.of("blocks").stages
            d = int(config["dimension"])
            for stage in width:
                if isinstance(stage, BlockStage):
                    d = stage.width(d)
            noise.plan(int(method.k) * d, config["clients"])

    def fields(self, method: Any, config: Mapping[str, Any]) -> dict[str, float]:
        """Add the rows of clustering."""
        fields = super().fields(method, config)
        noises = method.privacy.row_noises(method, config)
        for name in method.shares:
            fields[name] = ROUNDING
            if name in noises and config["placement"] == LOCAL:
                fields[name] += DEVIATIONS * noises[name].multiplier
        return fields


class HiddenObserver(fl.Observer):
    """The experimenter knows the clusters that clients keep to themselves."""

    @property
    def server_knows_labels(self) -> bool:
        """Return False: clients assign themselves."""
        return False

    def known_labels(self, client: Any, state: HiddenState) -> list[int]:
        """Return each client's cluster, which only the clients know.

        Clients that did not learn the centres count as members of the first cluster.

        Args:
            client: a `HiddenClient`.
            state: the server's state.
        """
        return [max(label, 0) for label in client.labels]

    def newcomer_labels(self, client: Any, state: HiddenState, labels: list[int]) -> list[int]:
        """Return the newcomers' clusters, which only they know.

        Args:
            client: the newcomers' `HiddenClient`.
            state: the server's state.
            labels: what the server knows.
        """
        return list(client.labels)

    def models_after_round(self, client: Any, state: HiddenState) -> fl.Rows:
        """Return the model each client would use after this round, (m, d).

        Args:
            client: a `HiddenClient`.
            state: the server's state.
        """
        positions = [k for k, label in enumerate(client.labels) if label >= 0]
        to = [client.cohort.ids[k] for k in positions]
        query = BlockAverages.of(state.outbox.message_for(to))
        averaged = client.advanced(positions, client.own_averages(query, positions))
        models: fl.Rows = client.held(averaged)
        return models

    def final_models(self, client: Any, state: HiddenState) -> fl.Rows:
        """Return the model that each client has at the end of the run, (m, d).

        Args:
            client: a `HiddenClient`.
            state: the server's state.
        """
        models: fl.Rows = client.held(client.models)
        return models


@fl.protocol
class Hidden(fl.ClusteringProtocol):
    """Clients find clusters by noisy sums, and assign themselves without telling anybody."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    training: fl.TrainingOptions = fl.group(TrainingOfBlocks)
    privacy: fl.PrivacyOptions = fl.group(ClusteringNoise)
    sums: SumsOfBlocks = fl.group(SumsOfBlocks)
    aggregation: str = ADVISED
    """how sums are formed: secagg (the server reads sums over two or more clients only) or plain
    (the server reads every reply and adds them, which hides no assignment from it: for trusted
    servers, and simulations)
    """
    k: int = 4
    """number of clusters"""
    signature_size: int | None = None
    """numbers of a client's point; None is five times the number of clusters"""
    cluster_share: Annotated[float, fl.Number(0, 1, low_in=False)] = 0.2
    """share of the run's privacy budget, as the sum of 1/z² over its releases, for the sums that
    find the clusters
    """
    points: Annotated[str, fl.OneOf("auto", MEANS, LABELS)] = MEANS
    """how clients find their cluster: means (sums of points, of class means), labels (a histogram
    of label maps, for clusters whose labels mean other things), or auto: with noise, labels where
    what was released shows such clusters, and means otherwise
    """
    residuals: bool = False
    """subtract from each client's point what its classes add to all clients' on average, by one
    more sum: for clients whose labels are skewed, and ε of 2 or more
    """
    exact_weights: bool = False
    """secure sums only: weight updates by clients' numbers of samples, whose exact sums by cluster
    the server then reads; by default every client counts the same
    """
    minimum_size: Annotated[int, fl.AtLeast(1)] = 2
    """clusters that are surely smaller are dissolved; in secure sums without noise, so are those of
    fewer than least_choosers
    """

    name: ClassVar[str] = "hidden"
    client: ClassVar[type[fl.TrainingClient]] = HiddenClient

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> HiddenState:
        """Find the centres, let clients assign themselves, and average k models.

        Args:
            net: client ids and the verbs by which the server calls clients.
            run: gives the numbers of rounds, and stores checkpoints and history.
        """
        m = len(net.clients)
        centres = run.once("cluster", partial(find_clusters, self, net), Centres)
        assigned = run.once("assign", partial(self._assign, net, centres, Assigned()), Assigned)
        outbox = fl.PendingUpdates.start(m, fresh=self.mask != "none")
        state = HiddenState([0] * m, outbox, centres, assigned)
        for t in run.rounds("train", state, self.rounds):
            self._average(net, state, t)
        state.outbox = run.once("deliver", partial(self._deliver, net, state), fl.PendingUpdates)
        return state

    def cells(self, config: Mapping[str, Any]) -> int:
        """Return the number of cells of the code book, which follows from the noise.

        Args:
            config: what clients and server agreed on.
        """
        clients = int(config["clients"])
        deviation = self.deviation(config, "cells", clients)
        return noisy_centres.cells_for(int(self.k), clients, deviation)

    def deviation(self, config: Mapping[str, Any], name: str, clients: int) -> float:
        """Return the standard deviation of the noise in each number of a sum.

        Args:
            config: what clients and server agreed on.
            name: of the field.
            clients: how many are in the sum.
        """
        noise = self.privacy.row_noises(self, config).get(name)
        if noise is None:
            return 0.0
        deviation = noise.norm * noise.multiplier
        # each client adds the noise of a whole release, and variances add up
        if config["placement"] == LOCAL:
            deviation *= math.sqrt(clients)
        return deviation

    def _assign(
        self, net: fl.ServerChannel, centres: Centres, before: Assigned, tries: int = fl.TRIES
    ) -> Assigned:
        """Tell clients the centres, and return those that have assigned themselves.

        Args:
            net: the server's channel.
            centres: public.
            before: clients that have assigned themselves already.
            tries: calls of a client that does not reply.
        """
        silent = tuple(i for i in net.clients if i not in set(before.ids))
        for _ in range(tries):
            if silent:
                silent = centres.assign(net, silent).lost
        unassigned = set(silent)
        return Assigned([i for i in net.clients if i not in unassigned])

    def _average(self, net: fl.ServerChannel, state: HiddenState, t: int) -> None:
        """Make a round of averaging in all clusters by one sum of blocks.

        Args:
            net: the server's channel.
            state: of the loop.
            t: the round's number.
        """
        members: Sequence[int] = state.assigned.ids
        if net.cohorts is not None:
            # A client without a cluster keeps its whole cohort out, so it is told again.
            state.assigned = self._assign(net, state.centres, state.assigned, tries=1)
            members = net.clients
        least_members = net.least_members
        sampled = fl.sample_clients(net, members, self.participation, t, minimum=least_members)
        assigned = set(state.assigned.ids)
        to = [i for i in sampled if i in assigned]
        query = BlockAverages.of(state.outbox.message_for(to))
        counts: list[int] = []
        if self.sums.counts_first(self):
            sums, counts = self._counted_blocks(net, state, query, to)
        else:
            sums = net.sum(HiddenClient.contribute_block, query, to=to)
            state.outbox.acknowledge(sums.ids)
        if not sums.ids:
            return
        weights = self._weights(state, sums, counts)
        blocks = sums.rows.blocks.table[0]
        # No client is in a block of weight 0.
        divisor = torch.where(weights > 0, weights, torch.ones_like(weights))
        means = blocks / divisor.to(blocks)[:, None]
        state.outbox.post(sums.step, means[None], state.labels)

    def _counted_blocks(
        self, net: fl.ServerChannel, state: HiddenState, query: BlockAverages, to: Sequence[int]
    ) -> tuple[fl.Sums[Any], list[int]]:
        """Return a sum of blocks, after a count of the clients in each, and the count.

        The count tells no client's cluster, since clients are counted by whole cohorts. A sum that
        lacks one of them is given up: the next round counts anew.

        Args:
            net: the server's channel.
            state: of the loop.
            query: averages that clients lack.
            to: the clients of this round.
        """
        counted = net.sum(HiddenClient.count_block, query, to=to)
        state.outbox.acknowledge(counted.ids)
        counts = counted_blocks.counts_of(counted) if counted.ids else None
        if counts is None:
            return fl.Sums((), None, (0,), (), counted.step), []
        filled = counted_blocks.FilledBlocks(
            **counted_blocks.filled_blocks(counted, counts, self.sums.least_choosers)
        )
        return net.sum(HiddenClient.contribute_counted, filled, to=counted.ids), counts

    def _weights(
        self, state: HiddenState, sums: fl.Sums[ClusterBlocks], counts: Sequence[int]
    ) -> torch.Tensor:
        """Return what each block of a sum is divided by, (k,).

        Where clients count the same, it is how many were counted; 0 for a block that too few fill.
        Without counts nobody tells how many are in a block: it is the number of clients in the sum,
        divided in proportion to the sizes that clustering has found.
        """
        if sums.rows.weight is not None:
            return sums.rows.weight.table[0]
        if counts:
            least_choosers = self.sums.least_choosers
            averaged = [float(count) if count >= least_choosers else 0.0 for count in counts]
            return torch.tensor(averaged, dtype=torch.float64)
        weights = torch.zeros(self.k, dtype=torch.float64)
        sizes = np.array(state.centres.sizes)
        expected = sums.counts[0] * sizes / sizes.sum()
        weights[: len(sizes)] = torch.as_tensor(np.maximum(expected, 1.0))
        return weights

    def _deliver(
        self, net: fl.ServerChannel, state: HiddenState, tries: int = 5
    ) -> fl.PendingUpdates:
        """Send the last averages to all clients that have a cluster."""
        outbox = state.outbox
        for _ in range(tries):
            waiting = set(outbox.lagging_clients())
            lagging = [i for i in state.assigned.ids if i in waiting]
            if not lagging:
                break
            query = BlockAverages.of(outbox.message_for(lagging))
            replies = net.gather(HiddenClient.receive_blocks, query, to=lagging)
            outbox.acknowledge(replies.ids)
        return outbox

    def assign_newcomers(
        self, net: fl.ServerChannel, state: HiddenState, to: Sequence[int]
    ) -> list[int]:
        """Tell newcomers the centres, to one of which each assigns itself.

        Args:
            net: a channel to the newcomers.
            state: the final state of the run.
            to: the newcomers' numbers.

        Raises:
            UpdateError: a newcomer does not reply.
        """
        replies = state.centres.assign(net, to)
        fl.check_newcomers(to, replies.ids)
        return [0] * len(to)

    @property
    def size(self) -> int:
        """Return q, the numbers of a client's point."""
        if self.signature_size is None:
            return POINT_SIZE * self.k
        return self.signature_size

    @property
    def shares(self) -> dict[str, float]:
        """Return the fields of the sums of clustering, each with the budget's share of one sum."""
        by_points = WITH_PARTS if self.residuals else CLUSTERING
        if not self.by_labels:
            return by_points
        left = label_search.HISTOGRAM_SHARE
        if not self.by_points:
            return {"anchors": label_search.ANCHOR_SHARE, "maps": left}
        # each of them is in two sums, or left out for others
        once = left / label_search.MOST_TIMES
        return {
            "anchors": label_search.ANCHOR_SHARE,
            "maps": once,
            **{name: once * share for name, share in by_points.items()},
        }

    @property
    def by_labels(self) -> bool:
        """Return whether the run looks for clusters by label maps.

        Sums without noise tell clusters of every kind, so that there is nothing to choose.
        """
        if self.points != "auto":
            return self.points == LABELS
        return self.privacy.per_client and self.privacy.noisy and not self.residuals

    @property
    def by_points(self) -> bool:
        """Return whether the run may look for clusters by points."""
        return self.points != LABELS

    @property
    def subspace(self) -> int:
        """Return r, the dimensions in which k centres differ from their mean."""
        return self.k - 1

    @property
    def vectors_per_round(self) -> int:
        """Return the vectors of d numbers that a client exchanges: k blocks and k averages."""
        return 2 * self.k

    def report_fields(self, state: HiddenState) -> dict[str, Any]:
        """Return how well the clusters are told apart, from what the sums released.

        Args:
            state: the final state.
        """
        centres = state.centres
        if centres.places:
            return {"clear_clusters": centres.clear, "label_mass": centres.mass}
        return {"separation": centres.separation}

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the sizes of points, their moments, the code book and the blocks.

        Args:
            config: the run's configuration.
        """
        q = int(self.size)
        r = int(self.subspace)
        return {
            **super().frame_sizes(config),
            "signature": q,
            "moments": q * (q + 1) // 2,
            "classes": int(config["classes"]),
            "part": 1 + q,
            "subspace": r,
            "displacement": 1 + r,
            "cells": self.cells(config) if r > 1 else 2,
            "clusters": int(self.k),
            "blocks": self._most_blocks(config),
            **self._label_sizes(config),
        }

    def _label_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Return the sizes of class means by themselves and of the histogram of label maps."""
        buckets = label_maps.buckets_for(int(self.k)) if self.by_labels else 1
        return {"frequencies": self._point_map(config).row_length, "buckets": buckets}

    def _point_map(self, config: Mapping[str, Any]) -> ClassMeans:
        """Return the public map of samples to points and class means."""
        return ClassMeans(
            tuple(config["shape"]), int(config["classes"]), int(self.size), int(config["seed"])
        )

    def _most_blocks(self, config: Mapping[str, Any]) -> int:
        """Return the largest number of blocks that clients are counted in."""
        buckets = self._label_sizes(config)["buckets"]
        return max(int(self.k), self.cells(config), 2, int(config["classes"]), buckets)

    def make_client(
        self, cohort: fl.LocalTrainer, pipeline: fl.Pipeline, config: Mapping[str, Any]
    ) -> fl.TrainingClient:
        """Return the client object, which has the public map of samples to points.

        Args:
            cohort: the clients' data and local training.
            pipeline: stages between a row and the wire.
            config: what clients and server agreed on.
        """
        client = HiddenClient(
            cohort,
            self.training.usual(self, config),
            pipeline,
            self._point_map(config),
            int(self.k),
            self.sums.weights_updates(self),
            self.residuals,
        )
        if self.sums.counts_first(self):
            client.least_choosers = self.sums.least_choosers
        if self.by_labels:
            client.buckets = label_maps.buckets_for(int(self.k))
            client.noisy = self.privacy.noisy
        return client

    def shared_facts(self, facts: fl.Facts) -> dict[str, Any]:
        """Refuse data without labels, and points that are longer than the class means.

        Args:
            facts: of the clients and their data.

        Raises:
            UsageError: clients cannot have such a point.
        """
        facts.check_classes(
            "hidden clusters clients by the means of their classes",
            "take ifca, with aggregation secagg",
        )
        if self.signature_size is not None:
            point = ClassMeans(facts.shape, facts.classes, self.size, facts.seed)
            if self.size > point.length:
                raise fl.UsageError(
                    f"signature_size = {self.size} is more than the {point.length} numbers that it "
                    "is a sketch of: give a smaller one, or leave it out"
                )
        return super().shared_facts(facts)

    def check(self, clients: int) -> None:
        """Add checks of the number of clusters and of the sums' options.

        Args:
            clients: m.

        Raises:
            UsageError: a hyper-parameter is out of range.
        """
        super().check(clients)
        check_clusters(self.k, clients)
        fl.check_whole(self, k=2)
        self.sums.check_sizes(self, clients)
        if self.points == LABELS and self.residuals:
            raise fl.UsageError(
                "residuals are of points, and points = labels has none: take points means"
            )
        if self.signature_size is not None:
            fl.check_whole(self, signature_size=max(1, self.subspace))
        if self.privacy.per_example and self.privacy.noisy:
            raise fl.UsageError(
                "the sums of hidden protect whole clients, and not their single samples: take "
                "dp_unit client"
            )

    def _unlike_longer(self, longer: Any) -> str | None:
        """Return that the noise of clustering is a share of that of all rounds."""
        if not (self.privacy.per_client and self.privacy.noisy):
            return None
        return f"the noise of its clustering follows from rounds = {self.rounds}"

    def privacy_factor(self, name: str) -> float:
        """Return the noise multiplier of one of the sums of clustering over that of updates.

        They have `cluster_share` of the run's budget, by shares of 1/z².

        Args:
            name: of the field.
        """
        others = (1 - self.cluster_share) / (self.cluster_share * self.rounds)
        return math.sqrt(others / self.shares[name])

    def pipeline(self, config: Mapping[str, Any]) -> fl.Pipeline:
        """Return the stages of updates, of their blocks, and of the rows of clustering.

        No mask covers the latter, since the server computes with their sums.

        Args:
            config: what clients and server agreed on.
        """
        pipeline = super().pipeline(config)
        noises = self.privacy.row_noises(self, config)
        for name in self.shares:
            stages: tuple[Stage, ...] = ()
            if name in noises:
                stages = self.privacy.row_stages(noises[name], config)
            elif self.privacy.per_client:
                stages = (Clip(1.0),)
            pipeline.fields[name] = fl.Pipeline(stages)
        by_block: list[Stage] = []
        for stage in pipeline.stages:
            # Noise is on all blocks; clips and masks are of one block each.
            if stage.kind is Kind.NOISE:
                by_block.append(stage)
            else:
                by_block.append(BlockStage(stage))
        pipeline.fields["blocks"] = fl.Pipeline(by_block)
        return pipeline

    def disclosures(self) -> fl.Disclosures:
        """Return what the server sees of all clients together, under every mask."""
        noisy = ", with noise" if self.privacy.noisy else ""
        views = []
        if self.residuals:
            views = [
                f"a sum over clients{noisy} of what each class adds to their points and of its "
                "weight there, which tells about how many clients have it"
            ]
        if self.by_labels:
            views.append(
                f"sums over clients{noisy} of their class means in the order of public "
                "anchors, and of how many clients have a label map in each "
                "bucket of a public hash"
            )
        if self.by_points:
            views.append(
                f"sums over clients{noisy}: of their points, of these points' second moments, and "
                "of how many clients are in each cell of a public code book and near each centre"
            )
        server = [
            *views,
            f"the sum of updates of each of the {self.k} clusters{noisy}, over the clients of each "
            "sum: no reply and no single sum tells who is in a cluster, and what all sums together "
            "tell is said under sums over rounds; the labels of the results are the clients' own",
            fl.OfPlainSums(
                "each client's point, nearest centre and block (the plain sum reads every reply), "
                "and thereby its cluster"
            ),
            *fl.visible_sample_counts(weighted=self.sums.weights_updates(self)),
        ]
        if self.sums.weights_updates(self):
            server.append(
                OfHiddenSums(
                    "exact sums of numbers of samples by cluster (exact_weights), which tell how "
                    "many samples of the clients in a sum are in each cluster"
                )
            )
        if not self.privacy.noisy:
            server.append(
                "without noise, by the difference of two sums, what one client added that is in "
                "one of them only: its cluster and its update"
            )
        clients = "the averages of all clusters"
        if self.sums.counts_first(self):
            minimum = self.sums.least_choosers
            server.append(
                "exact counts of a sum's clients by cell, centre and cluster, of which a one says "
                "that somebody is alone there, and not who; no block of a sum is of fewer than "
                f"{minimum} clients (least_choosers), as far as the server tells clients the "
                "counts that it read, and clients add ones: neither can be checked"
            )
            clients += f" of {minimum} clients or more, and whether a round moved each"
        elif not self.privacy.noisy:
            server.append(fl.OfPlainSums("a block over one client, which is its update"))
            clients += ", of a cluster with one client its update"
        else:
            clients += ", and about how many clients are in each"
        return fl.Disclosures(server=server, clients=[clients])

    @property
    def observer(self) -> HiddenObserver:
        """Return what the experimenter computes outside the protocol."""
        return HiddenObserver(self)

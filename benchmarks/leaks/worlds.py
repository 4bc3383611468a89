"""Two worlds that differ in one example, or one client: what releases show of it, against the ε
that their ledgers claim.

python -m benchmarks.leaks.worlds [--clients 400] [--only srfca cfl] [--confidence 0.95]

Many clients take part in one run, and each draws noise of its own. Every other one holds a canary,
so that half of what leaves is of either world. A statistic of each client's reply gives μ, the
distance of the worlds in units of the noise, an ε at δ = 1e-5 that holds for it if the release is
Gaussian, and a lower bound of ε by Clopper and Pearson that needs no such assumption
(`securecluster.privacy.dp.auditing`). A bound above the claim refutes it; one below proves nothing.
Writes benchmarks/results/worlds.csv.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.table import SEEDED, tabulate
from securecluster import Federation
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import SecureClusterWarning
from securecluster.messaging.messages import Empty
from securecluster.messaging.transcript import Transcript
from securecluster.parties.deployment import build_network
from securecluster.parties.derived import initial_model
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.dp.auditing import Audit, lower_bound
from securecluster.privacy.dp.ledger import Ledger
from securecluster.protocols import (
    CFL,
    IFCA,
    SRFCA,
    ClusteringProtocol,
    FedAvg,
    OneShot,
    RandomClusters,
    Settings,
)
from securecluster.protocols.cfl.parameter_tree import ParameterTree, choose_fallback_models
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.common.messages import ModelDelta
from securecluster.protocols.oneshot.client import OneShotClient
from securecluster.protocols.srfca.client import SRFCAClient
from securecluster.protocols.srfca.server import cross_losses
from securecluster.runtime.transport import InProcess, Recorded

Array = NDArray[np.float64]
Sample = tuple[NDArray[np.float32], int]
DELTA = 1e-5
# of every run; noise is keyed by each client's secret, so clients are independent samples
SEED = 11
FEATURES = 6
CLASSES = 4
FULL = Settings(transcript="full", keys_from_seed=True)
LONG = 1e4  # a canary's feature: its gradient and its loss are beyond every bound


@dataclass(frozen=True)
class Finding:
    """Result of the audit of one mechanism.

    Args:
        claimed: ε of the ledger's events of this mechanism, at DELTA.
        audit: the statistics of both worlds.
        gaussian: both worlds are Gaussian with one variance, so that ε follows from μ.
    """

    name: str
    unit: str
    claimed: float
    audit: Audit
    gaussian: bool = True

    @property
    def mu(self) -> float:
        """Return the distance of the worlds' means over their standard deviation."""
        present = self.audit.present
        absent = self.audit.absent
        variances = present.var(ddof=1) + absent.var(ddof=1)
        # pooled over both worlds, which have the same noise
        deviation = math.sqrt(variances / 2)
        distance = float(present.mean() - absent.mean())
        return distance / deviation

    @property
    def error(self) -> float:
        """Return the standard error of μ, to first order."""
        a = len(self.audit.present)
        b = len(self.audit.absent)
        # the standard deviation is estimated, too
        of_deviation = self.mu**2 / (2 * (a + b))
        return math.sqrt(1 / a + 1 / b + of_deviation)

    @property
    def least(self) -> float:
        """Return a lower bound of ε: by rates, and by moments where the release is Gaussian."""
        # ε ≥ log((hits − δ) / false alarms), without assumptions on the release (Nasr et al. 2021)
        by_rates = self.audit.epsilon(DELTA)
        if not self.gaussian:
            return by_rates
        by_moments = gaussian_epsilon(self.audit.mu, DELTA)
        return max(by_rates, by_moments)

    @property
    def refuted(self) -> bool:
        """Return whether the claim is below the lower bound."""
        return self.least > self.claimed

    def row(self) -> dict[str, Any]:
        """Return the finding as a line of the table."""
        # an estimate, no bound: ε(δ) of one Gaussian release is exact in μ (Balle & Wang 2018)
        epsilon_of_mu: float | str = ""
        if self.gaussian:
            mu = max(self.mu, 0.0)
            epsilon_of_mu = round(gaussian_epsilon(mu, DELTA), 3)
        return {
            "mechanism": self.name,
            "unit": self.unit,
            "present": len(self.audit.present),
            "absent": len(self.audit.absent),
            "claimed_epsilon": round(self.claimed, 3),
            "mu": round(self.mu, 3),
            "mu_error": round(self.error, 3),
            "epsilon_of_mu": epsilon_of_mu,
            "lower_epsilon_rates": round(self.audit.epsilon(DELTA), 3),
            "lower_epsilon": round(self.least, 3),
            "refuted": self.refuted,
        }


def federation(
    count: int, samples: int, canary: Callable[[int], Sample], all_samples: bool = False
) -> Federation:
    """Return clients that hold zeros and, each, a canary.

    Args:
        count: of clients.
        samples: of each client.
        canary: the features (FEATURES,) and the label of a client's first sample, by its number.
        all_samples: every sample of a client is its canary.
    """
    clients: dict[str, Any] = {}
    for i in range(count):
        x = np.zeros((samples, FEATURES), np.float32)
        y = np.arange(samples) % CLASSES
        rows = slice(1)
        if all_samples:
            rows = slice(None)
        x[rows], y[rows] = canary(i)
        clients[f"c{i}"] = (x, y)
    return with_canaries(clients)


def with_canaries(clients: Mapping[str, Any]) -> Federation:
    """Return clients that hold canaries, without the warnings that those would cause.

    Args:
        clients: samples (n, FEATURES) and labels (n,) by name.
    """
    x = np.zeros((1, FEATURES), np.float32)
    y = np.zeros(1, np.int64)
    tests = dict.fromkeys(clients, (x, y))
    with warnings.catch_warnings():
        # of scales, which canaries are meant to have
        warnings.simplefilter("ignore", SecureClusterWarning)
        return Federation.from_arrays(clients, test=tests, classes=CLASSES, seed=SEED)


def weights(other: bool = False) -> Array:
    """Return the initial weights (CLASSES, FEATURES) of the linear model.

    Args:
        other: those of IFCA's second model instead.
    """
    zeros = np.zeros(FEATURES, np.float32)
    data = federation(2, 4, lambda i: (zeros, 0))
    flat = initial_model(FedAvg(model="linear", rounds=1), data)
    # initial weights follow from the seed alone, so canaries can be made before the run
    vector = flat.initial()
    if other:
        vector = flat.redrawn(Randomness(SEED), "start", 0, 1)
    start = 0
    for shape in flat.shapes.values():
        stop = start + shape.numel()
        # a linear model has one matrix, its weights; the bias is a vector
        if len(shape) == 2:
            return vector[start:stop].view(shape).double().numpy()
        start = stop
    raise AssertionError("a linear model has a matrix")


def telling_feature() -> tuple[NDArray[np.float32], int, int]:
    """Return a long sample, the label that the first model is surest of there, and one that it is
    sure it is not.
    """
    matrix = weights()
    ordered = np.sort(matrix, axis=0)
    # the larger the margin, the nearer the loss of the surest label is to 0
    margins = ordered[-1] - ordered[-2]
    feature = int(np.argmax(margins))
    sample = np.zeros(FEATURES, np.float32)
    sample[feature] = LONG
    column = matrix[:, feature]
    return sample, int(column.argmax()), int(column.argmin())


def held(i: int) -> bool:
    """Return whether a client holds the canary."""
    return i % 2 == 0


def replies(transcript: Transcript, method: str, field: str) -> dict[int, list[Array]]:
    """Return each client's replies to every call of a method, in order.

    Args:
        transcript: a full one.
        method: the called method's name.
        field: of the reply, its rows.
    """
    received: dict[int, list[Array]] = {}
    for position, entry in enumerate(transcript.entries):
        if entry.method != method:
            continue
        _, answer = transcript.content(position)
        values = getattr(answer.reply, field).values
        rows = values.double().numpy()
        for i, row in zip(answer.ids, rows, strict=True):
            received.setdefault(i, []).append(row)
    return received


def price(ledger: Ledger, method: str) -> float:
    """Return ε at DELTA of one method's events.

    An audit is of one mechanism, so the other events of a run are not part of the claim.

    Args:
        ledger: of the run.
        method: the name of the client method whose replies are audited.
    """
    events = [event for event in ledger.events if event.method == method]
    assert events, f"no event of {method}"
    return Ledger(events, ledger.samples).price(DELTA).epsilon


def judged(
    statistic: Mapping[int, float], confidence: float, present: Callable[[int], bool] = held
) -> Audit:
    """Return the audit of statistics by client or cluster.

    Args:
        statistic: a number for each client or cluster.
        confidence: of the lower bound, in (0, 1).
        present: whether a client or cluster holds the canary.
    """
    with_canary = []
    without_canary = []
    for i, value in sorted(statistic.items()):
        if present(i):
            with_canary.append(value)
        else:
            without_canary.append(value)
    return lower_bound(with_canary, without_canary, confidence)


def along(rows: Mapping[int, Array], present: Array, absent: Array) -> dict[int, float]:
    """Project rows onto the direction from one noiseless row to the other.

    Args:
        rows: (d,) of each client or cluster.
        present: the noiseless row (d,) with the canary.
        absent: the noiseless row (d,) without it.
    """
    difference = present - absent
    direction = difference / np.linalg.norm(difference)
    return {i: float(row @ direction) for i, row in rows.items()}


def first(received: Mapping[int, list[Array]]) -> dict[int, Array]:
    """Return each client's first reply."""
    return {i: rows[0] for i, rows in received.items()}


def first_updates(fitted: Any, method: str = "contribute") -> dict[int, Array]:
    """Return each client's update of the first round, (d,).

    Args:
        fitted: a protocol whose run recorded a full transcript.
        method: the called method's name.
    """
    received = replies(fitted.transcript_, method, "delta")
    return first(received)


def mean_losses(transcript: Transcript, method: str) -> dict[int, float]:
    """Return the mean of each client's first row of losses.

    A canary moves all losses of a row by the same amount, so the mean is along that direction.

    Args:
        transcript: a full one.
        method: the called method's name.
    """
    rows = first(replies(transcript, method, "loss"))
    return {i: float(row.mean()) for i, row in rows.items()}


LINEAR: dict[str, Any] = {"model": "linear", "mask": "none", "epochs": 1, "rounds": 1}


def dp_sgd(count: int, confidence: float, batch: int, z: float) -> Finding:
    """Audit a round of DP-SGD: the canary's gradient is beyond the clip norm, or it is zero.

    Args:
        count: of clients.
        confidence: of the lower bound, in (0, 1).
        batch: expected samples a mini-batch, of 24.
        z: the noise multiplier.
    """
    # worlds differ in one sample; without the canary its gradient is about zero, as if removed
    clients = loss_canaries(count, 24, every_sample=False)
    params = {**LINEAR, "lr": 1e-3, "clip": 0.5, "dp_unit": "example"}
    noiseless = FedAvg(**params, batch_size=24).fit(clients, FULL)
    plain = first_updates(noiseless)
    fitted = FedAvg(**params, batch_size=batch, noise=z).fit(clients, FULL)
    rows = first_updates(fitted)
    # client 0 holds the canary and client 1 does not
    statistic = along(rows, plain[0], plain[1])
    audit = judged(statistic, confidence)
    return Finding(
        f"DP-SGD, q = {batch}/24",
        "example",
        price(fitted.ledger_, "contribute"),
        audit,
        # a batch of all 24 samples is not drawn, so its release is Gaussian
        gaussian=batch == 24,
    )


def local_updates(count: int, confidence: float, z: float = 1.0) -> Finding:
    """Audit clipped updates with the clients' own noise.

    A client's update is beyond the clip norm, or next to nothing.

    Args:
        count: of clients.
        confidence: of the lower bound, in (0, 1).
        z: the noise multiplier.
    """
    clients = update_canaries(count, held)
    # a canary's feature of 1e4 makes an update longer than the clip norm, and without it an update
    # is that of a bias, of about 1e-6
    params = {**LINEAR, "lr": 1e-6, "clip": 1e-3}
    noiseless = FedAvg(**params).fit(clients, FULL)
    plain = first_updates(noiseless)
    fitted = FedAvg(**params, noise=z).fit(clients, FULL)
    rows = first_updates(fitted)
    # client 0 holds the canary and client 1 does not
    statistic = along(rows, plain[0], plain[1])
    return Finding(
        "updates, noise of clients",
        "client",
        price(fitted.ledger_, "contribute"),
        judged(statistic, confidence),
    )


def update_canaries(count: int, canary: Callable[[int], bool]) -> Federation:
    """Return clients whose updates are long with the canary, and next to nothing without it.

    Args:
        count: of clients.
        canary: whether a client holds the canary, by its number.
    """
    sample, _, miss = telling_feature()
    zeros = np.zeros(FEATURES, np.float32)

    def first_sample(i: int) -> Sample:
        if canary(i):
            return sample, miss
        return zeros, miss

    return federation(count, 8, first_sample)


def central_sums(
    count: int, confidence: float, z: float = 1.0, kind: type[RandomClusters] = RandomClusters
) -> Finding:
    """Audit a trusted server's sums: each cluster of two has a canary among its members, or has
    none.

    What the server adds noise to is not in the transcript; the averages that it makes of it, and
    sends back, are.

    Args:
        count: of clients, in clusters of two.
        confidence: of the lower bound, in (0, 1).
        z: the noise multiplier.
        kind: the protocol's class.
    """
    params = {
        **LINEAR,
        "lr": 1e-6,
        "clip": 1e-3,
        "placement": "central",
        "k": count // 2,
        # the averages of the first round are sent with the queries of the second
        "rounds": 2,
    }
    # clusters are drawn from the seed alone, so any canaries give the same ones
    one_round = {**params, "rounds": 1}
    unaudited = RandomClusters(**one_round).fit(update_canaries(count, held), SEEDED)
    labels = unaudited.labels_.tolist()
    # one client of every other cluster, so that two worlds differ in one client
    holders = {labels.index(c) for c in range(0, count // 2, 2)}
    clients = update_canaries(count, lambda i: i in holders)
    noiseless = RandomClusters(**params).fit(clients, FULL)
    plain = averages(noiseless, labels)
    fitted = kind(**params, noise=z).fit(clients, FULL)
    # cluster 0 has a canary among its members and cluster 1 has none; a mean divides noise and
    # canary alike, so its μ is that of the sum
    statistic = along(averages(fitted, labels), plain[0], plain[1])
    ledger = fitted.ledger_
    # the averages are those after the first round, so later noise is not part of the claim
    events = [event for event in ledger.events if event.round == 1]
    first_round = Ledger(events, ledger.samples)
    return Finding(
        "sums, noise of a trusted server",
        "client",
        price(first_round, "contribute"),
        judged(statistic, confidence),
    )


def averages(fitted: Any, labels: list[int]) -> dict[int, Array]:
    """Return the average that each cluster was sent after the first round, by cluster.

    Args:
        fitted: a protocol whose run recorded a full transcript.
        labels: the clients' clusters.
    """
    received: dict[int, Array] = {}
    for position, entry in enumerate(fitted.transcript_.entries):
        if entry.method != "contribute" or entry.round != 2:
            continue
        call, _ = fitted.transcript_.content(position)
        means = call.query.means
        table = means.table.double().numpy()
        for k, i in enumerate(call.to):
            # all members are sent the same average, so the first one's will do
            (row,) = means.picks[k]
            received.setdefault(labels[i], table[row])
    return received


def eigenvectors(count: int, confidence: float, z: float = 1.0) -> Finding:
    """Audit eigenvectors of noisy Gram matrices: a sample in a direction of its own, or none.

    Args:
        count: of clients.
        confidence: of the lower bound, in (0, 1).
        z: the noise multiplier of Gram matrices.
    """
    sample, _, label = telling_feature()
    feature = int(sample.argmax())
    zeros = np.zeros(FEATURES, np.float32)

    def first_sample(i: int) -> Sample:
        if held(i):
            return sample, label
        return zeros, label

    clients = federation(count, 24, first_sample)
    params = {
        **LINEAR,
        "tasks": 2,
        "vectors": FEATURES,
        "sealed": False,
        "clip": 0.5,
        "noise": 5.0,
        "gram_noise": z,
    }
    protocol = OneShot(**params, dp_unit="example")
    net, transcript = connected(protocol, clients)
    # this phase alone: the noise of training is not part of the audit
    net.gather(OneShotClient.eigen, Empty(), to=net.clients)
    vectors = first(replies(transcript, "eigen", "vectors"))
    # the share of the canary's direction in the leading eigenvector, whose sign is arbitrary
    statistic = {i: float(rows[0, feature] ** 2) for i, rows in vectors.items()}
    return Finding(
        "eigenvectors",
        "example",
        price(net.state.ledger, "eigen"),
        judged(statistic, confidence),
        # eigenvectors of a matrix with Gaussian noise are not Gaussian
        gaussian=False,
    )


def connected(protocol: ClusteringProtocol, clients: Federation) -> tuple[Any, Transcript]:
    """Return the network of a protocol's own endpoint, and its transcript.

    Args:
        protocol: whose client methods are called.
        clients: with canaries.
    """
    endpoint = build_client(protocol, clients, Settings(keys_from_seed=True))
    transcript = Transcript("full")
    transport = Recorded(InProcess(endpoint.answer), transcript)
    net = build_network(protocol, transport, protocol.config(clients, "float32"))
    net.round = 1
    return net, transcript


def choices(count: int, confidence: float, z: float = 2.0, rounds: int = 20) -> Finding:
    """Audit IFCA's choices: a client's canary fits one of two models, or the other one.

    Args:
        count: of clients.
        confidence: of the lower bound, in (0, 1).
        z: the noise multiplier.
        rounds: in each of which a client chooses once.
    """
    first_labels = weights().argmax(axis=0)
    second_labels = weights(other=True).argmax(axis=0)
    # the first feature for which the two models predict different labels
    feature = int(np.flatnonzero(first_labels != second_labels)[0])
    sample = np.zeros(FEATURES, np.float32)
    sample[feature] = LONG
    first_label = int(first_labels[feature])
    second_label = int(second_labels[feature])

    def first_sample(i: int) -> Sample:
        if held(i):
            return sample, second_label
        return sample, first_label

    clients = federation(count, 8, first_sample)
    params = {
        **LINEAR,
        "lr": 1e-9,
        "clip": 1e-3,
        "loss_clip": 0.5,
        "dp_unit": "example",
        "rounds": rounds,
    }
    protocol = IFCA(**params, k=2, starts=1, noise=z)
    with warnings.catch_warnings():
        # models that stand still learn nothing
        warnings.simplefilter("ignore", SecureClusterWarning)
        fitted = protocol.fit(clients, FULL)
    chosen = replies(fitted.transcript_, "choose", "model")
    # each choice is 0 or 1: their sum counts how often the second model was chosen
    statistic = {i: float(np.sum(rows)) for i, rows in chosen.items()}
    return Finding(
        f"IFCA's choices, {rounds} of them",
        "example",
        price(fitted.ledger_, "choose"),
        judged(statistic, confidence),
        # a choice is one of two models, and their sum is no Gaussian number
        gaussian=False,
    )


def srfca_losses(
    count: int, confidence: float, unit: str = "example", z: float = 1.0, kind: type[SRFCA] = SRFCA
) -> Finding:
    """Audit a row of losses under all clients' models: one sample, or all of a client's, at the
    bound or at zero.

    Args:
        count: of clients.
        confidence: of the lower bound, in (0, 1).
        unit: of privacy, "example" or "client".
        z: the noise multiplier.
        kind: the protocol's class.
    """
    clients = loss_canaries(count, 8, every_sample=unit == "client")
    privacy: dict[str, Any] = {"clip": 1e-3, "loss_clip": 0.5, "noise": z, "dp_unit": unit}
    params = {**LINEAR, "lr": 1e-6, **privacy}
    net, transcript = connected(kind(**params), clients)
    models = net.gather(SRFCAClient.send_model, Empty(), to=net.clients)
    deltas = models.rows.delta.values
    # rows of k mean losses, whose sensitivity is B√k/n for an example and B√k for a client
    cross_losses(net, models.ids, deltas, models.step)
    audit = judged(mean_losses(transcript, "losses"), confidence)
    return Finding("SR-FCA's losses", unit, price(net.state.ledger, "losses"), audit)


def loss_canaries(count: int, samples: int, every_sample: bool) -> Federation:
    """Return clients whose canaries are beyond the bound of a loss, or cost nothing.

    Args:
        count: of clients.
        samples: of each client.
        every_sample: every sample of a client is its canary, not only the first.
    """
    sample, hit, miss = telling_feature()

    def first_sample(i: int) -> Sample:
        if held(i):
            return sample, miss
        return sample, hit

    return federation(count, samples, first_sample, every_sample)


def fallback_losses(
    count: int, confidence: float, unit: str = "example", z: float = 1.0, kind: type[CFL] = CFL
) -> Finding:
    """Audit the losses that CFL's fallback compares after a split: of one held-out sample, or of
    several.

    Args:
        count: of clients.
        confidence: of the lower bound, in (0, 1).
        unit: of privacy, "example" or "client".
        z: the noise multiplier.
        kind: the protocol's class.
    """
    # half of a client's samples, which are all equal, are held out
    samples = 8
    bound = 0.4  # other losses, hence other draws
    if unit == "example":
        samples = 2
        bound = 0.5
    clients = loss_canaries(count, samples, every_sample=True)
    params = {
        **LINEAR,
        "lr": 1e-6,
        "clip": 1e-3,
        "loss_clip": bound,
        "noise": z,
        "dp_unit": unit,
        "fallback": 0.5,
    }
    net, transcript = connected(kind(**params), clients)
    half = count // 2
    labels = [int(i >= half) for i in range(count)]
    # a split by hand, since the fallback compares losses of parents and children
    tree = ParameterTree.start(count)
    halves = (list(range(half)), list(range(half, count)))
    tree.branch(0, halves, 1)
    # a delta of zeros is the initial model, whose losses the canaries are made for
    for node in tree.nodes:
        node.model = ModelDelta(torch.zeros(net.agreed["dimension"]))
    pending = PendingUpdates.start(count, fresh=False)
    choose_fallback_models(net, tree, pending, labels)
    audit = judged(mean_losses(transcript, "judge"), confidence)
    return Finding("CFL's fallback", unit, price(net.state.ledger, "judge"), audit)


AUDITS: dict[str, Callable[[int, float], Finding]] = {
    # q = 1 and q = 1/3 of 24 samples; sampled batches are priced by the PRV accountant
    "dpsgd": lambda count, level: dp_sgd(count, level, 24, 1.2),
    "dpsgd-sampled": lambda count, level: dp_sgd(count, level, 8, 0.6),
    "updates": local_updates,
    "central": central_sums,
    "eigenvectors": eigenvectors,
    "ifca": choices,
    "srfca-example": lambda count, level: srfca_losses(count, level, "example"),
    "srfca-client": lambda count, level: srfca_losses(count, level, "client"),
    "cfl-example": lambda count, level: fallback_losses(count, level, "example"),
    "cfl-client": lambda count, level: fallback_losses(count, level, "client"),
}


def main(argv: list[str] | None = None) -> Path:
    """Print a line for each mechanism, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=400)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--only", nargs="*", default=list(AUDITS))
    options = parser.parse_args(argv)
    # so that `--only srfca` takes both units of privacy
    prefixes = tuple(options.only)
    chosen = [name for name in AUDITS if name.startswith(prefixes)]
    torch.set_num_threads(1)

    def measured(name: str) -> list[dict[str, Any]]:
        finding = AUDITS[name](options.clients, options.confidence)
        return [finding.row()]

    return tabulate("worlds", map(measured, chosen))


if __name__ == "__main__":
    print(main())

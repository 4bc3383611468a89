"""Two worlds that differ in one example, or one client: what releases show of it, against the ε
that their ledgers claim.

python -m securecluster.benchmarks.worlds [--clients 400] [--only srfca cfl] [--confidence 0.95]

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

from securecluster import Federation
from securecluster.benchmarks.table import write
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import SecureClusterWarning
from securecluster.messaging.messages import Empty
from securecluster.messaging.transcript import Transcript
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
from securecluster.protocols.common.messages import ModelDelta
from securecluster.protocols.common.pending_updates import PendingUpdates
from securecluster.protocols.oneshot.client import OneShotClient
from securecluster.protocols.srfca.client import SRFCAClient
from securecluster.protocols.srfca.server import cross_losses
from securecluster.runtime.transport import InProcess, Recorded

Array = NDArray[np.float64]
Sample = tuple[NDArray[np.float32], int]
DELTA = 1e-5
SEED = 11
FEATURES, CLASSES = 6, 4
FULL = Settings(transcript="full")
LONG = 1e4  # a canary's feature: its gradient and its loss are beyond every bound


@dataclass(frozen=True)
class Finding:
    """What one mechanism showed.

    Args:
        claimed: ε of the ledger's events of this mechanism, at DELTA.
        audit: the statistics of both worlds.
        gaussian: whether both worlds are Gaussian with one variance, so that μ says what ε is.
    """

    name: str
    unit: str
    claimed: float
    audit: Audit
    gaussian: bool = True

    @property
    def mu(self) -> float:
        """The distance of the worlds' means over their standard deviation."""
        present, absent = self.audit.present, self.audit.absent
        spread = math.sqrt((present.var(ddof=1) + absent.var(ddof=1)) / 2)
        return float(present.mean() - absent.mean()) / spread

    @property
    def error(self) -> float:
        """The standard error of μ, to first order."""
        a, b = len(self.audit.present), len(self.audit.absent)
        return math.sqrt(1 / a + 1 / b + self.mu**2 / (2 * (a + b)))

    @property
    def least(self) -> float:
        """A lower bound of ε: by rates, and by moments where the release is Gaussian."""
        by_rates = self.audit.epsilon(DELTA)
        return max(by_rates, gaussian_epsilon(self.audit.mu, DELTA)) if self.gaussian else by_rates

    @property
    def refuted(self) -> bool:
        """Whether the claim is below what was shown."""
        return self.least > self.claimed

    def row(self) -> dict[str, Any]:
        """Return the finding as a line of the table."""
        return {
            "mechanism": self.name,
            "unit": self.unit,
            "present": len(self.audit.present),
            "absent": len(self.audit.absent),
            "claimed_epsilon": round(self.claimed, 3),
            "mu": round(self.mu, 3),
            "mu_error": round(self.error, 3),
            "epsilon_of_mu": round(gaussian_epsilon(max(self.mu, 0.0), DELTA), 3)
            if self.gaussian
            else "",
            "lower_epsilon_rates": round(self.audit.epsilon(DELTA), 3),
            "lower_epsilon": round(self.least, 3),
            "refuted": self.refuted,
        }


def federation(
    count: int, samples: int, canary: Callable[[int], Sample], all_samples: bool = False
) -> Federation:
    """Return clients that hold zeros and, each, a canary.

    Args:
        canary: the features (FEATURES,) and the label of a client's first sample, by its number.
        all_samples: every sample of a client is its canary.
    """
    clients: dict[str, Any] = {}
    test = (np.zeros((1, FEATURES), np.float32), np.zeros(1, np.int64))
    for i in range(count):
        x = np.zeros((samples, FEATURES), np.float32)
        y = np.arange(samples) % CLASSES
        held = slice(None) if all_samples else slice(1)
        x[held], y[held] = canary(i)
        clients[f"c{i}"] = (x, y)
    with warnings.catch_warnings():
        # of scales, which canaries are meant to have
        warnings.simplefilter("ignore", SecureClusterWarning)
        return Federation.from_arrays(
            clients, test=dict.fromkeys(clients, test), classes=CLASSES, seed=SEED
        )


def weights(other: bool = False) -> Array:
    """Return the initial weights (CLASSES, FEATURES) of the linear model, or those of IFCA's second
    model.
    """
    flat = FedAvg(model="linear", rounds=1).flat_model(
        federation(2, 4, lambda i: (np.zeros(FEATURES, np.float32), 0))
    )
    drawn = flat.redrawn(Randomness(SEED), "start", 0, 1) if other else flat.initial()
    first = 0
    for shape in flat.shapes.values():
        if len(shape) == 2:
            return drawn[first : first + shape.numel()].view(shape).double().numpy()
        first += shape.numel()
    raise AssertionError("a linear model has a matrix")


def telling_feature() -> tuple[NDArray[np.float32], int, int]:
    """Return a long sample, the label that the first model is surest of there, and one that it is
    sure it is not.
    """
    table = weights()
    gaps = np.sort(table, axis=0)
    feature = int(np.argmax(gaps[-1] - gaps[-2]))
    sample = np.zeros(FEATURES, np.float32)
    sample[feature] = LONG
    return sample, int(table[:, feature].argmax()), int(table[:, feature].argmin())


def held(i: int) -> bool:
    """Return whether a client holds the canary."""
    return i % 2 == 0


def replies(transcript: Transcript, method: str, field: str) -> dict[int, list[Array]]:
    """Return what each client replied to every call of a method, in order."""
    found: dict[int, list[Array]] = {}
    for position, entry in enumerate(transcript.entries):
        if entry.method != method:
            continue
        _, answer = transcript.content(position)
        rows = getattr(answer.reply, field).values.double().numpy()
        for i, row in zip(answer.ids, rows, strict=True):
            found.setdefault(i, []).append(row)
    return found


def price(ledger: Ledger, method: str) -> float:
    """Return ε of one method's events."""
    own = [event for event in ledger.events if event.method == method]
    assert own, f"no event of {method}"
    return Ledger(own, ledger.samples).price(DELTA).epsilon


def judged(
    statistic: Mapping[int, float], confidence: float, present: Callable[[int], bool] = held
) -> Audit:
    """Return the audit of statistics by client or cluster."""
    here = [value for i, value in sorted(statistic.items()) if present(i)]
    gone = [value for i, value in sorted(statistic.items()) if not present(i)]
    return lower_bound(here, gone, confidence)


def along(rows: Mapping[int, Array], present: Array, absent: Array) -> dict[int, float]:
    """Return how far rows lie along the way from one noiseless row to the other."""
    direction = (present - absent) / np.linalg.norm(present - absent)
    return {i: float(row @ direction) for i, row in rows.items()}


def first(found: Mapping[int, list[Array]]) -> dict[int, Array]:
    """Return each client's first reply."""
    return {i: rows[0] for i, rows in found.items()}


LINEAR: dict[str, Any] = {"model": "linear", "mask": "none", "epochs": 1, "rounds": 1}


def dp_sgd(count: int, confidence: float, batch: int, z: float) -> Finding:
    """Audit a round of DP-SGD: the canary's gradient is beyond the clip norm, or it is zero."""
    known = loss_canaries(count, 24, whole=False)
    params = {**LINEAR, "lr": 1e-3, "clip": 0.5, "dp_unit": "example"}
    plain = first(
        replies(FedAvg(**params, batch_size=24).fit(known, FULL).transcript_, "contribute", "delta")
    )
    fitted = FedAvg(**params, batch_size=batch, noise=z).fit(known, FULL)
    rows = first(replies(fitted.transcript_, "contribute", "delta"))
    audit = judged(along(rows, plain[0], plain[1]), confidence)
    return Finding(
        f"DP-SGD, q = {batch}/24",
        "example",
        price(fitted.ledger_, "contribute"),
        audit,
        gaussian=batch == 24,
    )


def local_updates(count: int, confidence: float, z: float = 1.0) -> Finding:
    """Audit clipped updates with the clients' own noise: a client's is beyond the clip norm, or
    next to nothing.
    """
    known = update_canaries(count, held)
    params = {**LINEAR, "lr": 1e-6, "clip": 1e-3}
    plain = first(replies(FedAvg(**params).fit(known, FULL).transcript_, "contribute", "delta"))
    fitted = FedAvg(**params, noise=z).fit(known, FULL)
    rows = first(replies(fitted.transcript_, "contribute", "delta"))
    audit = judged(along(rows, plain[0], plain[1]), confidence)
    return Finding(
        "updates, noise of clients", "client", price(fitted.ledger_, "contribute"), audit
    )


def update_canaries(count: int, canary: Callable[[int], bool]) -> Federation:
    """Return clients whose updates are long where they hold the canary, and next to nothing
    elsewhere.
    """
    sample, _, miss = telling_feature()
    nothing = np.zeros(FEATURES, np.float32)
    return federation(count, 8, lambda i: (sample if canary(i) else nothing, miss))


def central_sums(
    count: int, confidence: float, z: float = 1.0, kind: type[RandomClusters] = RandomClusters
) -> Finding:
    """Audit a trusted server's sums: each cluster of two has a canary among its members, or has
    none.

    What the server adds noise to is not in the transcript; the averages that it makes of it, and
    sends back, are.
    """
    params = {
        **LINEAR,
        "lr": 1e-6,
        "clip": 1e-3,
        "placement": "central",
        "k": count // 2,
        "rounds": 2,
    }
    anyone = update_canaries(count, held)  # clusters are drawn from the seed alone
    labels = RandomClusters(**{**params, "rounds": 1}).fit(anyone).labels_.tolist()
    holders = {labels.index(c) for c in range(0, count // 2, 2)}
    known = update_canaries(count, lambda i: i in holders)
    plain = averages(RandomClusters(**params).fit(known, FULL), labels)
    fitted = kind(**params, noise=z).fit(known, FULL)
    audit = judged(along(averages(fitted, labels), plain[0], plain[1]), confidence)
    ledger = fitted.ledger_
    one = Ledger([event for event in ledger.events if event.round == 1], ledger.samples)
    return Finding("sums, noise of a trusted server", "client", price(one, "contribute"), audit)


def averages(fitted: Any, labels: list[int]) -> dict[int, Array]:
    """Return the average that each cluster's first member was sent after the first round, by
    cluster.
    """
    found: dict[int, Array] = {}
    for position, entry in enumerate(fitted.transcript_.entries):
        if entry.method != "contribute" or entry.round != 2:
            continue
        call, _ = fitted.transcript_.content(position)
        table = call.query.means.table.double().numpy()
        for k, i in enumerate(call.to):
            (row,) = call.query.means.picks[k]
            found.setdefault(labels[i], table[row])
    return found


def eigenvectors(count: int, confidence: float, z: float = 1.0) -> Finding:
    """Audit eigenvectors of noisy Gram matrices: a sample in a direction of its own, or none."""
    sample, _, label = telling_feature()
    feature = int(sample.argmax())
    nothing = np.zeros(FEATURES, np.float32)
    known = federation(count, 24, lambda i: (sample if held(i) else nothing, label))
    params = {
        **LINEAR,
        "tasks": 2,
        "vectors": FEATURES,
        "sealed": False,
        "clip": 0.5,
        "noise": 5.0,
        "gram_noise": z,
    }
    made = OneShot(**params, dp_unit="example")
    net, transcript = connected(made, known)
    net.gather(OneShotClient.eigen, Empty(), to=net.clients)
    vectors = first(replies(transcript, "eigen", "vectors"))
    statistic = {i: float(rows[0, feature] ** 2) for i, rows in vectors.items()}
    return Finding(
        "eigenvectors",
        "example",
        price(net.state.ledger, "eigen"),
        judged(statistic, confidence),
        gaussian=False,
    )


def connected(made: ClusteringProtocol, known: Federation) -> tuple[Any, Transcript]:
    """Return the network of a protocol's own endpoint, and its transcript."""
    endpoint = made.build_client(known, Settings())
    transcript = Transcript("full")
    net = made.build_network(
        Recorded(InProcess(endpoint.answer), transcript), made.config(known, "float32")
    )
    net.round = 1
    return net, transcript


def choices(count: int, confidence: float, z: float = 2.0, rounds: int = 20) -> Finding:
    """Audit IFCA's choices: a sample that fits one of two models and not the other, or the other
    way round.
    """
    one, two = weights(), weights(other=True)
    feature = next(k for k in range(FEATURES) if one[:, k].argmax() != two[:, k].argmax())
    sample = np.zeros(FEATURES, np.float32)
    sample[feature] = LONG
    fits = int(two[:, feature].argmax()), int(one[:, feature].argmax())
    known = federation(count, 8, lambda i: (sample, fits[0] if held(i) else fits[1]))
    params = {
        **LINEAR,
        "lr": 1e-9,
        "clip": 1e-3,
        "loss_clip": 0.5,
        "dp_unit": "example",
        "rounds": rounds,
    }
    made = IFCA(**params, k=2, starts=1, noise=z)
    with warnings.catch_warnings():
        # models that stand still learn nothing
        warnings.simplefilter("ignore", SecureClusterWarning)
        fitted = made.fit(known, FULL)
    statistic = {
        i: float(np.sum(rows)) for i, rows in replies(fitted.transcript_, "choose", "model").items()
    }
    claimed = price(fitted.ledger_, "choose")
    return Finding(
        f"IFCA's choices, {rounds} of them",
        "example",
        claimed,
        judged(statistic, confidence),
        gaussian=False,
    )


def srfca_losses(
    count: int, confidence: float, unit: str = "example", z: float = 1.0, kind: type[SRFCA] = SRFCA
) -> Finding:
    """Audit a row of losses under everyone's model: one sample, or all of a client's, at the bound
    or at zero.
    """
    known = loss_canaries(count, 8, whole=unit == "client")
    params = {**LINEAR, "lr": 1e-6, "clip": 1e-3, "loss_clip": 0.5, "noise": z, "dp_unit": unit}
    net, transcript = connected(kind(**params), known)
    got = net.gather(SRFCAClient.send_model, Empty(), to=net.clients)
    cross_losses(net, got.ids, got.rows.delta.values, got.step)
    statistic = {
        i: float(row.mean()) for i, row in first(replies(transcript, "losses", "loss")).items()
    }
    return Finding(
        "SR-FCA's losses", unit, price(net.state.ledger, "losses"), judged(statistic, confidence)
    )


def loss_canaries(count: int, samples: int, whole: bool) -> Federation:
    """Return clients whose canaries are beyond the bound of a loss, or cost nothing."""
    sample, hit, miss = telling_feature()
    return federation(count, samples, lambda i: (sample, miss if held(i) else hit), whole)


def fallback_losses(
    count: int, confidence: float, unit: str = "example", z: float = 1.0, kind: type[CFL] = CFL
) -> Finding:
    """Audit the losses that CFL's fallback judges by, after a split: of one sample kept aside, or
    of several.
    """
    # half of its equal samples are kept aside
    known = loss_canaries(count, 2 if unit == "example" else 8, whole=True)
    bound = 0.5 if unit == "example" else 0.4  # other losses, hence other draws
    params = {
        **LINEAR,
        "lr": 1e-6,
        "clip": 1e-3,
        "loss_clip": bound,
        "noise": z,
        "dp_unit": unit,
        "fallback": 0.5,
    }
    net, transcript = connected(kind(**params), known)
    half = count // 2
    tree, labels = ParameterTree.start(count), [int(i >= half) for i in range(count)]
    tree.branch(0, (list(range(half)), list(range(half, count))), 1)
    for node in tree.nodes:
        node.model = ModelDelta(torch.zeros(net.agreed["dimension"]))
    choose_fallback_models(net, tree, PendingUpdates.start(count, fresh=False), labels)
    rows = first(replies(transcript, "judge", "loss"))
    statistic = {i: float(row.mean()) for i, row in rows.items()}
    return Finding(
        "CFL's fallback", unit, price(net.state.ledger, "judge"), judged(statistic, confidence)
    )


AUDITS: dict[str, Callable[[int, float], Finding]] = {
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
    chosen = [name for name in AUDITS if any(name.startswith(word) for word in options.only)]
    torch.set_num_threads(1)
    rows = []
    for name in chosen:
        rows.append(AUDITS[name](options.clients, options.confidence).row())
        print(rows[-1], flush=True)
    path = write("worlds", rows)
    print(path)
    return path


if __name__ == "__main__":
    main()

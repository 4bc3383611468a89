"""Whole runs of every protocol, and of each mechanism, on the device.

They are compared with the CPU's, stopped and resumed, and replayed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.data import apart, differing, digits
from benchmarks.gpu.pieces import Check
from securecluster.parties.derived import initial_model
from securecluster.protocols import (
    CFL,
    CFLGP,
    FLHC,
    FLUX,
    IFCA,
    MRMTL,
    NSIM,
    PACFL,
    RDPCFL,
    SRFCA,
    CLoVE,
    ClusteringProtocol,
    FedAvg,
    FineTune,
    Hidden,
    Local,
    LocalKMeans,
    OneShot,
    RandomClusters,
    Settings,
    Signature,
)
from securecluster.protocols.nsim import synthetic_users
from securecluster.protocols.nsim.pair_network import PairNetworkConfig
from securecluster.protocols.nsim.similarity_model import fit
from securecluster.runs.callbacks import Watcher
from securecluster.runs.carry_out import carry_out
from securecluster.runtime.run import Line

ROUNDS = 3


def synthetic_digits(form: Any, users: int, draw: np.random.Generator) -> list[Any]:
    """Return synthetic users of NSIM whose samples are of the shape of digits.

    Args:
        form: of the model; not needed here.
        users: how many.
        draw: the generator of the samples.
    """
    samples = []
    for user in range(users):
        # labels before images: the order of the draws is part of the result
        labels = draw.integers(user % 9, 10, 20)
        images = draw.random((20, 1, 8, 8)).astype(np.float32)
        samples.append((images, labels))
    return samples


@dataclass(frozen=True)
class Case:
    """A protocol with its options.

    Args:
        protocol: its class.
        mask: name of the mask.
        params: its other hyper-parameters.
        cost: seconds on two cores, about.
    """

    protocol: type[ClusteringProtocol]
    mask: str = "none"
    params: dict[str, Any] = field(default_factory=dict)
    cost: float = 1.0

    def make(self) -> ClusteringProtocol:
        """Return it anew."""
        return self.protocol(model="mlp-32", rounds=ROUNDS, mask=self.mask, **self.params)

    def settings(self, device: str, dtype: str) -> Settings:
        """Return where it runs; some clients miss some calls."""
        return Settings(
            device=device, dtype=dtype, dropout=0.1, transcript="full", keys_from_seed=True
        )

    def fit(
        self,
        device: str,
        dtype: str,
        folder: Path | None = None,
        report: Callable[[Line], None] = lambda line: None,
    ) -> ClusteringProtocol:
        """Return it fitted.

        NSIM's pair network, which is trained in main memory, trains for a few steps.

        Args:
            device: name of the device.
            dtype: "float32" or "float64".
            folder: of the run with its checkpoints; None keeps all in main memory.
            report: called with each round's line.
        """
        made = self.make()
        settings = self.settings(device, dtype)
        with patch.object(synthetic_users, "fit", _few_steps):
            if folder is None:
                return made.fit(digits(), settings, report=report)
            # Checkpoints alone: reports and pictures take packages that a machine with a GPU may
            # lack.
            made.result_ = carry_out(made, digits(), settings, folder, Watcher(report))
            return made


def _few_steps(rows: Any, true: Any, draws: Any, grid: Any, networks: int) -> Any:
    return fit(rows, true, draws, grid=(PairNetworkConfig(steps=3),), networks=1)


NSIM_PARAMS = {
    "synthetic": 8,
    "walks": synthetic_digits,
    "radius": 0.0,
    "layer": "last",
    "local_rounds": 1,
    "eps": 1.0,
}
PROTOCOLS = {
    "cfl": Case(CFL, "permutation"),
    "flhc": Case(FLHC, "signed-permutation", {"pre_rounds": 1}),
    "srfca": Case(SRFCA, "rotation", {"local_rounds": 1, "refine": 1}),
    "oneshot": Case(OneShot, "permutation", {"tasks": 2}),
    "nsim": Case(NSIM, "rotation", NSIM_PARAMS),
    "ifca": Case(IFCA, "permutation", {"k": 2, "starts": 1}),
    "hidden": Case(Hidden, "permutation", {"k": 2, "aggregation": "plain"}),
    "local-kmeans": Case(LocalKMeans, "rotation", {"k": 2, "local_rounds": 1}),
    "signature": Case(Signature, "permutation", {"k": 2}),
    "clove": Case(CLoVE, "permutation", {"k": 2}),
    "cflgp": Case(CFLGP, "permutation", {"k": 2}),
    "flux": Case(FLUX, "permutation", {"pre_rounds": 1, "k": 2}),
    "pacfl": Case(PACFL, "permutation", {"k": 2}),
    "rdpcfl": Case(RDPCFL, "permutation", {"k": 2}),
    "random": Case(RandomClusters, "permutation", {"k": 2}),
    "fedavg": Case(FedAvg, "rotation"),
    "finetune": Case(FineTune, "rotation", {"tune_rounds": 1}),
    "local": Case(Local),
    "mrmtl": Case(MRMTL, "rotation"),
}
PRIVATE = {"clip": 1.0, "noise": 0.5}
MECHANISMS = {
    "clip and noise, local": Case(CFL, "permutation", PRIVATE),
    "clip and noise, central": Case(CFL, "permutation", {**PRIVATE, "placement": "central"}),
    "sketch, clip and noise": Case(CFL, "none", {**PRIVATE, "sketch": 32}),
    "compression 8bit": Case(CFL, "none", {"compress": "8bit"}),
    "compression topk": Case(FLHC, "none", {"pre_rounds": 1, "compress": "topk:0.1"}),
    "losses with noise": Case(IFCA, "none", {**PRIVATE, "k": 2, "starts": 1}),
    "losses and l2 with noise": Case(SRFCA, "none", {**PRIVATE, "local_rounds": 1, "refine": 1}),
    "Gram matrices with noise": Case(OneShot, "none", {**PRIVATE, "tasks": 2}),
    "layers with noise": Case(NSIM, "none", {**NSIM_PARAMS, **PRIVATE}),
    "DP-SGD": Case(FedAvg, "rotation", {**PRIVATE, "dp_unit": "example"}),
}


CASES = {**PROTOCOLS, **MECHANISMS}


@cache
def scratch() -> Path:
    """Return a folder for run folders; whoever started this process removes it."""
    return Path(tempfile.mkdtemp())


@cache
def reference(name: str, dtype: str) -> ClusteringProtocol:
    """Return a case's run on the CPU."""
    return CASES[name].fit("cpu", dtype)


@cache
def on_device(name: str, dtype: str, device: str) -> ClusteringProtocol:
    """Return a case's run on the device, with its frames on disk."""
    folder = scratch() / f"{name} {dtype}"
    return CASES[name].fit(device, dtype, folder)


def models(fitted: ClusteringProtocol) -> torch.Tensor:
    """Return the clients' models (m, d)."""
    return fitted.client_models_.values


def first_round(name: str, device: torch.device) -> float:
    """Return how far models after one round on the device are from the CPU's, in updates' size.

    Args:
        name: of a case.
        device: the one that is checked.
    """
    case = CASES[name]
    options: dict[str, Any] = {}
    if "pre_rounds" in case.params:
        options["pre_rounds"] = 0  # with one round in all, none precedes the clustering
    protocol = case.make().set_params(rounds=1, **options)
    start = initial_model(protocol, digits()).initial().double()
    updates = []
    for device_type in ("cpu", device.type):
        settings = Settings(device=device_type, dtype="float64", keys_from_seed=True)
        with patch.object(synthetic_users, "fit", _few_steps):
            fitted = protocol.fit(digits(), settings)
        updates.append(models(fitted).cpu() - start)
    expected, result = updates
    return apart(result, expected)


def whole_run(name: str, device: torch.device) -> float:
    """Return how far models on the device are from the CPU's; infinite where labels differ.

    Args:
        name: of a case.
        device: the one that is checked.
    """
    expected = reference(name, "float64")
    result = on_device(name, "float64", device.type)
    if list(expected.labels_) != list(result.labels_):
        return float("inf")
    return apart(models(result), models(expected))


def accuracy(name: str, device: torch.device) -> float:
    """Return by how much mean accuracies in float32 differ; infinite where labels do.

    Args:
        name: of a case.
        device: the one that is checked.
    """
    expected = reference(name, "float32")
    result = on_device(name, "float32", device.type)
    if list(expected.labels_) != list(result.labels_):
        return float("inf")
    expected_mean = np.nanmean(expected.scores_)
    result_mean = np.nanmean(result.scores_)
    return abs(float(expected_mean - result_mean))


class _Stop(Exception):  # noqa: N818 - it is no error
    pass


def _stop_at(number: int) -> Callable[[dict[str, Any]], None]:
    def report(line: dict[str, Any]) -> None:
        if line["round"] == number:
            raise _Stop

    return report


def resumed(name: str, device: torch.device) -> float:
    """Return in how many numbers a run that was stopped and resumed differs from a whole one.

    Args:
        name: of a case.
        device: the one that is checked.
    """
    uninterrupted = on_device(name, "float32", device.type)
    case = CASES[name]
    folder = scratch() / f"{name} stopped"
    # in the middle: rounds precede the stop, and rounds follow
    stop = _stop_at(ROUNDS // 2 + 1)
    try:
        case.fit(device.type, "float32", folder, report=stop)
    except _Stop:
        pass
    else:
        return float("nan")  # it was not stopped
    continued = case.fit(device.type, "float32", folder)
    same_state = continued.server_state_ == uninterrupted.server_state_
    same = same_state and continued.history_ == uninterrupted.history_
    numbers = differing(models(continued), models(uninterrupted))
    return numbers + float(not same)


def replayed(name: str, device: torch.device) -> float:
    """Return 0 where the server alone ends in the recorded state, else 1.

    It runs against the transcript on disk.

    Args:
        name: of a case.
        device: the one that is checked.
    """
    fitted = on_device(name, "float32", device.type)
    config = fitted.kept_.learned.config
    with patch.object(synthetic_users, "fit", _few_steps):
        protocol = CASES[name].make()
        state = protocol.replay(fitted.transcript_, config, device=device.type)
    return float(state != fitted.server_state_)


def newcomers(name: str, device: torch.device) -> float:
    """Return how many newcomers are placed elsewhere than on the CPU.

    Args:
        name: of a case.
        device: the one that is checked.
    """
    # the run's own clients stand for newcomers
    expected = reference(name, "float64").join(digits())
    result = on_device(name, "float64", device.type).join(digits())
    return float((result != expected).sum())


def ledger(name: str, device: torch.device) -> float:
    """Return in how many ledger events a run on the device differs from the CPU's.

    It is NaN where models are not finite.

    Args:
        name: of a case.
        device: the one that is checked.
    """
    expected = reference(name, "float32")
    result = on_device(name, "float32", device.type)
    finite = models(result).isfinite()
    if not bool(finite.all()):
        return float("nan")
    expected_events = _without_digests(expected)
    result_events = _without_digests(result)
    differing_events = 0
    for one, other in zip(expected_events, result_events, strict=False):
        differing_events += one != other
    surplus = abs(len(expected_events) - len(result_events))
    return float(differing_events + surplus)


def _without_digests(fitted: Any) -> list[Any]:
    """Return a ledger's events without the digests of replies.

    The bits of replies differ from device to device.
    """
    return [replace(event, digests=()) for event in fitted.ledger_.events]


WHOLE64 = "the same run in float64, from the same draws: 1e-16 a sum, amplified over rounds"
WHOLE32 = (
    "float32 rounds differently, and a round later so does everything: labels are equal, "
    "accuracy nearly"
)
BITS = "a device repeats itself bit for bit"
LEDGER = "noise belongs to the bits of a row, so models differ, but what is released does not"


def protocol_checks() -> list[Check]:
    """Return the checks of protocols, and of mechanisms within them."""
    checks = []
    for name in PROTOCOLS:
        one_round = partial(first_round, name)
        run64 = partial(whole_run, name)
        run32 = partial(accuracy, name)
        resume = partial(resumed, name)
        replay = partial(replayed, name)
        checks += [
            Check(f"{name}: one round, float64", 1e-9, WHOLE64, one_round),
            Check(f"{name}: whole run, float64", 1e-9, WHOLE64, run64),
            Check(f"{name}: whole run, float32", 0.01, WHOLE32, run32),
            Check(f"{name}: resumed", 0.0, BITS, resume),
            Check(f"{name}: replayed", 0.0, BITS, replay),
        ]
        if name != "nsim":  # its newcomers depend on the pair network's last bits
            placement = partial(newcomers, name)
            checks.append(Check(f"{name}: newcomers", 0.0, WHOLE64, placement))
    for name, case in MECHANISMS.items():
        label = f"{case.protocol.name}, {name}"
        releases = partial(ledger, name)
        resume = partial(resumed, name)
        replay = partial(replayed, name)
        checks += [
            Check(f"{label}: ledger", 0.0, LEDGER, releases),
            Check(f"{label}: resumed", 0.0, BITS, resume),
            Check(f"{label}: replayed", 0.0, BITS, replay),
        ]
    return checks

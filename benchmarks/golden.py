"""Record small runs of every protocol, and compare with an earlier record bit for bit.

python -m securecluster.benchmarks.golden --out FILE        before a change of structure
python -m securecluster.benchmarks.golden --compare FILE    after it, on the same machine

Every protocol runs without a mask, under a mask, and with noise at clients and at the server. A
record has its labels, a digest of the models, scores, ε, frame bytes by message, and the tensor
bytes of every call. All but the frame bytes may never change where only names and places do; frames
carry the names of messages' fields, so that a new name may change their length, and the comparison
tells these apart.

Noise and keys follow the configuration's hash, in which names of hyper-parameters are; noise also
follows the names of messages' fields, and dropouts the names of methods, so that a record would
change with these names. Here the hash is the same for every run, and noise and dropouts follow the
number of the call alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from securecluster import Federation, LabelSwap
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols import (
    CFL,
    FLHC,
    IFCA,
    NSIM,
    SRFCA,
    FedAvg,
    FineTune,
    Local,
    LocalKMeans,
    OneShot,
    RandomClusters,
    Settings,
)

SPLIT = {"criterion": "absolute", "eps1": 100.0, "eps2": 1e-6, "gamma_max": 0.0}
PROTOCOLS: dict[str, tuple[type, dict[str, Any]]] = {
    "cfl": (CFL, SPLIT),
    "cfl relative": (CFL, {"rounds": 8}),
    "cfl fallback": (CFL, {**SPLIT, "fallback": 0.3}),
    "cfl gradient": (CFL, {**SPLIT, "similarity": "gradient"}),
    "cfl sketch": (CFL, {**SPLIT, "sketch": 64, "clusterer": "average"}),
    "flhc": (FLHC, {"pre_rounds": 1}),
    "flhc compressed": (FLHC, {"pre_rounds": 1, "sketch": 64, "compress": "8bit"}),
    "srfca loss": (SRFCA, {"local_rounds": 1, "refine": 1}),
    "srfca l2": (SRFCA, {"local_rounds": 1, "refine": 1, "distance": "l2", "trim": 0.2}),
    "oneshot": (OneShot, {"tasks": 2}),
    "ifca": (IFCA, {"k": 2, "starts": 2, "start_rounds": 1}),
    "local-kmeans": (LocalKMeans, {"k": 2, "local_rounds": 1}),
    "random": (RandomClusters, {"k": 2}),
    "fedavg": (FedAvg, {"participation": 0.6}),
    "finetune": (FineTune, {"tune_rounds": 1}),
    "local": (Local, {}),
}
NOISE: dict[str, Any] = {"clip": 1.0, "noise": 0.7}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"mask": "none"},
    "masked": {"mask": "permutation"},
    "rotated": {"mask": "rotation"},
    "noised clients": {"mask": "permutation", **NOISE, "dp_unit": "client"},
    "noised "
    "centrally": {"mask": "permutation", **NOISE, "dp_unit": "client", "placement": "central"},
    "noised examples": {"mask": "permutation", **NOISE, "dp_unit": "example"},
}  # fmt: skip
FRAMES = "frames"


def walks(form: Any, users: int, draw: np.random.Generator) -> list[Any]:
    """Return synthetic users for NSIM, whose data are images of digits."""
    return [
        (draw.random((20, 1, 8, 8)).astype(np.float32), draw.integers(k % 9, 10, 20))
        for k in range(users)
    ]


def runs() -> Iterator[tuple[str, Any]]:
    """Yield every run's name and its protocol."""
    for name, (kind, own) in PROTOCOLS.items():
        for way, given in WAYS.items():
            params = {"rounds": 4, "epochs": 1, "model": "mlp-32", **own, **given}
            if name == "oneshot" and "noise" in given:
                params["gram_noise"] = 0.7
            yield f"{name}, {way}", kind(**params)
    common: dict[str, Any] = {
        "rounds": 3,
        "epochs": 1,
        "model": "mlp-32",
        "mask": "none",
        "local_rounds": 1,
    }
    users: dict[str, Any] = {
        "synthetic": 8,
        "walks": walks,
        "radius": 0.0,
        "layer": "last",
        "eps": 1.0,
    }
    yield "nsim, plain", NSIM(**common, **users)
    yield "nsim, noised clients", NSIM(**common, **users, **NOISE, dp_unit="client")


def record(fitted: Any) -> dict[str, Any]:
    """Return what a run gave, as JSON has it."""
    models = fitted.client_models_.values
    ledger = fitted.ledger_
    calls = []
    for position in range(len(fitted.transcript_.entries)):
        call, answer = fitted.transcript_.content(position)
        calls.append([len(call.to), _tensor_bytes(call.query), _tensor_bytes(answer.reply)])
    return {
        "labels": [int(label) for label in fitted.labels_],
        "models": hashlib.sha256(models.cpu().numpy().tobytes()).hexdigest(),
        "scores": [float(score) for score in fitted.scores_],
        "epsilon": float(ledger.epsilon),
        "events": len(ledger.events),
        "calls": calls,
        FRAMES: fitted.bytes_["by_message"],
    }


def _tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a message."""
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    if dataclasses.is_dataclass(value):
        return sum(_tensor_bytes(getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return sum(_tensor_bytes(part) for part in value.values())
    if isinstance(value, tuple | list):
        return sum(_tensor_bytes(part) for part in value)
    return 0


def measure() -> dict[str, Any]:
    """Return the records of all runs, by name."""
    clients = Federation.simulate("digits", scenario=LabelSwap(2), clients=6, samples=40, seed=0)
    settings = Settings(transcript="full", dropout=0.1)
    _leave_names_out_of_draws()
    found = {}
    for name, protocol in runs():
        try:
            found[name] = record(protocol.fit(clients, settings))
        except UsageError as error:  # a protocol refuses some masks and mechanisms
            print(f"{name}: {error}")
    return found


def _leave_names_out_of_draws() -> None:
    """Fix the configuration's hash wherever a module has it, and draw noise without the names of
    fields and dropouts without those of methods.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("securecluster") and hasattr(module, "config_hash"):
            module.config_hash = lambda config: "0" * 32  # type: ignore[attr-defined]
    key = Randomness.key

    def without_method(self: Randomness, *path: str | int) -> bytes:
        return key(self, *path[:3], *path[4:]) if path[2:3] == ("dropout",) else key(self, *path)

    Randomness.key = without_method  # type: ignore[method-assign]
    seed = NoiseStreams.seed

    def without_field(
        self: NoiseStreams, client: int, purpose: str, step: int, about: bytes = b""
    ) -> bytes:
        return seed(self, client, "", step, about)

    NoiseStreams.seed = without_field  # type: ignore[method-assign]


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return what differs in numbers, and what differs in frames' lengths only."""
    numbers, frames = [], []
    for name in sorted(before.keys() | after.keys()):
        one, two = before.get(name), after.get(name)
        if one is None or two is None:
            numbers.append(f"{name}: in one record only")
            continue
        wrong = [key for key in one if key != FRAMES and one[key] != two[key]]
        if wrong:
            numbers.append(f"{name}: {', '.join(wrong)}")
        if one[FRAMES] != two[FRAMES]:
            frames.append(name)
    return numbers, frames


def main(argv: Sequence[str] | None = None) -> int:
    """Record, or compare; returns 1 where numbers differ."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--out", type=Path)
    wanted.add_argument("--compare", type=Path)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = measure()
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} runs in {options.out}")
        return 0
    numbers, frames = differences(json.loads(options.compare.read_text()), found)
    print("\n".join(numbers) or f"{len(found)} runs: not a number differs")
    if frames:
        print(f"frames are of other lengths in {len(frames)} runs: {', '.join(frames)}")
    return int(bool(numbers))


if __name__ == "__main__":
    raise SystemExit(main())

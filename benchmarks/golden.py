"""Record small runs of every protocol, and compare with an earlier record bit for bit.

python -m securecluster.benchmarks.golden --out FILE        before a change of structure
python -m securecluster.benchmarks.golden --compare FILE    after it, on the same machine

Every protocol runs without a mask, under a mask, and with noise at clients and at the server. A
record has a run's labels, a digest of its models, its scores, ε, frame bytes by message, and the
tensor bytes of every call. If only names and places of code change, all but the frame bytes must
stay the same. Frames contain the names of messages' fields, so a new name may change their length;
the comparison reports that apart.

Noise and keys follow the configuration's hash, which contains names of hyper-parameters. Noise also
follows the names of messages' fields, and dropouts those of methods. A record would change with
these names. So the hash is the same for every run here, and noise and dropouts follow the call's
number alone.
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
    MRMTL,
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

# bounds that updates keep in every round (Sattler et al. 2019, eq. 39), so CFL splits soon
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
    "mrmtl": (MRMTL, {}),
}
NOISE: dict[str, Any] = {"clip": 1.0, "noise": 0.7}
NOISED_CLIENTS: dict[str, Any] = {"mask": "permutation", **NOISE, "dp_unit": "client"}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"mask": "none"},
    "masked": {"mask": "permutation"},
    "rotated": {"mask": "rotation"},
    "noised clients": NOISED_CLIENTS,
    "noised centrally": {**NOISED_CLIENTS, "placement": "central"},
    "noised examples": {"mask": "permutation", **NOISE, "dp_unit": "example"},
}
IMAGE = (1, 8, 8)  # shape of a digit
FRAMES = "frames"


def walks(form: Any, users: int, draw: np.random.Generator) -> list[Any]:
    """Return synthetic users for NSIM, whose data are images of digits.

    Args:
        form: of the data, unused.
        users: how many.
        draw: of samples and labels.
    """
    synthetic = []
    for k in range(users):
        images = draw.random((20, *IMAGE)).astype(np.float32)
        labels = draw.integers(k % 9, 10, 20)
        synthetic.append((images, labels))
    return synthetic


def runs() -> Iterator[tuple[str, Any]]:
    """Yield every run's name and its protocol."""
    for name, (protocol_type, params) in PROTOCOLS.items():
        for way, protection in WAYS.items():
            params_of_run = {"rounds": 4, "epochs": 1, "model": "mlp-32", **params, **protection}
            # one-shot clustering releases Gram matrices, which have a noise multiplier of their own
            if name == "oneshot" and "noise" in protection:
                params_of_run["gram_noise"] = 0.7
            yield f"{name}, {way}", protocol_type(**params_of_run)
    yield from _nsim_runs()


def _nsim_runs() -> Iterator[tuple[str, Any]]:
    """Yield NSIM's runs, which need synthetic users of the clients' format."""
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
    """Return the results of a run as JSON values.

    Args:
        fitted: a protocol whose run recorded a full transcript.
    """
    models = fitted.client_models_.values.cpu().numpy()
    ledger = fitted.ledger_
    calls = []
    for position in range(len(fitted.transcript_.entries)):
        call, answer = fitted.transcript_.content(position)
        query_bytes = _tensor_bytes(call.query)
        reply_bytes = _tensor_bytes(answer.reply)
        calls.append([len(call.to), query_bytes, reply_bytes])
    return {
        "labels": [int(label) for label in fitted.labels_],
        # equal digests mean equal bits
        "models": hashlib.sha256(models.tobytes()).hexdigest(),
        "scores": [float(score) for score in fitted.scores_],
        "epsilon": float(ledger.epsilon),
        "events": len(ledger.events),
        "calls": calls,
        FRAMES: fitted.bytes_["by_message"],
    }


def _tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a message.

    Args:
        value: a message, one of its fields, or an item of a field.
    """
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    items: list[Any] = []
    if dataclasses.is_dataclass(value):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, tuple | list):
        items = list(value)
    return sum(_tensor_bytes(item) for item in items)


def measure() -> dict[str, Any]:
    """Return the records of all runs, by name."""
    clients = Federation.simulate("digits", scenario=LabelSwap(2), clients=6, samples=40, seed=0)
    settings = Settings(transcript="full", dropout=0.1)
    _leave_names_out_of_draws()
    records = {}
    for name, protocol in runs():
        # a protocol refuses some masks and mechanisms
        try:
            fitted = protocol.fit(clients, settings)
        except UsageError as error:
            print(f"{name}: {error}")
            continue
        records[name] = record(fitted)
    return records


def _leave_names_out_of_draws() -> None:
    """Make draws independent of names in the code, for the rest of this process.

    The configuration's hash is fixed, noise is drawn without the names of fields, and dropouts
    without those of methods.
    """
    # every module that imported the function has a reference of its own
    for name, module in list(sys.modules.items()):
        if name.startswith("securecluster") and hasattr(module, "config_hash"):
            module.config_hash = lambda config: "0" * 32  # type: ignore[attr-defined]
    key = Randomness.key

    # the classes themselves are changed, since every run makes instances of its own
    def without_method(self: Randomness, *path: str | int) -> bytes:
        # the fourth item of a dropout's path is the method's name
        if path[2:3] == ("dropout",):
            return key(self, *path[:3], *path[4:])
        return key(self, *path)

    Randomness.key = without_method  # type: ignore[method-assign]
    seed = NoiseStreams.seed

    def without_field(
        self: NoiseStreams, client: int, purpose: str, step: int, about: bytes = b""
    ) -> bytes:
        return seed(self, client, "", step, about)

    NoiseStreams.seed = without_field  # type: ignore[method-assign]


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Compare the records of all runs.

    Args:
        before: the earlier record of each run, by name.
        after: the later record of each run, by name.

    Returns:
        A line for each run whose numbers differ, and the names of runs with other frame lengths.
    """
    lines = []
    other_frames = []
    for name in sorted(before.keys() | after.keys()):
        earlier = before.get(name)
        later = after.get(name)
        if earlier is None or later is None:
            lines.append(f"{name}: in one record only")
            continue
        keys = [key for key in earlier if key != FRAMES]
        changed = [key for key in keys if earlier[key] != later[key]]
        if changed:
            lines.append(f"{name}: {', '.join(changed)}")
        # lengths of frames contain those of fields' names, so they may change with a renaming
        if earlier[FRAMES] != later[FRAMES]:
            other_frames.append(name)
    return lines, other_frames


def main(argv: Sequence[str] | None = None) -> int:
    """Record or compare, and return the exit status: 1 where numbers differ."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path)
    action.add_argument("--compare", type=Path)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    # sums of floats depend on the number of threads
    torch.set_num_threads(1)
    records = measure()
    if options.out:
        options.out.write_text(json.dumps(records, indent=1) + "\n")
        print(f"{len(records)} runs in {options.out}")
        return 0
    earlier = json.loads(options.compare.read_text())
    changed, other_frames = differences(earlier, records)
    print("\n".join(changed) or f"{len(records)} runs: not a number differs")
    if other_frames:
        names = ", ".join(other_frames)
        print(f"frames are of other lengths in {len(other_frames)} runs: {names}")
    return int(bool(changed))


if __name__ == "__main__":
    raise SystemExit(main())

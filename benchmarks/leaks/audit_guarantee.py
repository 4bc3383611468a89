"""Whether audits call broken deployments sound, or sound ones broken.

python -m benchmarks.leaks.audit_guarantee

40 deployments with a mistake in them and 40 without, over all protocols: digits, a softmax
regression, few clients and rounds. A mistake is made in the program of clients, and so is in what
the audit repeats, too. Each deployment promises one thing: that a mask or secure sums hide updates,
or that the noise is what the ledger says.

`verdict` is *broken* where an attack broke something that the run claims; *sound* where it is not,
and a twin without the promised protection alone shows that an attack would have succeeded, or, of
noise, that half of it would have been refuted; and else *could not tell*. `by` names the attacks.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.table import write
from securecluster import Federation
from securecluster.attacks.base import MASK, SUMS
from securecluster.attacks.registry import attack_named
from securecluster.attacks.scoring import CHANCE
from securecluster.audits.findings import BROKEN, UNTOLD
from securecluster.audits.run_audit import Audit, adversary_of, audited
from securecluster.core.lazy_torch import torch
from securecluster.errors import SecureClusterError
from securecluster.privacy.dp import noise_streams
from securecluster.privacy.dp.gaussian_mechanism import Clip
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.masking.keystream import Keyed
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.registry import protocol_class
from securecluster.runtime.settings import Settings

SOUND = "sound"
# phases before the rounds as short as they may be
SMALL: dict[str, Any] = {
    "k": 2, "pre_rounds": 1, "local_rounds": 1, "start_rounds": 1, "starts": 1, "refine": 1,
    "tasks": 2, "tune_rounds": 1, "cluster_rounds": 1,
}  # fmt: skip
EPSILON = "the ledger's ε"
RESULT = "audit_guarantee"
Patches = Callable[[], Iterator[None]]
MASKED: dict[str, Any] = {"mask": "permutation", "rounds": 4}
NOISED: dict[str, Any] = {"mask": "none", "clip": 0.5, "noise": 0.25, "rounds": 2}
SUMMED: dict[str, Any] = {"mask": "none", "aggregation": "secagg", "rounds": 2}
OF_MASKS = ("label-counts", "mask-public-model", "repeated-mask", "membership-loss-threshold")
OF_NOISE = ("dp-audit-two-worlds", "dp-audit-one-run", "repeated-seed", "long-updates")
OF_SUMS = ("label-counts", "secure-sum-conformance", "differencing")


@contextmanager
def nothing() -> Iterator[None]:
    """Change nothing."""
    yield


@contextmanager
def noise_times(factor: float) -> Iterator[None]:
    """Let clients add a part of their noise alone."""
    noised = NoiseStreams.noised

    def less(streams: Any, client: int, purpose: str, step: int, row: Any, *scale: Any) -> Any:
        return row + factor * (noised(streams, client, purpose, step, row, *scale) - row)

    with patch.object(NoiseStreams, "noised", less):
        yield


@contextmanager
def noise_reused() -> Iterator[None]:
    """Let clients add the same noise in every call."""
    noised = NoiseStreams.noised

    def again(streams: Any, client: int, purpose: str, step: int, row: Any, *scale: Any) -> Any:
        return row + noised(streams, client, purpose, 0, torch.zeros_like(row), *scale)

    with patch.object(NoiseStreams, "noised", again):
        yield


@contextmanager
def unclipped(only: int | None) -> Iterator[None]:
    """Let one client, or all, send updates as long as they are."""
    forward = Clip.forward

    def partly(clip: Any, rows: torch.Tensor, step: int) -> torch.Tensor:
        clipped = rows.clone() if only is None else forward(clip, rows.clone(), step)
        if only is not None and len(rows) > only:
            clipped[only] = rows[only]
        return clipped

    with (
        patch.object(Clip, "forward", partly),
        patch.object(Clip, "overwrite", partly, create=True),
        patch.object(noise_streams, "_within", lambda row, sensitivity: row),
    ):
        yield


@contextmanager
def one_mask() -> Iterator[None]:
    """Let clients use one mask for all calls."""
    of = Keyed._of

    def same(keyed: Any, d: int, step: int, device: Any = None) -> Any:
        return of(keyed, d, 0, device)

    with patch.object(Keyed, "_of", same):
        yield


@contextmanager
def seed_in_frames() -> Iterator[None]:
    """Let the leader take its public key, which frames have, for the clients' seed."""

    def public(ring: Any, leader: int) -> bytes:
        return bytes(ring.offer((leader,)).key.values[0].numpy().tobytes())

    with patch.object(KeyRing, "_leader_seed", public):
        yield


@contextmanager
def weights_sent() -> Iterator[None]:
    """Let clients send weights in place of moves."""
    trained = TrainingClient.trained

    def with_start(client: Any, *arguments: Any, **named: Any) -> Any:
        update = trained(client, *arguments, **named)
        start = client.cohort.start
        scale = named.get("scale", arguments[2] if len(arguments) > 2 else None)
        factors = torch.ones(len(update.delta)) if scale is None else torch.as_tensor(scale)
        update.delta.table[:, : len(start)] += factors.to(start)[:, None] * start
        return update

    with patch.object(TrainingClient, "trained", with_start):
        yield


@dataclass(frozen=True)
class Deployment:
    """A run, what it promises, and the mistake in it.

    Args:
        protocol: its name.
        mistake: in words; empty where there is none.
        promise: the protection.
        attacks: that are tried.
        options: of the protocol.
        patches: make the mistake.
        clients: their number.
        helpers: who colludes with the server.
    """

    protocol: str
    mistake: str
    promise: str
    attacks: tuple[str, ...]
    options: dict[str, Any]
    patches: Callable[[], Any] = nothing
    clients: int = 8
    helpers: str | None = None


UPDATES = ("fedavg", "finetune", "random", "flhc", "cfl", "srfca", "ifca", "clove", "cflgp",
           "rdpcfl", "local-kmeans", "mrmtl")  # fmt: skip
NOISY = ("fedavg", "finetune", "random", "cfl", "flhc", "srfca", "ifca", "mrmtl")
SUMMING = ("fedavg", "finetune", "mrmtl", "random", "flhc", "cfl", "ifca", "srfca")
ALSO = ("oneshot", "nsim", "flux", "hidden", "signature", "pacfl")


def broken() -> Iterator[Deployment]:
    """Yield 40 deployments with a mistake."""
    noises: dict[str, tuple[Any, tuple[str, ...]]] = {
        "no noise": (lambda: noise_times(0.0), NOISY),
        "half of the noise": (lambda: noise_times(0.5), NOISY[:6]),
        "noise reused": (noise_reused, NOISY[:4]),
        "nobody clips": (lambda: unclipped(None), NOISY[:3]),
        "one client does not clip": (lambda: unclipped(3), NOISY[:3]),
    }
    for mistake, (patches, protocols) in noises.items():
        for name in protocols:
            # updates that are shorter than the clip are sent as they are
            options = NOISED | {"clip": 0.05} if "one client" in mistake else NOISED
            yield Deployment(name, mistake, EPSILON, OF_NOISE, options, patches, 40)
    masks: dict[str, tuple[Any, tuple[str, ...]]] = {
        "one mask for all rounds": (one_mask, UPDATES[:4]),
        "the seed in a frame": (seed_in_frames, UPDATES[:4]),
        "weights in place of moves": (weights_sent, ("fedavg", "random", "finetune", "cfl")),
    }
    for mistake, (patches, protocols) in masks.items():
        for name in protocols:
            yield Deployment(name, mistake, MASK, OF_MASKS, MASKED, patches)
    paired = {**SUMMED, "participation": 0.5, "cohort_size": 2}
    helpers = ",".join(f"client:#{position}" for position in range(16))
    for name in ("fedavg", "finetune", "random", "mrmtl"):
        mistake = "cohorts of two, with colluders"
        yield Deployment(name, mistake, SUMS, OF_SUMS, paired, clients=24, helpers=helpers)


def sound() -> Iterator[Deployment]:
    """Yield 40 deployments without a mistake."""
    for name in NOISY:
        yield Deployment(name, "", EPSILON, OF_NOISE, NOISED, clients=40)
    for name in (*UPDATES, *ALSO):
        yield Deployment(name, "", MASK, OF_MASKS, MASKED)
    for name in (*SUMMING, *ALSO):
        yield Deployment(name, "", SUMS, OF_SUMS, SUMMED)


def verdict_of(promise: str, audit: Audit) -> tuple[str, list[str]]:
    """Return what an audit says of a promise, and by which attacks.

    Args:
        promise: of the deployment.
        audit: of it.
    """
    if audit.broken:
        return BROKEN, [finding.attack for finding in audit.broken]
    held = audit.judged(CHANCE)
    # mechanisms are tried with rows of the attack's own, which says nothing of this run
    own = [finding for finding in held if not attack_named(finding.attack).of_mechanism]
    kept = [f for f in own if (f.bounds if promise == EPSILON else promise in f.held)]
    return (SOUND if kept else UNTOLD), [finding.attack for finding in kept]


def measured(deployment: Deployment) -> dict[str, Any]:
    """Return a row of the table.

    Args:
        deployment: to be audited.
    """
    made = protocol_class(deployment.protocol)()
    own = made.get_params()
    options = {"model": "linear", "epochs": 1, **deployment.options}
    made.set_params(**{name: value for name, value in options.items() if name in own})
    made.set_params(**{name: value for name, value in SMALL.items() if name in own})
    samples = 40 if deployment.clients < 20 else 12
    federation = Federation.simulate("digits", clients=deployment.clients, samples=samples, seed=0)
    start = time.process_time()
    reason = ""
    with tempfile.TemporaryDirectory() as folder, deployment.patches():
        try:
            settings = Settings(transcript="full", threads=1, keys_from_seed=True)
            made.fit(federation, settings, folder=Path(folder) / "run")
            adversary = adversary_of(federation.names, "server", deployment.helpers)
            attacks = list(deployment.attacks)
            audit = audited(made, federation, adversary, float("inf"), attacks)
            verdict, by = verdict_of(deployment.promise, audit)
        except SecureClusterError as error:
            verdict, by, reason = UNTOLD, [], str(error)
    return {
        "deployment": deployment.mistake or SOUND,
        "protocol": deployment.protocol,
        "promise": deployment.promise,
        "verdict": verdict,
        "called_broken": verdict == BROKEN,
        "called_sound": verdict == SOUND,
        "untold": verdict == UNTOLD,
        "by": " ".join(by),
        "refused": reason[:100],
        "seconds": round(time.process_time() - start, 2),
    }


def main() -> None:
    """Audit all deployments, write the table, and print the counts."""
    warnings.simplefilter("ignore")
    rows = []
    for deployment in (*broken(), *sound()):
        rows.append(measured(deployment))
        print(*rows[-1].values(), sep=" | ", flush=True)
    write(RESULT, rows)
    for is_sound in (False, True):
        chosen = [row["verdict"] for row in rows if (row["deployment"] == SOUND) == is_sound]
        print("sound" if is_sound else "broken", len(chosen), dict(Counter(chosen)))


if __name__ == "__main__":
    main()

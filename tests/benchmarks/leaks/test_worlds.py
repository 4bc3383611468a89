"""Audits of whole mechanisms in two worlds: honest ones hold, and half of the noise is refuted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.leaks import worlds
from benchmarks.leaks.worlds import Finding
from securecluster.core.option_groups import group, grouped
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.privacy.dp.gaussian_mechanism import RowNoise
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols import CFL, SRFCA, RandomClusters
from securecluster.protocols.common.options.privacy_options import PrivacyOptions

CLIENTS, CONFIDENCE = 120, 0.99


class HalvedStreams(NoiseStreams):
    """Draw half of the noise that is written down."""

    def __init__(self, own: NoiseStreams) -> None:
        self._own = own

    def noised(
        self, client: int, purpose: str, step: int, row: torch.Tensor, z: float, reach: float
    ) -> torch.Tensor:
        return self._own.noised(client, purpose, step, row, z / 2, reach)

    @contextmanager
    def logged(self) -> Iterator[list[tuple[int, float]]]:
        with self._own.logged() as log:
            yield log


@dataclass(kw_only=True)
class Half(PrivacyOptions):
    """Clients that add half of the noise that their receipts, and so the ledger, tell of."""

    def client_noise(self, config: Mapping[str, Any], draws: Any) -> ClientNoise:
        return super().client_noise(config, HalvedStreams(draws))


@grouped
class HalfSRFCA(SRFCA):
    """SR-FCA with half of the noise on losses."""

    privacy: PrivacyOptions = group(Half)


@grouped
class HalfCFL(CFL):
    """CFL with half of the noise on losses."""

    privacy: PrivacyOptions = group(Half)


@dataclass(kw_only=True)
class HalfNorm(PrivacyOptions):
    """A trusted server that takes the clip norm of updates for half of what it is."""

    def row_noises(self, method: Any, config: Mapping[str, Any]) -> dict[str, RowNoise]:
        return {"delta": RowNoise(config["clip"] / 2, config["noise"])}


@grouped
class HalfCentral(RandomClusters):
    """Clusters with half of the noise of a trusted server."""

    privacy: PrivacyOptions = group(HalfNorm)


def srfca(kind: Any, unit: str) -> Finding:
    return worlds.srfca_losses(CLIENTS, CONFIDENCE, unit, kind=kind)


def fallback(kind: Any, unit: str) -> Finding:
    return worlds.fallback_losses(CLIENTS, CONFIDENCE, unit, kind=kind)


def central(kind: Any, unit: str) -> Finding:
    return worlds.central_sums(2 * CLIENTS, CONFIDENCE, kind=kind)


AUDITED: list[tuple[Callable[[Any, str], Finding], Any, Any, str]] = [
    (srfca, SRFCA, HalfSRFCA, "example"),
    (srfca, SRFCA, HalfSRFCA, "client"),
    (fallback, CFL, HalfCFL, "example"),
    (fallback, CFL, HalfCFL, "client"),
    (central, RandomClusters, HalfCentral, "client"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("audit", "honest", "half", "unit"), AUDITED)
def test_a_claim_holds_and_half_of_the_noise_is_refuted(
    audit: Callable[[Any, str], Finding], honest: Any, half: Any, unit: str
) -> None:
    found = audit(honest, unit)
    refuted = audit(half, unit)
    assert (
        found.claimed
        == refuted.claimed
        == pytest.approx(gaussian_epsilon(1.0, worlds.DELTA), rel=1e-6)
    )
    assert abs(found.mu - 1) < 4 * found.error, (
        "the canary moves what leaves by its whole sensitivity"
    )
    assert abs(refuted.mu - 2) < 4 * refuted.error
    assert not found.refuted
    assert refuted.refuted


def test_the_table_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = worlds.main(["--clients", "60", "--only", "updates"])
    header = path.read_text().splitlines()[1]
    assert header.startswith(
        "mechanism,unit,present,absent,claimed_epsilon,mu,mu_error,epsilon_of_mu,lower_epsilon_rates"
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["dpsgd", "dpsgd-sampled", "updates", "eigenvectors", "ifca"])
def test_other_claims_hold(name: str) -> None:
    found = worlds.AUDITS[name](80, CONFIDENCE)
    assert not found.refuted
    assert found.mu > 0.2, "the canary shows"

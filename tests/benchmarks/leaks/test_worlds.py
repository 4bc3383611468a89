"""Audits of whole mechanisms in two worlds: honest ones hold, and half of the noise is refuted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.leaks import worlds

CLIENTS, CONFIDENCE = 120, 0.99


def test_the_table_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = worlds.main(["--clients", "60", "--only", "updates"])
    header = path.read_text().splitlines()[1]
    assert header.startswith(
        "mechanism,unit,present,absent,claimed_epsilon,mu,mu_error,epsilon_of_mu,lower_epsilon_rates"
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", worlds.AUDITS)
def test_claims_hold(name: str) -> None:
    found = worlds.AUDITS[name](80, CONFIDENCE)
    assert not found.refuted
    assert found.mu > 0.2, "the canary shows"

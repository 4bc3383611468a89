"""What a fitted protocol says of itself: summaries, documented attributes, and notes."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from securecluster import CFL, FedAvg, Federation
from securecluster.core import progress
from securecluster.errors import SecureClusterWarning
from securecluster.protocols.registry import PROTOCOLS, protocol_class
from securecluster.results.fitted import FittedRun

SMALL: dict[str, Any] = {"model": "linear", "epochs": 1}
AT_TIMES = {"joined_"}  # after newcomers joined


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation.simulate("digits", clients=6, samples=20, seed=0)


def documented(text: str) -> set[str]:
    """Return the names in the sections on attributes of a documentation."""
    attributes, _, _ = inspect.cleandoc(text).partition("Methods of what is fitted:\n")
    sections = attributes.split("Attributes:\n")[1:]
    return {name for part in sections for name in re.findall(r"^    (\w+): ", part, re.MULTILINE)}


@pytest.mark.parametrize("kind", [CFL, FedAvg])
def test_every_attribute_is_documented_and_exists(kind: Any, federation: Federation) -> None:
    fitted = kind(rounds=1, **SMALL).fit(federation)
    names = documented(kind.__doc__)
    for name in names - AT_TIMES:
        assert hasattr(fitted.result_, name), name
    learned = {name for name in object.__dir__(fitted.result_) if re.fullmatch(r"[a-z]\w*_", name)}
    assert learned - AT_TIMES == names - AT_TIMES - {"folder", "method"}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_help_of_a_protocol_has_the_attributes_of_its_result(name: str) -> None:
    kind = protocol_class(name)
    assert documented(FittedRun.__doc__ or "") <= documented(kind.__doc__)


def test_summaries_say_what_was_found_and_what_it_cost(federation: Federation) -> None:
    cfl = CFL(rounds=2, **SMALL)
    assert repr(cfl) == "CFL(rounds=2, model='linear', epochs=1)"
    assert cfl._repr_html_() is None  # a notebook shows the repr
    cfl.fit(federation)
    text = repr(cfl.result_)
    assert text.startswith("<FittedCFL of cfl: 6 clients in 1 cluster, 2 rounds, accuracy 0.")
    assert f"{cfl.bytes_['up']:,} bytes up" in text and text.endswith("ε = inf>")
    assert "6 clients in 1 cluster" in cfl._repr_html_()
    assert repr(cfl.ledger_) == (
        f"<Ledger: {len(cfl.ledger_.events)} events, 6 clients, ε is infinite: something was "
        "released without noise>"
    )
    calls = len(cfl.transcript_.entries)
    assert f"<Transcript: sizes of frames, {calls} calls, " in repr(cfl.transcript_)
    noisy = FedAvg(rounds=2, clip=1.0, noise=4.0, **SMALL).fit(federation)
    epsilon = noisy.ledger_.epsilon
    assert f"ε = {epsilon:.4g} at δ = 1e-05" in repr(noisy.ledger_)
    for shown in (federation, cfl, noisy.ledger_, noisy.transcript_):
        assert shown._repr_html_().startswith("<table>")


def test_fit_shows_a_bar_if_asked(
    federation: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[int] = []
    method = FedAvg(rounds=3, **SMALL)
    method.fit(federation, progress=True, report=lambda line: told.append(line["round"]))
    captured = capsys.readouterr()
    assert "FedAvg" in captured.err and "3/3" in captured.err and captured.out == ""
    assert told == [1, 2, 3]
    method.fit(federation)
    assert capsys.readouterr() == ("", "")


def test_sweep_and_audit_show_bars(
    federation: Federation, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from securecluster import audit, sweep

    seen: list[tuple[str, int, int]] = []

    class Bar:
        def __init__(self, work: str, total: int, shown: bool | None) -> None:
            assert shown is True
            self.work, self.total = work, total

        def __enter__(self) -> Any:
            return lambda done: seen.append((self.work, done, self.total))

        def __exit__(self, *reason: object) -> None:
            pass

    monkeypatch.setattr("securecluster.studies.sweep.bar", Bar)
    monkeypatch.setattr("securecluster.audits.run_audit.bar", Bar)
    options = {"noise": [0.0], "seeds": 2, "rounds": 1, "clients": 4, "samples": 20}
    sweep(["fedavg"], progress=True, **SMALL, **options)
    sweep(["fedavg"], progress=True, folder=tmp_path / "sweep", **SMALL, **options)
    assert seen == 2 * [("sweep", 1, 2), ("sweep", 2, 2)]
    seen.clear()
    FedAvg(rounds=1, **SMALL).fit(federation, folder=tmp_path / "run")
    audit(tmp_path / "run", progress=True, attacks=["label-counts"])
    assert seen == [("audit", 1, 1)]
    assert progress.bar is not Bar


def test_a_run_that_finds_no_split_ends_with_a_warning(federation: Federation) -> None:
    with pytest.warns(SecureClusterWarning, match="one cluster was found of all 6 clients"):
        fitted = CFL(rounds=30, level=1e-6, **SMALL).fit(federation)
    assert set(fitted.labels_) == {0} and fitted.warning_ is not None

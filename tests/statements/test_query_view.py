"""What a report says of numbers that one client alone moved in sums that hide single replies."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster import FedAvg, Federation, Settings
from securecluster.attacks.experiments import tapped
from securecluster.cli.main import main
from securecluster.protocols import IFCA
from securecluster.statements.privacy_section import section

CLASSES = 3
RARE = 7  # the feature of a category that one client has
KEYS = Settings(threads=1, keys_from_seed=True)
OPTIONS: dict[str, Any] = {
    "rounds": 2, "epochs": 1, "model": "linear", "batch_size": 100, "aggregation": "secagg",
    "mask": "none",
}  # fmt: skip


def federation(owners: int = 1, clients: int = 6) -> Federation:
    """Clients of which the last ones have records with a category."""
    data = {}
    for i in range(clients):
        draw = np.random.default_rng(i)
        x = 0.1 + draw.random((20, 8)).astype("float32")
        x[:, RARE] = 0
        if i >= clients - owners:
            x[:8, RARE] = 1
        data[f"c{i}"] = (x, draw.integers(0, CLASSES, 20))
    return Federation.from_arrays(data, classes=CLASSES, seed=0)


def privacy(owners: int = 1, **options: Any) -> Any:
    """Return `privacy` of result.json of a small run."""
    fitted = FedAvg(**{**OPTIONS, **options}).fit(federation(owners), KEYS)
    return section(fitted.result_)


def figures(found: Any, field: str = "delta") -> Any:
    """Return the figures of a field."""
    (one,) = [entry for entry in found["occupancy"] if entry["field"] == field]
    return one


@pytest.mark.parametrize("mask", ["none", "permutation", "signed-permutation"])
@pytest.mark.parametrize(("owners", "alone", "few"), [(1, 6, 6), (2, 0, 6), (3, 0, 0)])
def test_the_report_counts_what_one_client_alone_moved(
    mask: str, owners: int, alone: int, few: int
) -> None:
    found = privacy(owners, mask=mask)
    counted = figures(found)
    assert (counted["of_one"], counted["of_few"], counted["sums"]) == (alone, few, 2)
    assert counted["coordinates"] == 2 * CLASSES * 9
    (unseen,) = [text for text in found["unseen"] if text.startswith("delta of contribute")]
    told = [text for text in found["unprotected"] if "moved by one client alone" in text]
    brought = next(text for text in found["query_view"] if text.startswith("averages of delta"))
    if owners == 1:
        assert unseen.endswith("where another client moved the same coordinate")
        assert told[0].startswith("6 of 54 coordinates of delta of contribute, over 2 sums")
        assert "the server" in told[0] and "clients that are sent what is made of it" in told[0]
        assert "one client alone moved 6, which are its own numbers" in brought
        return
    assert not told
    least = "one client alone" if owners == 2 else "fewer than three clients"
    assert unseen.endswith(f"in any one reply or sum: no coordinate was moved by {least}")
    assert ("two clients moved 6, of which either reads the other's" in brought) == (owners == 2)


def test_a_mask_that_mixes_coordinates_is_named() -> None:
    found = privacy(mask="rotation")
    (unseen,) = [text for text in found["unseen"] if text.startswith("delta of contribute")]
    assert "as long as the mask holds" in unseen
    assert any("not counted, as the mask mixes them" in text for text in found["query_view"])


@pytest.mark.parametrize("unit", ["client", "example"])
def test_noise_is_said_to_cover_it_and_nothing_is_counted(unit: str) -> None:
    found = privacy(clip=1.0, noise=1.0, dp_unit=unit)
    assert "occupancy" not in found
    text = json.dumps(found["unseen"])
    assert "another client moved" not in text and "was moved by" not in text
    if unit == "client":
        assert "its noise is in every coordinate, also in one that it alone moves" in text


def test_where_nobody_counts_the_report_says_so() -> None:
    fitted = FedAvg(**OPTIONS).fit(federation(3), KEYS)
    learned = dataclasses.replace(fitted.result_.kept_.learned, occupancy=None)
    fitted.result_.kept_ = dataclasses.replace(fitted.result_.kept_, learned=learned)
    found = section(fitted.result_)
    assert "occupancy" not in found
    unseen = next(text for text in found["unseen"] if text.startswith("delta of contribute"))
    assert "no party of this run could count" in unseen and "simulation" in unseen
    assert any("which nobody counted" in text for text in found["query_view"])


@pytest.mark.filterwarnings("ignore:on their own test samples")
def test_what_is_counted_is_what_the_survivors_moved() -> None:
    settings = dataclasses.replace(KEYS, dropout=0.3, transcript="full")
    made = FedAvg(**{**OPTIONS, "rounds": 14, "cohort_size": 0})
    fitted, taps = tapped(made, federation(), settings)
    rows = {
        (tap.step, client): row.numpy() != 0
        for tap in taps
        if tap.method == "contribute"
        for client, row in zip(tap.ids, tap.reply.delta.values, strict=True)
    }
    alone = sums = 0
    for outcome in fitted.verb_outcomes():
        for members in outcome.groups if outcome.method == "contribute" else ():
            sums += 1
            alone += int((sum(rows[outcome.step, i].astype(int) for i in members) == 1).sum())
    counted = figures(section(fitted.result_))
    assert sums > 1 and 0 < alone < sums * CLASSES
    assert (counted["sums"], counted["of_one"]) == (sums, alone)


def test_figures_survive_a_kill_and_a_replay(tmp_path: Path) -> None:
    class KilledError(Exception):
        """The process ends."""

    def stop(line: Any) -> None:
        if line["round"] == 1:
            raise KilledError

    settings = dataclasses.replace(KEYS, transcript="full")
    data = federation()
    folder = tmp_path / "run"
    with pytest.raises(KilledError):
        FedAvg(**OPTIONS).fit(data, settings, report=stop, folder=folder)
    FedAvg(**OPTIONS).fit(data, settings, folder=folder)
    result = json.loads((folder / "result.json").read_text())
    assert figures(result["privacy"])["sums"] == 2
    assert result["privacy"]["occupancy"] == privacy()["occupancy"]
    assert main(["replay", str(folder)]) == 0


def test_averages_of_hidden_blocks_are_among_what_clients_are_sent() -> None:
    made = IFCA(k=2, rounds=2, starts=1, model="linear", aggregation="secagg", mask="none")
    data = Federation.simulate("digits", clients=6, samples=20, seed=0)
    found = section(made.fit(data, KEYS).result_)
    assert any(text.startswith("averages of blocks") for text in found["query_view"])

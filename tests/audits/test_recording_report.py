"""What a recording says of rounds, of gaps, and of what declared noise is worth."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from securecluster.audits.recording_report import messages, notes, price, sampling, summary
from securecluster.errors import UsageError
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.recordings.recorded_messages import (
    HIDDEN,
    NO_ARRAYS,
    Exchange,
    Reply,
    Sent,
    Vector,
)
from securecluster.recordings.recording_folder import Gap, Recording
from securecluster.recordings.training_facts import TrainingFacts

NOISE = 4.0
DELTA = 1e-5
LOCAL = TrainingFacts(clip=1.0, noise=NOISE, placement="local", delta=DELTA)
MODEL = Vector(torch.zeros(3), (("w", (3,)),))
NOTHING = Vector(reason=NO_ARRAYS)
MASKED = Vector(reason=HIDDEN)
ERROR = Vector(reason="error 7")
UPDATE = Vector(torch.ones(3), MODEL.layout)


def pushed(told: Any, replies: dict[int, Vector], asked: int = 3, **options: Any) -> Exchange:
    """An exchange with clients 0, 1, …, of which some reply."""
    options = {"kind": "train", "model": MODEL, "late": None} | options
    kind = options["kind"]
    sent = {node: Sent(kind, str(told), 10, options["model"]) for node in range(asked)}
    given = {node: Reply(vector, 5, {"loss": 1.0}) for node, vector in replies.items()}
    return Exchange(kind, str(told), sent, given, late=options["late"])


def written(
    folder: Path,
    exchanges: list[Exchange],
    facts: TrainingFacts = LOCAL,
    gaps: tuple[str, ...] = (),
) -> Recording:
    """Return a recording of exchanges and of gaps, by their type."""
    folder.mkdir(exist_ok=True)
    recording = Recording.begin(folder, "wards", facts)
    for exchange in exchanges:
        recording.record(exchange)
    for kind in gaps:
        recording.note(Gap(gap="No space left on device", kind=kind, told="9", messages=3))
    recording.write_head(None)
    return Recording.read(folder)


ALL = {0: UPDATE, 1: UPDATE, 2: UPDATE}
HALF = {0: UPDATE, 1: UPDATE}
STEPS = {0: NOTHING, 1: NOTHING, 2: NOTHING}
CASES: dict[str, tuple[list[Exchange], int, str]] = {
    "a round each": ([pushed(k, ALL) for k in (1, 2, 3)], 3, "3 rounds"),
    "one round": ([pushed(1, ALL)], 1, "1 round"),
    "masked sums": (
        [pushed(k, r, model=m) for k in (1, 2) for r, m in [
            (STEPS, NOTHING), (dict.fromkeys(range(3), MASKED), MODEL), (STEPS, NOTHING),
        ]], 2, "2 rounds",
    ),
    "other work": (
        [pushed(1, ALL), pushed(1, STEPS, kind="evaluate"), pushed(1, STEPS, kind="query")],
        1, "1 round",
    ),
    "evaluated in training": ([pushed(k, r) for k in (1, 2) for r in (ALL, STEPS)], 2, "2 rounds"),
    "two pushes of a round": ([pushed(1, HALF, 2), pushed(1, {2: UPDATE}, 3)], 1, "1 round"),
    "two updates in a round": (
        [pushed(1, ALL), pushed(1, HALF, kind="train.head"), pushed(2, ALL)], 3,
        "3 updates in 2 rounds",
    ),
    "an app that was started again": ([pushed(k, ALL) for k in (1, 2, 1)], 3,
                                      "3 updates in 2 rounds"),
    "no round is told": ([pushed("", ALL) for _ in range(3)], 3, "3 rounds"),
    "nobody answered in a round": ([pushed(1, ALL), pushed(2, {})], 2, "2 rounds"),
    "all failed in a round": ([pushed(1, ALL), pushed(2, dict.fromkeys(range(3), ERROR))], 1,
                              "1 round"),
    "a late reply": (
        [pushed(1, HALF), pushed(2, ALL), pushed(1, {0: UPDATE}, 1, late=1)], 3,
        "3 updates in 2 rounds",
    ),
    "a late reply of a silent client": (
        [pushed(1, {1: UPDATE, 2: UPDATE}), pushed(1, {0: UPDATE}, 1, late=1)], 1, "1 round",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_noise_is_priced_by_the_updates_of_rounds(tmp_path: Path, case: str) -> None:
    exchanges, updates, over = CASES[case]
    text = price(written(tmp_path / "x", exchanges))
    told = float(text.split("(")[1].split(",")[0])
    # that many updates with noise 4 are one with 4/√k (Balle & Wang 2018, Theorem 8)
    exact = gaussian_epsilon(math.sqrt(updates) / NOISE, DELTA)
    assert exact <= told * 1.005 and told <= 1.05 * exact
    assert f"against the server over {over}, if the app" in text


@pytest.mark.parametrize(
    ("exchanges", "facts"),
    [
        ([], LOCAL),
        ([pushed(1, {})], LOCAL),
        ([pushed(1, STEPS)], LOCAL),
        ([pushed(1, dict.fromkeys(range(3), ERROR))], LOCAL),
        ([pushed(1, ALL, kind="evaluate")], LOCAL),
        ([pushed(1, ALL)], TrainingFacts(noise=1.0)),
    ],
)
def test_without_an_update_or_a_fact_nothing_is_priced(
    tmp_path: Path, exchanges: list[Exchange], facts: TrainingFacts
) -> None:
    text = price(written(tmp_path / "x", exchanges, facts, gaps=("train",)))
    assert "unpriced" in text and "(" not in text
    assert price(written(tmp_path / "y", exchanges, TrainingFacts())) == ""


def test_gaps_are_counted_priced_and_said(tmp_path: Path) -> None:
    found = written(tmp_path / "x", [pushed(1, ALL)], gaps=("train", "evaluate", "train"))
    text = price(found)
    exact = gaussian_epsilon(math.sqrt(3) / NOISE, DELTA)
    assert exact <= float(text.split("(")[1].split(",")[0]) * 1.005
    assert "over 1 round and 2 gaps of the recording" in text
    (sentence,) = notes(found)
    assert "The recording has 3 gaps" in sentence
    assert "train in round 9 (No space left on device); evaluate in round 9" in sentence
    many = written(tmp_path / "y", [pushed(1, ALL)], gaps=("train",) * 30)
    assert "; 25 more." in notes(many)[0]


def central(sampled: int, noise: float | None = NOISE) -> TrainingFacts:
    return TrainingFacts(
        clip=1.0, noise=noise, placement="central", delta=DELTA, sampled_clients=sampled
    )


def test_fewer_clients_than_were_declared_are_said_with_what_the_noise_is_worth(
    tmp_path: Path,
) -> None:
    exchanges = [pushed(1, ALL), pushed(2, HALF), pushed(3, ALL)]
    found = written(tmp_path / "x", exchanges, central(3))
    text = sampling(found)
    assert "declares 3 sampled clients, and 2 sent an update in round 2." in text
    assert "it is 2.67 and not 4 of the clipping norm where 2 sent one" in text
    # rounds with noise 4, 8/3 and 4: (1/4)² + (3/8)² + (1/4)²
    exact = gaussian_epsilon(math.sqrt(2 / 16 + 9 / 64), DELTA)
    told = float(text.split("ε = ")[1].rstrip("."))
    assert exact <= told * 1.005 and told <= 1.05 * exact
    assert text in summary(found)
    far = sampling(written(tmp_path / "y", exchanges, central(20)))
    assert "declares 20 sampled clients, and 2 to 3 sent an update in rounds 1, 2, 3." in far


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (central(3), ""),
        (LOCAL, ""),
        (central(2), "declares 2 sampled clients, and 3 sent an update in round 1."),
        (central(6, noise=None), "declares 6 sampled clients, and 3 sent an update in round 1."),
        (TrainingFacts(sampled_clients=1), "declares 1 sampled client, and 3 sent"),
    ],
)
def test_declared_clients_are_compared_with_those_that_were_seen(
    tmp_path: Path, facts: TrainingFacts, said: str
) -> None:
    text = sampling(written(tmp_path / "x", [pushed(1, ALL), pushed(1, STEPS)], facts))
    assert said in text and bool(said) == bool(text) and "ε" not in text


def test_sampled_clients_are_a_number_of_clients() -> None:
    for wrong in (0, 2.5, True, "4"):
        with pytest.raises(UsageError, match="sampled_clients is a positive integer"):
            TrainingFacts(sampled_clients=wrong)  # type: ignore[arg-type]


def test_the_table_tells_rounds_from_exchanges(tmp_path: Path) -> None:
    exchanges = [pushed(k, ALL) for k in (1, 1, 2)]
    exchanges += [pushed(1, {0: UPDATE}, 1, late=1), pushed(1, STEPS, kind="evaluate")]
    rows = messages(written(tmp_path / "x", exchanges))
    # 10 bytes to each client, and 5 of each reply
    assert rows == [("train", "2", "3", "100", "50", "10"), ("evaluate", "1", "1", "30", "15", "0")]


def test_names_that_a_client_chose_are_printed_as_text(tmp_path: Path) -> None:
    exchange = pushed(1, ALL)
    exchange.replies[0] = Reply(UPDATE, 5, {"\x1b[31mred": 1.0})
    shown = " ".join(summary(written(tmp_path / "x", [exchange])))
    assert "\x1b" not in shown and "\\x1b[31mred" in shown

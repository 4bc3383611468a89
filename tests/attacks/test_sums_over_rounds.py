"""Sums over rounds: what an honest server solves for, and where it cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attacked import digits, scene
from cases import exhaustive

from securecluster import Dirichlet, Federation, LabelSwap
from securecluster.attacks.base import Guess, Truth
from securecluster.attacks.experiments import tapped
from securecluster.attacks.scoring import (
    BETTER,
    CHANCE,
    UNDECIDED,
    Interval,
    Score,
    evaluate,
    further_scores,
)
from securecluster.attacks.sums_over_rounds import (
    ALIKE,
    SAID,
    ClustersOverRounds,
    LabelCorrelation,
    LabelsOverRounds,
    MemberSums,
    SizesOverRounds,
    SumsOverRounds,
    _of_last_start,
)
from securecluster.attacks.views import knowledge_of, truth_of, view_of
from securecluster.audits import audit_page
from securecluster.audits import run_audit as audit
from securecluster.messaging.parties import WIRE
from securecluster.protocols import CFL, IFCA, FedAvg, Hidden, RandomClusters, Settings

pytestmark = pytest.mark.filterwarnings("ignore:on their own test samples")

RESAMPLES = (200, 100)

CLIENTS = 12
CLUSTERS = 3
ROUNDS = 24
# Options of runs in which nothing but secure sums protects clients from sums over rounds.
UNPROTECTED: dict[str, Any] = {"cohort_size": 0}
HALF: dict[str, Any] = {
    **UNPROTECTED, "rounds": ROUNDS, "model": "linear", "participation": 0.5,
    "aggregation": "secagg",
}  # fmt: skip
EVERYONE: dict[str, Any] = {**HALF, "participation": 1.0}


@cache
def swapped(seed: int = 0) -> Federation:
    """Clients in clusters, of which the label swaps tell."""
    return digits(scenario=LabelSwap(clusters=CLUSTERS), clients=CLIENTS, samples=40, seed=seed)


@cache
def skewed() -> Federation:
    """Clients with different label counts."""
    return digits(scenario=Dirichlet(alpha=0.5), clients=CLIENTS, samples=30)


RUNS: dict[Any, Any] = {}  # with their federations, so that no other one has the same id


def run(
    protocol: Any, options: Mapping[str, Any], federation: Federation, dropout: float = 0.0
) -> Any:
    """Return a fitted protocol and its taps."""
    key = (protocol, tuple(options.items()), id(federation), dropout)
    if key not in RUNS:
        settings = Settings(transcript="full", threads=1, dropout=dropout)
        RUNS[key] = (federation, *tapped(protocol(**options), federation, settings))
    return RUNS[key][1:]


def found(
    attack: SumsOverRounds,
    protocol: Any,
    options: Mapping[str, Any],
    federation: Federation,
    dropout: float = 0.0,
) -> tuple[Any, Guess | None]:
    """Return what an attack by the server achieves on a run, and its guess."""
    fitted, taps = run(protocol, options, federation, dropout)
    view, knowledge, truth = scene(fitted, federation, taps=taps)
    achieved = evaluate(attack, view, knowledge, truth)
    if isinstance(achieved, str):
        return achieved, None
    return achieved, attack.run(view, knowledge)


def of(members: Sequence[Sequence[int]], values: Any = None) -> MemberSums:
    """Return sums over members that are given, one a round."""
    rows = np.asarray(members, dtype=float)
    numbers = np.zeros((len(rows), 1)) if values is None else np.asarray(values, dtype=float)
    return MemberSums(rows, numbers, np.arange(len(rows)), tuple(range(len(rows))))


@pytest.mark.parametrize(
    ("members", "rank", "solvable"),
    [
        # of three pairs each client is half of two sums less the third
        ([[1, 1, 0], [0, 1, 1], [1, 0, 1]], 3, [0, 1, 2]),
        ([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]], 2, []),
        ([[1, 1, 0], [1, 1, 1]], 2, [2]),
        # six clients, and full rank as far as pairs go, which differ by sign alone
        ([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]], 3, []),
    ],
)
def test_who_can_be_solved_for_is_who_is_in_the_row_space(
    members: list[list[int]], rank: int, solvable: list[int]
) -> None:
    sums = of(members)
    assert sums.rank == rank and sums.solvable == solvable
    assert f"rank {rank}: {len(solvable)} of {len(members[0])} clients" in sums.in_words


def test_a_client_that_is_in_no_sum_is_not_counted() -> None:
    sums = of([[1, 0, 1, 0], [1, 0, 0, 0]])
    assert sums.clients == [0, 2]
    assert sums.in_words == "2 sums of 2 clients have rank 2: 2 of 2 clients can be solved for"


def test_constant_summands_are_found_and_those_of_a_cohort_have_their_mean() -> None:
    members = np.asarray([[1, 1, 0, 1, 1], [1, 0, 1, 0, 0], [0, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    added = np.asarray([[3.0], [0.0], [7.0], [4.0], [2.0]])
    found = of(members.tolist(), members @ added).not_negative()
    assert np.allclose(found, [[3.0], [0.0], [7.0], [3.0], [3.0]])
    # three of the four clients that differ are alone with their column
    assert of(members.tolist()).solvable == [0, 1, 2]


def test_what_all_members_have_in_common_over_rounds_is_not_theirs() -> None:
    draw = np.random.default_rng(0)
    members = (draw.random((60, 9)) < 0.5).astype(float)
    own = draw.standard_normal((9, 4))
    own -= own.mean(0)
    common = np.cos(np.linspace(0, 3, 60))[:, None] * np.asarray([5.0, -2.0, 1.0, -4.0])
    found = of(members.tolist(), members @ own + members.sum(1, keepdims=True) * common)
    # ridge shrinks them a little
    estimated = found.mean_summands()
    assert np.corrcoef(estimated.ravel(), own.ravel())[0, 1] > 0.98


def test_the_control_shuffles_clients_within_their_groups_alone() -> None:
    federation = skewed()
    truth = Truth(federation)
    guessed = {client: truth.label_counts(client) for client in range(4)}
    scorer = LabelCorrelation()
    own = scorer.units(Guess("x", guessed), truth)
    assert np.allclose(own, 1.0)
    draw = np.random.default_rng(0)
    single = Guess("x", guessed, {ALIKE: {0: 0, 1: 1, 2: 2, 3: 3}})
    assert np.allclose(scorer.shuffled(single, truth, draw), own)
    pairs = Guess("x", guessed, {ALIKE: {0: 0, 1: 0, 2: 2, 3: 2}})
    first = np.corrcoef(guessed[0], guessed[1])[0, 1]
    seen = {tuple(np.round(scorer.shuffled(pairs, truth, draw)[:2], 9)) for _ in range(20)}
    assert seen == {(1.0, 1.0), (round(first, 9), round(first, 9))}


@pytest.mark.parametrize(
    ("options", "dropout", "seed"),
    [
        (HALF, 0.0, 0), exhaustive(HALF, 0.0, 1), exhaustive(HALF, 0.0, 2),
        ({**EVERYONE, "rounds": 60}, 0.1, 0),
        # Clipped updates have no weights: blocks tell by their lengths, under a mask, too.
        ({**HALF, "clip": 1.0}, 0.0, 0), exhaustive({**HALF, "clip": 1.0}, 0.0, 1),
    ],
)  # fmt: skip
def test_an_honest_server_of_hidden_reads_every_cluster(
    options: dict[str, Any], dropout: float, seed: int
) -> None:
    own = {**options, "k": CLUSTERS}
    achieved, guess = found(ClustersOverRounds(), Hidden, own, swapped(seed), dropout)
    assert guess is not None
    assert achieved.verdict == BETTER and achieved.value >= 0.9
    (said,) = guess.details[SAID]
    assert f"rank {achieved.units}: {achieved.units} of {achieved.units} clients" in said


@pytest.mark.filterwarnings("ignore:clusters .* look like one")
@pytest.mark.parametrize("starts", [1, exhaustive(2)])
def test_choices_of_ifca_are_read_from_their_counts(starts: int) -> None:
    federation = digits(scenario=LabelSwap(clusters=4), clients=20, samples=40)
    options = {**HALF, "rounds": 30, "k": 4, "starts": starts}
    achieved, _ = found(ClustersOverRounds(), IFCA, options, federation)
    assert achieved.verdict == BETTER and achieved.value >= 0.9


def test_of_fixed_cohorts_no_client_is_told_from_its_cohort() -> None:
    options = {**HALF, "cohort_size": 6, "rounds": 12, "k": 2, "mask": "none"}
    for attack in (ClustersOverRounds(), LabelsOverRounds()):
        achieved, guess = found(attack, Hidden, options, swapped())
        assert guess is not None
        assert achieved.verdict == CHANCE
        expected = f"rank {CLIENTS // 6}: 0 of {CLIENTS} clients can be solved for"
        assert guess.details[SAID][0].endswith(expected)


def test_label_counts_are_read_from_sums_of_updates_and_not_under_fresh_permutations() -> None:
    options = {**HALF, "rounds": 40}
    open_updates, _ = found(LabelsOverRounds(), FedAvg, {**options, "mask": "none"}, skewed())
    # the share of shuffles that are beyond 0.3 is below one in a hundred
    assert open_updates.verdict == BETTER and open_updates.value > 0.6
    masked, _ = found(LabelsOverRounds(), FedAvg, {**options, "mask": "permutation"}, skewed())
    assert masked.verdict == CHANCE


def test_commonest_labels_are_a_further_score() -> None:
    options = {**HALF, "rounds": 40, "mask": "none"}
    fitted, taps = run(FedAvg, options, skewed())
    view = view_of(fitted)
    attack = LabelsOverRounds()
    guess = attack.run(view, knowledge_of(fitted))
    shares = np.stack(list(guess.values.values()))
    assert (shares >= 0).all() and np.allclose(shares.sum(1), 1)
    (found,) = further_scores(attack, guess, truth_of(fitted, skewed(), view, taps)).values()
    assert isinstance(found, Score) and found.verdict == BETTER


def test_blocks_of_hidden_tell_label_counts_without_a_mask() -> None:
    options = {**HALF, "rounds": 40, "mask": "none"}
    achieved, _ = found(LabelsOverRounds(), Hidden, {**options, "k": CLUSTERS}, skewed())
    assert achieved.verdict == BETTER


@pytest.mark.always
def test_numbers_of_samples_are_read_exactly() -> None:
    draw = np.random.default_rng(0)
    clients = {}
    for client in range(8):
        count = 10 + 7 * client
        clients[f"c{client}"] = (draw.random((count, 6), dtype=np.float32), np.arange(count) % 2)
    federation = Federation.from_arrays(clients, seed=0)
    counts = [len(shard.y) for shard in federation.shards]
    assert len(set(counts)) > 4
    achieved, guess = found(SizesOverRounds(), FedAvg, HALF, federation)
    assert guess is not None
    assert achieved.verdict == BETTER and achieved.value < 1e-3
    assert [round(guess.values[client]) for client in range(8)] == counts


def test_the_same_members_in_every_sum_tell_nothing_and_the_reason_says_so() -> None:
    said = (
        f"over the same clients, so none is told from another (3 sums of {CLIENTS} clients "
        f"have rank 1: 0 of {CLIENTS} clients can be solved for)"
    )
    options = {**EVERYONE, "rounds": 3, "k": CLUSTERS, "exact_weights": True}
    for attack in (ClustersOverRounds(), LabelsOverRounds(), SizesOverRounds()):
        reason, _ = found(attack, Hidden, options, swapped())
        assert isinstance(reason, str)
        assert reason.startswith("not applicable: all sums of ") and reason.endswith(said)


def test_it_says_what_is_missing_where_there_are_no_sums_to_solve() -> None:
    one, _ = found(LabelsOverRounds(), FedAvg, {**HALF, "rounds": 1}, skewed())
    assert one == "not applicable: there is one sum of updates, and none to set beside it"
    single, _ = found(LabelsOverRounds(), CFL, {"rounds": 2, "model": "linear"}, skewed())
    assert single == "not applicable: no sums of updates were observed"
    two = {**HALF, "rounds": 2}
    no_clusters, _ = found(ClustersOverRounds(), FedAvg, two, skewed())
    assert no_clusters == (
        "not applicable: no sums of what clients add to the block of their cluster were observed"
    )
    clipped, _ = found(SizesOverRounds(), FedAvg, {**two, "clip": 1.0}, skewed())
    assert clipped == "not applicable: no sums of numbers of samples were observed"


def test_who_sees_lengths_only_solves_nothing() -> None:
    fitted, _ = run(FedAvg, {**HALF, "rounds": 2}, skewed())
    view = view_of(fitted, WIRE)
    for attack in (ClustersOverRounds(), LabelsOverRounds(), SizesOverRounds()):
        reason = attack.applies(view, knowledge_of(fitted))
        assert reason is not None and reason.endswith(" were observed")


def test_what_a_known_cluster_has_in_common_is_no_success() -> None:
    # each of two sums a round is over one cluster, of which the server knows the members
    options = {**EVERYONE, "rounds": 6, "k": 2, "mask": "none"}
    achieved, guess = found(LabelsOverRounds(), RandomClusters, options, skewed())
    assert guess is not None
    assert achieved.verdict == CHANCE
    assert achieved.value == pytest.approx(achieved.chance)
    assert guess.details[SAID][0].endswith(f"rank 2: 0 of {CLIENTS} clients can be solved for")


@pytest.mark.always
# twelve clients are too few to learn anything under so much noise
@pytest.mark.filterwarnings("ignore::securecluster.errors.SecureClusterWarning")
def test_noise_in_sums_hides_all() -> None:
    noise = {"clip": 1.0, "target_epsilon": 2.0, "placement": "distributed", "mask": "none"}
    options = {**HALF, **noise, "rounds": 8, "k": CLUSTERS}
    for attack in (ClustersOverRounds(), LabelsOverRounds()):
        achieved, _ = found(attack, Hidden, options, swapped())
        assert achieved.verdict == CHANCE


def test_a_score_that_rounding_lifts_above_chance_is_at_chance() -> None:
    # shuffles within a cohort add up the same numbers in another order
    chance = Interval(0.3, 0.3)
    for higher, sign in ((True, 1), (False, -1)):
        rounded = Score("x", 0.3 + sign * 1e-15, Interval(0.1, 0.5), 0.3, chance, higher, 9)
        assert rounded.verdict == CHANCE
        beyond = Score("x", 0.3 + sign * 1e-6, Interval(0.1, 0.5), 0.3, chance, higher, 9)
        assert beyond.verdict == UNDECIDED


AUDITED = ("sums-over-rounds-clusters", "sums-over-rounds-labels", "sums-over-rounds-sizes")


def audit_of(options: Mapping[str, Any], folder: Path) -> audit.Audit:
    """Return the audit of a run of hidden by these attacks alone."""
    fitted = Hidden(**options, k=CLUSTERS)
    fitted.fit(swapped(), Settings(transcript="full", threads=1), folder=folder)
    return audit.audited(fitted, swapped(), attacks=AUDITED)


def test_an_audit_of_hidden_says_that_secure_sums_are_broken(
    tmp_path: Path, no_pictures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    results = audit_of(HALF, tmp_path / "run")
    (broken,) = results.broken
    assert broken.attack == AUDITED[0]
    assert "secure sums by sums-over-rounds-clusters" in audit.sentence(results)
    solved = f"rank {CLIENTS}: {CLIENTS} of {CLIENTS} clients can be solved for"
    (row, *_) = audit.content(results)["attacks"]
    assert row["run"]["said"][0].endswith(solved)
    page = audit_page.results(results)
    assert f"{AUDITED[0]}: {row['run']['said'][0]}." in page
    audit.show(results)
    assert "can be solved for" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--participation 1" in audit_page.advice(results)


def test_an_audit_in_which_no_sums_differ_says_that_nothing_was_tried(
    tmp_path: Path, no_pictures: None
) -> None:
    results = audit_of({**EVERYONE, "rounds": 2}, tmp_path / "run")
    assert not results.broken and not results.tried
    said = audit.headline(results)
    assert said == [
        "Nothing was tried, so this audit says nothing of what the adversary could learn.",
        "0 of 3 attacks could be tried on the run.",
    ]
    assert "better than chance" not in audit_page.advice(results)
    assert f"have rank 1: 0 of {CLIENTS} clients can be solved for" in audit_page.results(results)


def test_of_several_starts_the_sums_of_the_last_are_kept() -> None:
    """Blocks say the call of the count that they follow, and counts their start."""
    messages = [
        SimpleNamespace(step=1, content=SimpleNamespace(start=0)),
        SimpleNamespace(step=2, content=SimpleNamespace(earlier=1)),
        SimpleNamespace(step=3, content=SimpleNamespace(start=1)),
        SimpleNamespace(step=4, content=SimpleNamespace(earlier=3)),
        SimpleNamespace(step=5, content=SimpleNamespace(other=1)),
        SimpleNamespace(step=6, content=SimpleNamespace(earlier=3)),
    ]
    view: Any = SimpleNamespace(messages=lambda: messages)
    sums = MemberSums(np.eye(3), np.arange(3.0)[:, None], np.arange(3), (2, 4, 6))

    def kept(starts: int) -> tuple[int, ...]:
        knowledge: Any = SimpleNamespace(config={"starts": starts})
        return _of_last_start(view, knowledge, sums).steps

    assert kept(1) == (2, 4, 6)
    assert kept(2) == (4, 6)

"""`securecluster plan` and `securecluster.plan`: what ε buys, without private data."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import securecluster
from securecluster import CFL, FedAvg, Federation, LabelSwap, Settings
from securecluster.cli.main import main
from securecluster.data import Dirichlet, LabelSplit, Pathological, Scenario
from securecluster.data.stand_ins import PublicSample, public_sample
from securecluster.errors import UsageError
from securecluster.studies import plan as plans
from securecluster.studies.plan import Outlook, by_chance, frontier, interval, least, plan

SHARED: dict[str, Any] = {"model": "linear", "rounds": 1, "epochs": 1}
SMALL: dict[str, Any] = {"clients": 8, "samples": 20, "seeds": 2, **SHARED}


@pytest.fixture(scope="module")
def outlook() -> Outlook:
    return plan(["cfl", "fedavg"], epsilon=[4, math.inf], **SMALL)


def test_a_line_stands_for_each_protocol_at_each_epsilon(outlook: Outlook) -> None:
    lines = [(line.protocol, line.epsilon) for line in outlook.forecasts]
    assert lines == [("cfl", 4), ("cfl", math.inf), ("fedavg", 4), ("fedavg", math.inf)]
    assert all(line.runs == 2 and line.rounds == 1 for line in outlook.forecasts)
    assert outlook.forecasts[0].power == "clusters drowned, training doubtful"
    assert outlook.forecasts[1].power == "no noise"


def test_noise_and_bytes_are_those_of_the_run_itself(outlook: Outlook) -> None:
    # of the clients' own data, which no plan reads
    federation = Federation.simulate("digits", scenario=LabelSwap(), clients=8, samples=20, seed=99)
    cfl = CFL(clip=1.0, target_epsilon=4.0, **SHARED)
    cfl.fit(federation, Settings(transcript="none"))
    expected = outlook.forecasts[0]
    assert expected.noise == cfl.kept_.learned.config["noise"]
    assert expected.up == round(cfl.bytes_["up"] / 8)
    assert expected.down == round(cfl.bytes_["down"] / 8)


def test_scores_are_those_of_runs_on_the_stand_ins(outlook: Outlook) -> None:
    sample = public_sample("digits")
    settings = Settings(transcript="none", threads=1, keys_from_seed=True)
    scores = []
    for seed in (0, 1):
        federation = sample.clients(8, 20, LabelSwap(), seed)
        fitted = FedAvg(clip=1.0, **SHARED).fit(federation, settings)
        scores.append(float(fitted.scores_.mean()))
    line = outlook.forecasts[3]
    assert line.accuracy == pytest.approx(sum(scores) / 2)
    assert line.accuracy_least == pytest.approx(min(scores))
    ends = interval(scores, "accuracy", power="no noise", own=False)
    assert (line.accuracy_low, line.accuracy_high) == pytest.approx(ends)


def test_what_looks_for_no_clusters_has_no_ari(outlook: Outlook) -> None:
    assert [line.ari is None for line in outlook.forecasts] == [False, False, True, True]
    with pytest.raises(UsageError, match="fedavg looks for no clusters"):
        plan(["cfl", "fedavg"], find="epsilon", **SMALL)


def test_an_interval_with_noise_spans_half_and_twice_the_epsilon() -> None:
    at = {e: plan(["fedavg"], epsilon=[e], **SMALL).forecasts[0] for e in (50, 100, 200)}
    means = [line.accuracy for line in at.values()]
    assert at[100].accuracy_least <= min(means)
    assert at[100].accuracy_most >= max(means)


def test_an_interval_stays_within_what_a_score_can_be() -> None:
    told: dict[str, Any] = {"power": "clusters carries", "own": True}
    margin = plans.MARGINS["ari", False]
    assert interval([1.0, 0.95], "ari", **told) == (pytest.approx(0.95 - margin), 1.0)
    assert interval([0.0], "ari", **told) == (-0.25, margin)
    # what simulations did is in it in any case
    assert interval([-0.3], "ari", **told)[0] == -0.3
    assert interval([None], "ari", **told) == (None, None)
    for accuracy in (0.0, 0.01, 0.99, 1.0):
        low, high = interval([accuracy], "accuracy", **told)
        assert low is not None and high is not None
        assert 0 <= low <= accuracy <= high <= 1


def test_what_chance_does_is_that_of_labels_by_chance() -> None:
    low, high = by_chance((3, 3, 3))
    # with six clients more chance strays less, and one true cluster is found or split
    wider, narrower = high - low, np.subtract(*by_chance((5, 5, 5))[::-1])
    assert -0.5 < low < 0 < high < 1 and narrower < wider
    assert by_chance((5,)) == (0.0, 1.0)
    metrics = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(7)
    truth = np.repeat(np.arange(3), 3)
    found = [metrics.adjusted_rand_score(truth, draw.integers(3, size=9)) for _ in range(2000)]
    within = np.mean([low - 1e-9 <= value <= high + 1e-9 for value in found])
    assert 0.93 < within < 0.99


def test_an_interval_of_ari_minds_what_chance_does() -> None:
    lost = {"power": "clusters drowned", "own": False, "chance": (-0.3, 0.4)}
    assert interval([0.0, 0.1], "ari", **lost) == (-0.07, 0.4)
    assert interval([0.9, 1.0], "ari", power="", own=False, chance=(-0.1, 0.1)) == (0.9 - 0.37, 1.0)
    # never beyond what a simulation did, and no lower than chance
    assert interval([-0.2, 0.1], "ari", **{**lost, "chance": (-0.1, 0.1)})[0] == -0.2
    assert interval([0.0, 0.1], "ari", **{**lost, "chance": (-0.05, 0.1)})[0] == -0.05


def test_an_interval_is_narrower_where_stand_ins_are_a_good_guide() -> None:
    def width(values: list[float], score: str, power: str, own: bool) -> float:
        low, high = interval(values, score, power=power, own=own)
        assert low is not None and high is not None
        return high - low

    lost = "clusters drowned, training carries"
    sure = plans.MARGINS["ari", True]
    assert width([0.1], "ari", lost, False) == pytest.approx(2 * sure)
    # the check alone, or the stand-ins alone, are no such proof
    assert width([0.3], "ari", lost, False) > 2 * sure
    assert width([0.1], "ari", "clusters doubtful, training drowned", False) > 2 * sure
    assert width([0.5], "accuracy", lost, True) < width([0.5], "accuracy", lost, False)
    # by logits: less room near the ends
    assert width([0.95], "accuracy", lost, True) < width([0.5], "accuracy", lost, True) / 2
    middle = 1 / (1 + math.exp(plans.MARGINS["accuracy", True]))
    assert interval([0.5], "accuracy", power=lost, own=True)[0] == pytest.approx(middle)


def test_a_sample_that_is_handed_in_is_the_clients_own_kind() -> None:
    assert not public_sample("digits").like((12, 12), 5).own
    assert public_sample((np.eye(10, dtype=np.float32), np.arange(10))).own


@pytest.mark.parametrize(
    ("first", "answer"),
    [
        (1, (1, None, 1.0)),
        (2, (2, 1, 1.0)),
        (5, (5, 4, 1.0)),
        (6, (6, 5, 1.0)),
        (7, (None, 6, 0.0)),
    ],
)
def test_a_search_finds_the_least_that_suffices(first: int, answer: Any) -> None:
    tried = []

    def score(value: float) -> float:
        tried.append(value)
        return float(value >= first)

    assert least(score, (1, 2, 3, 4, 5, 6), 0.9) == answer
    assert len(tried) == len(set(tried)) <= 4


def test_the_least_epsilon_suffices_and_the_one_before_does_not() -> None:
    options = {"clients": 8, "samples": 60, "seeds": 1, "model": "linear", "rounds": 3, "k": 4}
    found = plan(["signature"], find="epsilon", ari=0.9, dp_unit="example", **options)
    (answer,) = found.needs
    assert answer.value is not None and answer.below is not None
    at = plan(
        ["signature"], epsilon=[answer.below, answer.value], dp_unit="example", **options
    ).forecasts
    assert at[0].ari is not None and at[1].ari is not None
    assert at[0].ari < 0.9 <= at[1].ari == answer.ari
    # the same prediction as the other way round
    assert (answer.ari_low, answer.ari_high) == (at[1].ari_low, at[1].ari_high)
    assert f"signature: ε {answer.value:.3g}" in repr(found)


def test_the_head_of_a_search_names_what_is_given() -> None:
    for find, head in (
        ("epsilon", "8 clients with 20 samples each:"),
        ("clients", "clients with 20 samples each:"),
        ("samples", "8 clients:"),
    ):
        answer = plans.Need("cfl", find, None, 384, 0.5, "client", 1e-5)
        lines = Outlook(8, 20, needs=(answer,)).lines()
        assert lines[-1] == "ε of one client, at δ = 1e-05: cfl"
        assert lines[0].startswith(head)
        assert "up to 384 suffices (ARI 0.50 there)" in lines[1]


def test_stand_ins_have_the_size_of_the_clients_and_only_public_rows() -> None:
    sample = public_sample("digits").like((12, 10), 6)
    federation = sample.clients(5, 300, LabelSwap(2), seed=3)
    assert (len(federation), federation.classes, federation.shape) == (5, 6, (1, 12, 10))
    assert all(len(shard.y) == 300 and len(shard.y_test) == 75 for shard in federation.shards)
    known = {row.tobytes() for row in sample.x}
    trained = {row.tobytes() for shard in federation.shards for row in shard.x}
    tested = {row.tobytes() for shard in federation.shards for row in shard.x_test}
    assert trained | tested <= known
    assert not trained & tested


def test_rows_that_are_fewer_than_wanted_are_repeated_and_it_is_said() -> None:
    draws = np.random.default_rng(0)
    x = draws.normal(size=(40, 3)).astype(np.float32)
    y = np.arange(40) % 2
    made = plan(["fedavg"], epsilon=[math.inf], public=(x, y), scenario="iid", **SMALL)
    assert "each is used about 5.3 times" in made.notes[-1]
    assert "40 public rows of the public sample" in made.notes[0]


@pytest.mark.parametrize("skew", [Pathological(clusters=4), Dirichlet(clusters=3), LabelSplit()])
def test_stand_ins_of_skewed_labels_have_all_samples_to_train_and_to_test(skew: Scenario) -> None:
    sample = public_sample("digits")
    federation = sample.clients(9, 60, skew, 3)
    assert {len(shard.y) for shard in federation.shards} == {60}
    assert {len(shard.y_test) for shard in federation.shards} == {15}
    trained, tested = (
        {row.tobytes() for shard in federation.shards for row in getattr(shard, name)}
        for name in ("x", "x_test")
    )
    # what is tested on is held out of all training, however often rows are repeated
    assert not trained & tested


def test_stand_ins_of_light_images_are_negatives_with_their_mean() -> None:
    sample = public_sample("digits").like((28, 28), None)
    light = sample.toned(0.96)
    assert light.x.mean() == pytest.approx(0.96, abs=0.01)
    # one power of the negatives: what is darker stays darker
    first, made = (some.x[0].ravel() for some in (sample, light))
    assert (np.diff(made[np.argsort(first)]) <= 0).all()
    assert "negatives" in light.notes[-1]
    assert sample.toned(0.2) is sample
    table = PublicSample("table", np.zeros((9, 3), np.float32), np.arange(9) % 2, 2)
    with pytest.raises(UsageError, match="no images with pixels from 0 to 1"):
        table.toned(0.9)
    with pytest.raises(UsageError, match="pixels are from 0 to 1"):
        sample.toned(1.0)


def test_a_known_data_set_gives_its_form_and_its_defaults() -> None:
    digits = public_sample("digits")
    ink, photos = digits.standing_for("femnist"), digits.standing_for("cifar10")
    assert (ink.x.shape[1:], photos.x.shape[1:]) == ((1, 28, 28), (3, 32, 32))
    assert ink.x.mean() == pytest.approx(0.96, abs=0.01)
    assert np.array_equal(photos.x[:, 0], photos.x[:, 2])
    made = ink.clients(4, 20, LabelSwap(2), seed=3)
    assert (made.facts.bright, made.facts.mean) == (True, 0.96)
    # the clients' own data have defaults that follow from no name
    own = public_sample("digits").clients(4, 20, LabelSwap(2), seed=3)
    assert (own.facts.bright, own.facts.mean) == (False, None)
    with pytest.raises(UsageError, match="unknown data set of images 'ag_news'"):
        digits.standing_for("ag_news")


def test_a_file_and_its_arrays_are_the_same_sample(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    draws = np.random.default_rng(1)
    rows = draws.integers(0, 9, size=(30, 2))
    path = tmp_path / "sample.csv"
    lines = [f"{a},{b},{'high' if a > b else 'low'}" for a, b in rows]
    path.write_text("\n".join(["a,b,kind", *lines]) + "\n")
    read = public_sample(str(path), "kind")
    given = public_sample((rows.astype(np.float32), (rows[:, 0] <= rows[:, 1]).astype(int)))
    order = [np.lexsort(np.column_stack([sample.x, sample.y]).T) for sample in (read, given)]
    assert np.array_equal(read.x[order[0]], given.x[order[1]])
    assert np.array_equal(read.y[order[0]], given.y[order[1]])
    assert read.classes == 2
    assert "standardise the features" in read.notes[0]


def test_a_protocol_that_cannot_run_is_refused_beside_those_that_can() -> None:
    made = plan(["nsim", "fedavg"], epsilon=[8], **SMALL)
    assert [line.protocol for line in made.forecasts] == ["fedavg"]
    (label,) = made.refused
    assert label == "nsim at ε = 8"
    assert made.refused[label] in repr(made)


def test_a_frame_and_a_picture_have_all_forecasts(outlook: Outlook) -> None:
    pytest.importorskip("pandas")
    assert list(outlook.to_frame().protocol) == ["cfl", "cfl", "fedavg", "fedavg"]
    panels = securecluster.plot.plan(outlook, title="what ε buys").axes
    assert [panel.get_ylabel() for panel in panels] == ["ARI", "accuracy"]
    (drawn, _) = panels[1].get_lines()
    assert list(drawn.get_ydata()) == [outlook.forecasts[0].accuracy]
    assert {panel.get_xlabel() for panel in panels} == {"ε of a run for one client, at δ = 1e-05"}
    assert list(outlook.to_frame().dp_unit) == ["client"] * 4


def test_epsilon_of_a_client_and_of_an_example_share_no_axis() -> None:
    made = plan(["fedavg", "cfl:dp-unit=example"], epsilon=[4, 16], **SMALL)
    assert [(line.dp_unit, line.delta) for line in made.forecasts] == [
        ("client", 1e-5), ("client", 1e-5), ("example", 1e-5), ("example", 1e-5),
    ]  # fmt: skip
    text = repr(made)
    assert "\nε of one client, at δ = 1e-05: fedavg\n" in text
    assert "\nε of one example, at δ = 1e-05: cfl:dp-unit=example\n" in text
    figure = securecluster.plot.plan(made)
    drawn = [panel for panel in figure.axes if panel.get_lines()]
    assert [(panel.get_xlabel(), panel.get_ylabel()) for panel in drawn] == [
        ("ε of a run for one client, at δ = 1e-05", "accuracy"),
        ("ε of a run for one example, at δ = 1e-05", "ARI"),
        ("ε of a run for one example, at δ = 1e-05", "accuracy"),
    ]
    assert all(len(panel.get_lines()) == 1 for panel in drawn)
    with pytest.raises(UsageError, match="share no axis"):
        securecluster.plot.plan(made, ax=figure.axes[0])


def test_the_command_prints_the_table_and_leaves_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outlook: Outlook
) -> None:
    arguments = ["--clients", "8", "--samples", "20", "--seeds", "2", "--epsilon", "4", "inf"]
    arguments += ["--model", "linear", "--rounds", "1", "--epochs", "1"]
    files = ["--json", str(tmp_path / "plan.json"), "--picture", str(tmp_path / "plan.png")]
    assert main(["plan", "cfl", "fedavg", *arguments, *files]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "8 clients with 20 samples each: expected, with the interval for one run"
    assert printed[1].split()[:4] == ["protocol", "ε", "noise", "ARI"]
    assert [line.split()[0] for line in printed[2:6]] == ["cfl", "cfl", "fedavg", "fedavg"]
    content = json.loads((tmp_path / "plan.json").read_text())
    assert [line["epsilon"] for line in content["forecasts"]] == [4, None, 4, None]
    scores = [line["accuracy"] for line in content["forecasts"]]
    assert scores == [line.accuracy for line in outlook.forecasts]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "plan takes the protocols first"),
        (["cfl", "--shape", "3"], "shape is the height and the width"),
        (["cfl", "--epsilon", "0"], "epsilon = 0 is not possible: a target is above 0"),
        (["cfl", "--find", "noise"], "unknown quantity to find 'noise'"),
        (["cfl", "--find", "clients"], "a search for clients takes a single ε"),
        (["cfl", "--find", "epsilon", "--ari", "2"], "ari = 2 is not possible"),
        (["cfl", "--public", "nope"], "unknown public sample 'nope'"),
        (["cfl", "--public", "x.csv"], "x.csv needs the name of the column with the labels"),
        (["cfl", "--public", "x.csv", "--label-column", "y"], "x.csv cannot be read"),
        (["cfl", "--classes", "12"], "digits has 10 classes"),
        (["cfl", "--data", "ag_news"], "unknown data set of images 'ag_news'"),
        (["cfl", "--mean", "2"], "is not possible: pixels are from 0 to 1"),
        (["cfl", "--k", "3"], "--k is an option of"),
        (["cfl", "--picture", "x.txt"], "its name ends in .png, .pdf or .svg"),
        (["cfl", "--clients", "1"], "--clients = 1 is not possible"),
        (["cfl", "--clients", "9" * 23], "is not possible: it is a whole number from 2 to"),
        (["cfl", "--samples", "9" * 5000], "--samples takes a whole number, not '999"),
        (["cfl", "--samples", "9" * 23], "is not possible: it is a whole number from 2 to"),
        (["cfl", "--clients", "100000", "--samples", "100000"], "give fewer of either"),
        (["cfl", "--rounds", "9" * 23], "is not possible: it is a whole number from 1 to"),
        (["cfl", "--shape", "9" * 23, "5"], "two whole numbers from 1 to 65,536"),
        (["cfl", "--epsilon", "1e400"], "--epsilon '1e400' is too large: give a smaller number"),
        (["cfl", "--epsilon", "4", "-1e400"], "--epsilon '-1e400' is too large"),
        (["cfl", "--lr", "9" * 400], "is too large: give a smaller number"),
        (["cfl", "--ari", "0.5"], "ari is what a search is to reach: give find"),
        (["cfl", "--ari", "nan"], "ari = nan is not possible"),
        (["cfl", "--label-column", "y"], "is a column of a CSV file, and public is none"),
        (["cfl", "--public", "mnist", "--label-column", "y"], "is a column of a CSV file"),
        (["cfl", "--public", "x" * 300], "unknown public sample 'xxx"),
        (["cfl", "--public", "é" * 200 + "/a"], "unknown public sample 'éé"),
        (["cfl", "--public", "x" * 300 + ".csv", "--label-column", "y"], "cannot be read as a CSV"),
        (["cfl", "--json", ""], "--json takes a path, not ''"),
        (["cfl", "--picture", ""], "--picture takes a path, not ''"),
        (["cfl", "--seeds", "0"], "seeds = 0 is not possible"),
        (["cfl", "--scenario", "nope"], "unknown --scenario 'nope'"),
        (["nope"], "unknown protocol 'nope'"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert sentence in error
    assert len(error) < 1000


@pytest.mark.parametrize("data", ["x" * 300, "x" * 300 + ".csv", "a/" + "é" * 200])
def test_a_path_that_no_file_can_have_is_a_sentence_elsewhere(
    data: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for command in (["compare", "fedavg", "local"], ["sweep", "fedavg", "--noise", "0"]):
        columns = ["--client-column", "a", "--label-column", "b"]
        given = [*columns] if data.endswith(".csv") or "/" in data else []
        assert main([*command, "--data", data, *given, "--out", str(tmp_path / "o")]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_mistakes_from_python_are_sentences() -> None:
    for absurd in ({"clients": 10**5000}, {"samples": 10**40}, {"epsilon": [10**400]}):
        with pytest.raises(UsageError, match=r"is not possible|is too large"):
            plan(["cfl"], **absurd)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="epsilon is a list of numbers"):
        plan(["cfl"], epsilon=4)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="plan takes a list of protocols"):
        plan("cfl")
    with pytest.raises(UsageError, match="unknown option"):
        plan(["cfl"], roundz=3)
    with pytest.raises(UsageError, match="is no sample"):
        plan(["cfl"], public=3)
    with pytest.raises(UsageError, match="is what the sweep varies"):
        plan([CFL(clip=1.0, noise=1.0)])
    few = PublicSample("few", np.zeros((4, 2), np.float32), np.arange(4), 4)
    with pytest.raises(UsageError, match="few has 4 rows"):
        few.clients(2, 2, LabelSwap(2), 0)
    with pytest.raises(UsageError, match="no frontier"):
        frontier(Outlook(2, 2))

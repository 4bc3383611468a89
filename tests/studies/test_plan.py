"""`securecluster plan` and `securecluster.plan`: what ε buys, without private data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import securecluster
from securecluster import CFL, FedAvg, Federation, LabelSwap, Settings
from securecluster.cli.main import main
from securecluster.data import Dirichlet, LabelSplit, Pathological, Scenario
from securecluster.data.public_sample import PublicSample, public_sample
from securecluster.errors import UsageError
from securecluster.parties.run_check import checked_run
from securecluster.protocols.registry import protocol_class
from securecluster.studies import plan as plans
from securecluster.studies.plan import Outlook, cost, frontier, plan

SHARED: dict[str, Any] = {"model": "linear", "rounds": 1, "epochs": 1}
SMALL: dict[str, Any] = {"clients": 8, "samples": 20, "seeds": 2, **SHARED}


@pytest.fixture(scope="module")
def outlook() -> Outlook:
    return plan(["cfl", "fedavg"], epsilon=[4, math.inf], **SMALL)


@pytest.fixture(scope="module")
def formulas() -> Outlook:
    return plan(["cfl", "fedavg"], epsilon=[4, math.inf], work=0, **SMALL)


def test_a_line_stands_for_each_protocol_at_each_epsilon(outlook: Outlook) -> None:
    lines = [(line.protocol, line.epsilon) for line in outlook.forecasts]
    assert lines == [("cfl", 4), ("cfl", math.inf), ("fedavg", 4), ("fedavg", math.inf)]
    assert all(line.runs == 2 and line.rounds == 1 for line in outlook.forecasts)
    assert outlook.forecasts[0].power == "clusters lost in noise, training doubtful"
    assert outlook.forecasts[1].power == "no noise"
    assert "on 1,797 public rows of digits (label-swap, 4 cluster(s))" in outlook.notes[1]
    assert "scores are those of digits" in outlook.notes[2]


def test_noise_and_bytes_are_those_of_the_run_itself(outlook: Outlook) -> None:
    # of the clients' own data, which no plan reads
    federation = Federation.simulate("digits", scenario=LabelSwap(), clients=8, samples=20, seed=99)
    cfl = CFL(clip=1.0, target_epsilon=4.0, **SHARED)
    cfl.fit(federation, Settings(transcript="none"))
    expected = outlook.forecasts[0]
    assert expected.noise == cfl.kept_.learned.config["noise"]
    assert expected.up == round(cfl.bytes_["up"] / 8)
    assert expected.down == round(cfl.bytes_["down"] / 8)


def test_scores_are_those_of_runs_on_the_named_sample(outlook: Outlook) -> None:
    sample = public_sample("digits")
    settings = Settings(transcript="none", threads=1, keys_from_seed=True)
    scores = []
    for seed in (0, 1):
        federation = sample.clients(8, 20, LabelSwap(), seed)
        fitted = FedAvg(clip=1.0, **SHARED).fit(federation, settings)
        scores.append(float(fitted.scores_.mean()))
    line = outlook.forecasts[3]
    assert line.accuracy == pytest.approx(sum(scores) / 2)
    assert (line.accuracy_least, line.accuracy_most) == pytest.approx((min(scores), max(scores)))


def test_what_looks_for_no_clusters_has_no_ari(outlook: Outlook) -> None:
    assert [line.ari is None for line in outlook.forecasts] == [False, False, True, True]


def test_without_work_formulas_alone_are_left_and_it_is_said(
    outlook: Outlook, formulas: Outlook
) -> None:
    for line, simulated in zip(formulas.forecasts, outlook.forecasts, strict=True):
        assert (line.runs, line.left_out, line.accuracy, line.up) == (0, 2, None, None)
        for name in ("noise", "rounds", "power", "delta", "dp_unit"):
            assert getattr(line, name) == getattr(simulated, name)
    text = repr(formulas)
    assert text.count("left out  ") == 8 and "simulated" not in text
    assert "left out for time, simulations: 2 of cfl at ε = 4, " in text
    with pytest.raises(UsageError, match="nothing was simulated"):
        frontier(formulas)


def test_first_simulations_come_before_second_ones_and_work_is_never_exceeded() -> None:
    methods = ["fedavg", "local"]
    federation = public_sample("digits").clients(8, 20, LabelSwap(), 0)
    checks = [
        checked_run(protocol_class(name)(clip=1.0, **SHARED), federation, plans.SETTINGS)
        for name in methods
    ]
    both = sum(cost(check) for check in checks) / plans.MILLION
    for share, runs in ((0.4, [0, 0]), (0.6, [1, 0]), (1.0, [1, 1]), (1.6, [2, 1])):
        made = plan(methods, epsilon=[math.inf], work=both * share + 1e-9, **SMALL)
        assert [line.runs for line in made.forecasts] == runs
        assert [line.left_out for line in made.forecasts] == [2 - some for some in runs]


def test_work_grows_with_what_clients_do() -> None:
    sample = public_sample("digits")

    def work(clients: int = 8, samples: int = 20, **options: Any) -> float:
        federation = sample.clients(clients, samples, LabelSwap(), 0)
        method = FedAvg(**{"clip": 1.0, "noise": 1.0, **SHARED, **options})
        return cost(checked_run(method, federation, plans.SETTINGS))

    least = work()
    larger = [
        work(clients=16), work(samples=40), work(rounds=2), work(epochs=2), work(model="mlp"),
        work(dp_unit="example"),
    ]  # fmt: skip
    assert least >= 8 * 20 and all(least < some for some in larger)


def test_sums_without_masks_have_the_noise_of_secure_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = public_sample("digits").clients(12, 20, LabelSwap(2), 0)
    # updates are nothing but noise
    options = {"clip": 1.0, "aggregation": "secagg", "lr": 1e-9, **SHARED}

    def parameters(method: Any) -> Any:
        module = method.fit(federation, plans.SETTINGS).module_of(federation.names[0])
        return torch.cat([row.detach().flatten() for row in module.parameters()])

    start = parameters(FedAvg(**options))
    noisy = FedAvg(**options, target_epsilon=4.0)
    check = checked_run(noisy, federation, plans.SETTINGS)
    assert plans._without_masks(check) == (check.method, True)
    monkeypatch.setattr(plans, "MOST_MASKED", 4)
    method, masked = plans._without_masks(check)
    assert not masked and method.aggregation == "plain"
    norms = [float((parameters(some) - start).norm()) for some in (check.method, method)]
    assert norms[1] == pytest.approx(norms[0], rel=0.1)
    assert method.ledger_.price(1e-5).epsilon <= 4


@pytest.mark.parametrize("name", ["fedavg", "hidden"])
def test_masks_that_are_left_out_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MOST_MASKED", 4)
    made = plan([name], epsilon=[400], **{**SMALL, "seeds": 1}, clusters=2)
    assert (made.forecasts[0].runs, made.forecasts[0].up) == (1, None)
    assert any(f"masks of secure sums, and with them kB: {name}" in note for note in made.notes)


def test_simulations_that_differ_could_not_tell(outlook: Outlook) -> None:
    line = replace(outlook.forecasts[0], ari=0.5, ari_least=0.0, ari_most=1.0)
    text = repr(Outlook(8, 20, (line,)))
    assert "could not tell" in text and "0.00 to 1.00" not in text
    near = replace(line, ari_least=0.45, ari_most=0.55)
    assert "0.50 (0.45 to 0.55)" in repr(Outlook(8, 20, (near,)))
    assert "0.50 (1 run)" in repr(Outlook(8, 20, (replace(line, runs=1),)))


def test_a_table_of_two_classes_has_two_clusters() -> None:
    made = plan(["ifca"], epsilon=[math.inf], public="breast_cancer", **SMALL)
    (line,) = made.forecasts
    assert line.ari is not None and line.accuracy is not None and line.accuracy > 0.5
    assert "569 public rows of breast_cancer (label-permutation, 2 cluster(s))" in made.notes[1]
    with pytest.raises(UsageError, match="makes at most 1 clusters of 2 classes"):
        plan(["cfl"], public="breast_cancer", scenario="label-swap", **SMALL)


def test_simulated_clients_have_their_size_and_only_public_rows() -> None:
    sample = public_sample("digits")
    federation = sample.clients(5, 200, LabelSwap(2), seed=3)
    assert (len(federation), federation.classes, federation.shape) == (5, 10, (1, 8, 8))
    assert all(len(shard.y) == 200 and len(shard.y_test) == 50 for shard in federation.shards)
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
    assert "40 public rows of your public sample" in made.notes[1]


@pytest.mark.parametrize("skew", [Pathological(clusters=4), Dirichlet(clusters=3), LabelSplit()])
def test_clients_of_skewed_labels_have_all_samples_to_train_and_to_test(skew: Scenario) -> None:
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


def test_of_several_clients_the_largest_is_the_sample(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    draws = np.random.default_rng(1)
    path = tmp_path / "sample.csv"
    # what a label means differs between hospitals
    rows = [f"{a},{'high' if (a > 0) == (k % 3 > 0) else 'low'},{'NWW'[k % 3]}"
            for k, a in enumerate(draws.normal(size=60))]  # fmt: skip
    path.write_text("\n".join(["a,kind,hospital", *rows]) + "\n")
    sample = public_sample(str(path), "kind", "hospital")
    assert len(sample.y) == 40
    assert np.array_equal(sample.y == 0, sample.x[:, 0] > 0)
    assert "the 40 rows of W are used, of all 2 clients the most" in sample.notes[0]


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
    assert printed[0] == "8 clients with 20 samples each"
    assert printed[1].split()[:4] == ["protocol", "ε", "noise", "rounds"]
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
        (["cfl", "--epsilon", "0"], "epsilon = 0 is not possible: a target is above 0"),
        (["cfl", "--public", "nope"], "unknown public sample 'nope'"),
        (["cfl", "--public", "x.csv"], "x.csv needs the name of the column with the labels"),
        (["cfl", "--public", "x.csv", "--label-column", "y"], "x.csv cannot be read"),
        *(
            (["cfl", f"--{name}", "3"], f"plan has no option {name} any more")
            for name in plans.LEFT
        ),
        (["cfl", "--work", "-1"], "work = -1.0 is not possible"),
        (["cfl", "--work", "inf"], "work = inf is not possible"),
        (["cfl", "--k", "3"], "--k is an option of"),
        (["cfl", "--picture", "x.txt"], "its name ends in .png, .pdf or .svg"),
        (["cfl", "--clients", "1"], "--clients = 1 is not possible"),
        (["cfl", "--clients", "9" * 23], "is not possible: it is a whole number from 2 to"),
        (["cfl", "--samples", "9" * 5000], "--samples takes a whole number, not '999"),
        (["cfl", "--samples", "9" * 23], "is not possible: it is a whole number from 2 to"),
        (["cfl", "--clients", "100000", "--samples", "100000"], "give fewer of either"),
        (["cfl", "--rounds", "9" * 23], "is not possible: it is a whole number from 1 to"),
        (["cfl", "--epsilon", "1e400"], "--target-epsilon '1e400' is too large: give a"),
        (["cfl", "--epsilon", "4", "-1e400"], "--target-epsilon '-1e400' is too large"),
        (["cfl", "--lr", "9" * 400], "is too large: give a smaller number"),
        (["cfl", "--label-column", "y"], "are of a CSV file, and public is none"),
        (["cfl", "--public", "mnist", "--label-column", "y"], "are of a CSV file"),
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
    arguments: list[str], sentence: str, refused_by: Callable[..., None]
) -> None:
    refused_by(sentence, "plan", *arguments)


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
    with pytest.raises(UsageError, match="plan has no option find any more: give several targets"):
        plan(["cfl"], find="epsilon")

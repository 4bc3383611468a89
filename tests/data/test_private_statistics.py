"""Statistics over rows, which come before any clip, under noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster import ClusteredClassifier, FedAvg, Federation
from securecluster.cli.main import main
from securecluster.data.facts import agree
from securecluster.errors import PolicyError, UsageError
from securecluster.models.objectives import Language, Trajectory
from securecluster.parties.endpoints import build_client
from securecluster.protocols import CFLGP, FLUX, IFCA, PACFL, OneShot, Signature
from securecluster.runtime.settings import Settings
from securecluster.statements.privacy_section import section

DRAW = np.random.default_rng(0)
X = {name: DRAW.normal(size=(20, 3)) for name in ("ann", "bob", "cid", "dan")}
NUMBERS = {name: DRAW.integers(0, 3, 20) for name in X}
TEXT = {name: np.array(["a", "b", "c"])[y] for name, y in NUMBERS.items()}
BOOLEANS = {name: y > 1 for name, y in NUMBERS.items()}
TOKENS = {name: DRAW.integers(0, 9, (20, 5)) for name in X}
STEPS = {name: (DRAW.normal(size=(20, 4, 2)), DRAW.normal(size=(20, 2))) for name in X}
NOISE: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "clip": 1.0, "noise": 1.0}


def of(labels: dict[str, Any], **more: Any) -> Federation:
    return Federation.from_arrays({name: (X[name], labels[name]) for name in X}, seed=0, **more)


def frame(labels: dict[str, Any], **more: Any) -> Federation:
    pandas = pytest.importorskip("pandas")
    tables = [
        pandas.DataFrame(X[name], columns=list("uvw")).assign(site=name, ill=labels[name])
        for name in X
    ]
    return Federation.from_frame(pandas.concat(tables), client="site", label="ill", seed=0, **more)


def spoken(**more: Any) -> Federation:
    pairs = {name: (tokens, tokens) for name, tokens in TOKENS.items()}
    return Federation.from_arrays(pairs, objective=Language(), seed=0, **more)


COUNTED: dict[str, Callable[[], Federation]] = {
    "numbers": lambda: of(NUMBERS),
    "text": lambda: of(TEXT),
    "a column of numbers": lambda: frame(NUMBERS),
    "a column of text": lambda: frame(TEXT),
    "tokens": spoken,
    "some of the clients": lambda: of(TEXT).select(["bob", "dan"]),
    "groups": lambda: Federation.from_groups(
        np.concatenate(list(X.values())),
        np.concatenate(list(TEXT.values())),
        np.repeat(list(X), 20),
        seed=0,
    ),
}
GIVEN: dict[str, Callable[[], Federation]] = {
    "a number": lambda: of(NUMBERS, classes=3),
    "names": lambda: of(TEXT, classes=["a", "b", "c"]),
    "names of a column": lambda: frame(TEXT, classes=["a", "b", "c"]),
    "booleans are two": lambda: of(BOOLEANS),
    "a column of booleans": lambda: frame(BOOLEANS),
    "the size of a vocabulary": lambda: spoken(classes=9),
    "the names of a run": lambda: of(TEXT).with_classes(["a", "b", "c", "d"]),
    "a known data set": lambda: Federation.simulate("digits", clients=4, samples=10, seed=0),
}


@pytest.mark.parametrize("unit", ["client", "example"])
@pytest.mark.parametrize("case", COUNTED)
def test_classes_that_labels_told_are_refused_with_noise(case: str, unit: str) -> None:
    federation = COUNTED[case]()
    config = FedAvg(rounds=1, clip=1.0).config(federation, "float32")
    assert config["classes"] == federation.classes
    with pytest.raises(UsageError, match="the classes were read from the clients' labels"):
        FedAvg(rounds=1, clip=1.0, noise=1.0, dp_unit=unit).config(federation, "float32")


@pytest.mark.parametrize("case", GIVEN)
def test_classes_that_are_given_are_public(case: str) -> None:
    federation = GIVEN[case]()
    FedAvg(rounds=1, clip=1.0, noise=1.0).config(federation, "float32")


def test_coordinates_are_of_the_targets_shape() -> None:
    paths = Federation.from_arrays(STEPS, objective=Trajectory(metres=(1.0, 1.0)), seed=0)
    assert not paths.classes_counted


@pytest.mark.parametrize(
    "method",
    [
        FedAvg(rounds=1, clip=1.0, noise=1.0, dp_unit="example"),
        FedAvg(rounds=1, clip=1.0, target_epsilon=2.0, dp_unit="example"),
        IFCA(k=2, rounds=1, clip=1.0, noise=1.0, dp_unit="example"),
        OneShot(rounds=1, gram_noise=1.0, dp_unit="example"),
        Signature(rounds=1, signature_noise=1.0, dp_unit="example"),
        PACFL(rounds=1, gram_noise=1.0, dp_unit="example"),
        CFLGP(k=2, rounds=5, clip=1.0, noise=1.0, dp_unit="example"),
        FLUX(rounds=5, clip=1.0, noise=1.0, dp_unit="example"),
    ],
    ids=lambda method: f"{method.name}-{method.get_params()['target_epsilon']}",
)
def test_a_scale_of_a_clients_rows_is_refused_where_noise_is_for_one_of_them(method: Any) -> None:
    with pytest.raises(UsageError, match="scaling='client' scales each example"):
        method.fit(of(NUMBERS, classes=3, scaling="client"))
    bounds = of(NUMBERS, classes=3, scaling=(-4, 4))
    method.config(bounds, "float32")


def test_what_stays_within_a_clients_release_is_said() -> None:
    fitted = FedAvg(**NOISE).fit(of(NUMBERS, classes=3, scaling="client"))
    privacy = section(fitted.result_)
    assert any("own mean and deviation" in text for text in privacy["assumed"])
    assert np.isfinite(privacy["epsilon"])
    plain = section(FedAvg(**NOISE).fit(of(NUMBERS, classes=3)).result_)
    assert not any("own mean and deviation" in text for text in plain["assumed"])


IN_MEMORY: dict[str, Callable[[Any], Any]] = {
    "means": lambda cohort: cohort.inputs(0).sub_(cohort.inputs(0).mean(0)),
    "a range of one column": lambda cohort: cohort.inputs(1)[:, 0].div_(cohort.inputs(1).max()),
    "missing values": lambda cohort: cohort.inputs(0).nan_to_num_(float(cohort.inputs(0).median())),
    "an order": lambda cohort: cohort.inputs(0).copy_(cohort.inputs(0).sort(0).values),
    "rare classes": lambda cohort: cohort.labels(2).clamp_(max=int(cohort.labels(2).mode().values)),
    "all clients": lambda cohort: cohort.training_samples.x.clamp_(max=2.0),
    "test samples": lambda cohort: cohort.test_samples.y.fill_(0),
}


@pytest.mark.parametrize("way", IN_MEMORY)
def test_a_method_works_on_copies_of_samples(way: str) -> None:
    endpoint = build_client(FedAvg(**NOISE), of(NUMBERS, classes=3), Settings())
    access, cohort = endpoint.client.cohort.access, endpoint.client.cohort
    with access.during("told", may_read=True, may_train=True):
        cohort.inputs(0).clone().sub_(1.0)
    with (
        pytest.raises(PolicyError, match=r"told changes its clients' samples in memory.*clone"),
        access.during("told", may_read=True, may_train=True),
    ):
        IN_MEMORY[way](cohort)


def test_numbers_of_classes_that_nodes_told_are_refused_with_noise() -> None:
    numbered, named = of(NUMBERS), of(TEXT, classes=["a", "b", "c"])

    def told(federation: Federation, classes: int | None) -> Any:
        facts = [federation.facts_of(i, classes=True) for i in range(4)]
        return agree(facts, seed=0, classes=classes)

    with pytest.raises(UsageError, match="read from the clients' labels"):
        FedAvg(**NOISE).config(told(numbered, None), "float32")
    FedAvg(**NOISE).config(told(numbered, 3), "float32")
    FedAvg(**NOISE).config(told(named, None), "float32")


def test_a_classifier_takes_public_classes() -> None:
    x, y = np.concatenate(list(X.values())), np.concatenate(list(TEXT.values()))
    sites = np.repeat(list(X), 20)
    with pytest.raises(UsageError, match="read from the clients' labels"):
        ClusteredClassifier(FedAvg(**NOISE), random_state=0).fit(x, y, groups=sites)
    classifier = ClusteredClassifier(
        FedAvg(**NOISE), classes=["c", "b", "a", "never"], random_state=0
    ).fit(x, y, groups=sites)
    assert classifier.classes_.tolist() == ["a", "b", "c", "never"]
    assert classifier.predict_proba(x[:2]).shape == (2, 4)
    few = ClusteredClassifier(FedAvg(**NOISE), classes=["a", "b"], random_state=0)
    with pytest.raises(UsageError, match="label 'c' is none of the classes"):
        few.fit(x, y, groups=sites)


@pytest.mark.parametrize(
    ("cells", "classes", "names"),
    [
        (("no", "yes"), ["yes", "no"], ["yes", "no"]),
        (("0", "1"), ["1", "0"], [1, 0]),
        (("1.5", "2.50"), ["1.5", "2.50"], ["1.5", "2.50"]),
        (("007", "7"), ["007", "7"], ["007", "7"]),
        (("true", "false"), ["True", "False"], [True, False]),
    ],
)
def test_classes_of_a_file_are_an_option(
    tmp_path: Path, cells: tuple[str, str], classes: list[str], names: list[Any]
) -> None:
    pytest.importorskip("pyarrow")
    rows = [f"h{i % 3},{i / 7},{cells[i % 2]}" for i in range(40)]
    path = tmp_path / "rows.csv"
    path.write_text("site,u,ill\n" + "\n".join(rows) + "\n")
    options = ["--client-column", "site", "--label-column", "ill", "--classes", *classes]
    out = tmp_path / "run"
    run = ["run", "fedavg", "--data", str(path), *options, "--rounds", "1", "--quiet"]
    noise = ["--clip", "1", "--noise", "1", "--out", str(out)]
    assert main([*run, *noise]) == 0
    fitted = FedAvg.load(out)
    assert fitted.classes_.tolist() == names
    # a run from Python writes the same options
    federation = Federation.from_csv(
        path, client_column="site", label_column="ill", classes=names, seed=0
    )
    FedAvg(rounds=1).fit(federation, folder=tmp_path / "python")
    config = json.loads((tmp_path / "python" / "config.json").read_text())
    assert config["simulation"]["classes"] == [str(name) for name in names]


def test_two_texts_of_one_label_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "rows.csv"
    path.write_text("site,u,ill\n" + "\n".join(f"h{i % 3},{i},{i % 2}" for i in range(40)))
    options = ["--client-column", "site", "--label-column", "ill", "--classes", "1", "01"]
    assert main(["run", "fedavg", "--data", str(path), *options, "--rounds", "1"]) == 2
    assert "two different labels" in capsys.readouterr().err

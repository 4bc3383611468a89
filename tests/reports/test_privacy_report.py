"""What a run says of ε: the number, and everything it means nothing without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import two_clusters
from mpmath import exp as mexp
from mpmath import mp, mpf, ncdf
from safetensors import safe_open
from safetensors.torch import load_file

from securecluster import Federation
from securecluster.cli.main import main
from securecluster.models.objectives import Language, Trajectory
from securecluster.protocols import (
    ClusteringProtocol,
    FedAvg,
    Hidden,
    Local,
    OneShot,
    RandomClusters,
    Settings,
    Signature,
)
from securecluster.statements.privacy_section import section

SMALL = ["--clients", "6", "--clusters", "2", "--samples", "40", "--rounds", "2", "--threads", "1"]


def told(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], str]:
    assert main(["run", *arguments, "--out", str(folder)]) == 0
    said = capsys.readouterr()
    assert re.sub(r"securecluster: note: one cluster was found .*\n", "", said.err) == ""
    privacy: dict[str, Any] = json.loads((folder / "result.json").read_text())["privacy"]
    return privacy, re.sub(r"[\s│]+", " ", said.out)


def delta_of(mu: float, epsilon: float) -> float:
    """δ(ε) of a Gaussian mechanism with μ (Balle & Wang 2018, Theorem 8), by mpmath."""
    mp.dps = 40
    return float(
        ncdf(mpf(mu) / 2 - mpf(epsilon) / mu)
        - mexp(epsilon) * ncdf(-mpf(mu) / 2 - mpf(epsilon) / mu)
    )


@pytest.mark.parametrize("placement", ["local", "central"])
def test_the_number_comes_with_unit_neighbours_placement_and_gaps(
    placement: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noised = ["--clip", "1", "--noise", "2", "--delta", "1e-6", "--placement", placement]
    privacy, out = told(["fedavg", *SMALL, *noised], tmp_path / "r", capsys)
    assert delta_of(2**0.5 / 2, privacy["epsilon"]) == pytest.approx(1e-6, rel=1e-3), (
        "two releases of z = 2 are one of μ = √2/2"
    )
    assert delta_of(2**0.5, privacy["epsilon_replace"]) == pytest.approx(1e-6, rel=1e-3), (
        "replacing doubles μ"
    )
    assert privacy["epsilon"] < privacy["epsilon_rdp"]
    assert (privacy["delta"], privacy["unit"], privacy["neighbouring"]) == (
        1e-6,
        "client",
        "for one client's data, or blanks in their place; who takes part is public",
    )
    assert privacy["placement"].startswith(placement) and privacy["exact"] == []
    assert privacy["releases"] == [
        {
            "method": "contribute", "field": "delta", "mechanism": "gaussian",
            "noise_multiplier": 2.0, "times": 2, "reader": "server",
        }
    ]  # fmt: skip
    assert any("before the server adds its noise" in text for text in privacy["server_view"]) == (
        placement == "central"
    )
    assert privacy["not_covered"] and privacy["assumed"]
    assert (
        f"{privacy['epsilon']:.4g} at δ = 1e-06" in out
        and "delta of contribute, 2 times, z = 2" in out
        and "against any other data" in out
    )
    assert main(["replay", str(tmp_path / "r")]) == 0


def test_what_makes_epsilon_infinite_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noised = ["--clip", "1", "--noise", "1", "--dp-unit", "example", "--tasks", "2"]
    privacy, out = told(["oneshot", "--clients", "6", *SMALL[4:], *noised], tmp_path / "r", capsys)
    assert (
        privacy["epsilon"] is None and privacy["delta"] is None and privacy["epsilon_rdp"] is None
    )
    assert {"eigen: vectors", "relevance: row"} <= set(privacy["exact"])
    assert "infinite" in out and "without noise went" in out


@pytest.mark.filterwarnings("ignore:on their own test samples")
@pytest.mark.always
def test_the_target_is_met_in_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    privacy, _ = told(
        ["flhc", *SMALL, "--pre-rounds", "1", "--clip", "1", "--target-epsilon", "8"],
        tmp_path / "r",
        capsys,
    )
    assert 7.9 < privacy["epsilon"] <= 8.0 and privacy["noise"] > 0.5
    assert (
        json.loads((tmp_path / "r" / "config.json").read_text())["protocol"]["target_epsilon"] == 8
    )


def test_examples_are_their_own_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    privacy, out = told(
        ["fedavg", *SMALL, "--clip", "1", "--noise", "1", "--dp-unit", "example"],
        tmp_path / "r",
        capsys,
    )
    assert (
        privacy["unit"] == "example"
        and privacy["neighbouring"]
        == "for one example of one client, or a blank in its place; numbers of examples are public"
        and privacy["accountant"] == "PRV"
    )
    # two rounds of 6 steps at q = 20/40 and z = 1: dp-accounting 0.6 by connected dots
    assert privacy["epsilon_replace"] == pytest.approx(17.9476, abs=0.03)
    assert f"{privacy['epsilon_replace']:.4g} against any other data" in out
    assert any("taken" in text or "public" in text for text in privacy["assumed"])
    assert "training of contribute, 2 times, z = 1" in out


def test_nothing_released_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    privacy, out = told(["local", *SMALL, "--clip", "1", "--noise", "1"], tmp_path / "r", capsys)
    assert (privacy["epsilon"], privacy["delta"], privacy["placement"]) == (
        0.0,
        0.0,
        "nothing is released",
    )
    assert " 0 (nothing is released" in out


@pytest.mark.parametrize("unit", ["client", "example"])
def test_windows_that_have_positions_in_common_are_told(unit: str) -> None:
    draw = np.random.default_rng(0)
    walks = {
        name: (draw.random((24, 4, 2)).astype(np.float32), draw.random((24, 2)).astype(np.float32))
        for name in "abc"
    }
    federation = Federation.from_arrays(walks, objective=Trajectory(), seed=0)
    fitted = FedAvg(
        rounds=1, epochs=1, clip=1.0, noise=1.0, dp_unit=unit, model="lstm-trajectory"
    ).fit(federation)
    told = section(fitted.result_)["not_covered"]
    assert any("one position may be in 5 examples" in text for text in told) == (unit == "example")


def test_a_trusted_server_reads_clients_own_noise_as_such(small: Federation) -> None:
    noised = {
        "clip": 1.0, "noise": 1.0, "dp_unit": "client", "placement": "central", "gram_noise": 1.0,
    }  # fmt: skip
    told = section(OneShot(rounds=1, epochs=1, tasks=2, sealed=False, **noised).fit(small).result_)
    how = {
        text.split(" of ")[0]: text
        for text in (*told["server_view"], *told["lps_view"])
        if " call, " in text
    }
    assert "before the server adds its noise" in how["delta"] and "with noise" in how["vectors"]


def test_epsilon_of_much_noise_keeps_its_delta_and_no_client_tells_its_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    privacy, out = told(["fedavg", *SMALL, "--clip", "1", "--noise", "1e6"], tmp_path / "r", capsys)
    assert privacy["epsilon"] == 0 and privacy["delta"] == 1e-5
    assert "0 at δ = 1e-05" in out and "number of samples" not in out
    privacy, out = told(["local", *SMALL, "--clip", "1", "--noise", "1"], tmp_path / "l", capsys)
    assert (
        privacy["epsilon"] == 0 == privacy["delta"]
        and "ε 0 (nothing is released" in out
        and "z =" not in out
    )


def test_exact_releases_beside_noisy_vectors_are_named_and_who_adds_what_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["oneshot", "--clients", "6", *SMALL[4:], "--tasks", "2", "--gram-noise", "1"]
    # one example more or less is no neighbour: n is public where single ones are protected
    for unit, exact in (
        ("client", ["contribute: delta", "contribute: size"]),
        ("example", ["contribute: delta"]),
    ):
        privacy, out = told([*small, "--dp-unit", unit], tmp_path / unit, capsys)
        assert privacy["exact"] == exact
        assert f"without noise went {', '.join(exact)}" in out
        assert any("size of contribute" in text for text in privacy["free"]) == (unit == "example")
        assert "vectors of eigen, once, z = 1" in out
    central = [
        "--no-sealed", "--clip", "1", "--noise", "1", "--dp-unit", "client",
        "--placement", "central",
    ]  # fmt: skip
    privacy, _ = told([*small, *central], tmp_path / "c", capsys)
    (vectors,) = (text for text in privacy["server_view"] if text.startswith("vectors"))
    (delta,) = (text for text in privacy["lps_view"] if text.startswith("delta"))
    assert "with noise" in vectors and "before the server adds its noise" in delta


def fields_of(privacy: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(own["method"], own["field"]): own for own in privacy["fields"]}


def test_vectors_in_the_clear_are_told_and_nothing_is_claimed_of_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three unit vectors that span three samples: no table may say that no data was seen."""
    given = [
        "oneshot", "--clients", "6", "--samples", "3", "--rounds", "2", "--threads", "1",
        "--no-sealed", "--mask", "none",
    ]  # fmt: skip
    privacy, out = told(given, tmp_path / "r", capsys)
    assert any(
        text.startswith("vectors of every client in every eigen call")
        for text in privacy["server_view"]
    )
    (vectors,) = (text for text in privacy["server_view"] if text.startswith("vectors"))
    assert "without noise" in vectors and "no mask covers them" in vectors
    assert not any(
        "any client's data" in text or "a client's data" in text for text in privacy["unseen"]
    )
    assert any(
        "vectors of eigen" in text and "may follow" in text for text in privacy["unprotected"]
    )
    assert "unprotected vectors of eigen, row of relevance" in out
    assert main(["replay", str(tmp_path / "r")]) == 0


def test_every_private_field_of_every_reply_is_listed_with_its_reader(small: Federation) -> None:
    """Sealed vectors go to clients, updates to local parameter servers, relevance to the server, in
    the clear.
    """
    fitted = OneShot(rounds=2, epochs=1, tasks=2).fit(small)
    privacy = section(fitted.result_)
    found = fields_of(privacy)
    assert set(found) == {
        (event.method, name) for event in fitted.ledger_.events for name in event.fields
    }
    readers = {place: own["reader"] for place, own in found.items()}
    assert readers["eigen", "vectors"] == "client"
    assert readers["relevance", "row"] == "server"
    assert readers["contribute", "delta"] == "lps"
    assert found["contribute", "delta"]["masked"] and not found["relevance", "row"]["masked"]
    assert any("vectors" in text and "sealed" in text for text in privacy["client_view"])
    assert any("vectors of eigen" in text for text in privacy["unseen"])
    assert any("plain pairs" in text for text in privacy["server_view"] if text.startswith("row "))


def test_what_noise_masks_and_servers_hide_is_derived_from_how_replies_left(
    small: Federation,
) -> None:
    noised = {"rounds": 1, "epochs": 1, "clip": 1.0, "noise": 1.0}
    bare = section(FedAvg(rounds=1, epochs=1).fit(small).result_)
    assert bare["unseen"] == [
        "nothing is hidden from it: no mask, seal or noise covers what it read"
    ]
    assert "delta of contribute" in bare["unprotected"][0]
    masked = section(FedAvg(rounds=1, epochs=1, mask="permutation").fit(small).result_)
    assert masked["unseen"] == ["which coordinate is which in delta of contribute"]
    assert masked["unprotected"] == [
        "size of contribute went without mask or noise: a client's data, or much of them, may "
        "follow"
    ]
    mixed = section(FedAvg(rounds=1, epochs=1, mask="rotation").fit(small).result_)
    assert mixed["unseen"] == ["single coordinates, which are mixed, in delta of contribute"]
    local = section(FedAvg(**noised).fit(small).result_)
    assert local["unseen"] == ["delta of contribute without noise"] and local["unprotected"] == []
    central = section(FedAvg(**noised, placement="central").fit(small).result_)
    assert (
        central["unseen"] == bare["unseen"] and "delta of contribute" in central["unprotected"][0]
    )
    example = section(FedAvg(**noised, dp_unit="example").fit(small).result_)
    assert example["unseen"] == ["what clients' training would have led to without its noise"]
    alone = section(Local(**noised).fit(small).result_)
    assert alone["unseen"] == ["anything that depends on a client's data"] and alone["fields"] == []


def test_free_releases_say_why_they_cost_nothing(
    small: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["srfca", *SMALL, "--local-rounds", "1", "--refine", "1", "--clip", "1", "--noise", "1"]
    privacy, out = told(given, tmp_path / "r", capsys)
    free = [row for row in privacy["releases"] if row["mechanism"] == "free"]
    assert len(free) == len(privacy["free"]) > 0
    assert any(
        text.startswith("delta of post")
        and "computed only from what had left clients before" in text
        for text in privacy["free"]
    )
    assert "no cost delta of post" in out


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("placement", ["local", "central"])
def test_files_that_epsilon_does_not_cover_are_named(
    placement: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noised = ["--clip", "1", "--noise", "2", "--placement", placement, "--pictures"]
    privacy, out = told(["fedavg", *SMALL, *noised], tmp_path / "r", capsys)
    text = " ".join(privacy["uncovered_files"])
    for name in (
        "accuracy.png",
        "history.jsonl",
        "learned.safetensors",
        "config.json",
        "clients.safetensors",
        "transcript/",
    ):
        assert name in text and (tmp_path / "r" / name).exists()
    assert ("before it adds noise" in text) == (placement == "central")
    assert "true clusters" in text and "not covered config.json" in out
    assert "number of samples" not in text, "no price depends on it, so no file has it"
    assert main(["replay", str(tmp_path / "r")]) == 0


ALONE = r"models\.safetensors: the model of clusters 0, 1, .* trained alone, without noise"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("method", "shown"),
    [
        (Local(rounds=1, epochs=1), True),
        (Local(rounds=1, epochs=1, clip=1.0, noise=2.0), False),
        (RandomClusters(rounds=1, epochs=1, k=4), True),
        (RandomClusters(rounds=1, epochs=1, k=4, clip=1.0, noise=2.0), False),
        (OneShot(rounds=1, epochs=1, tasks=4, gram_noise=3.0), False),
        (FedAvg(rounds=1, epochs=1, clip=1.0, noise=2.0), False),
    ],
)
def test_shared_files_with_models_that_were_trained_alone_are_named(
    method: ClusteringProtocol, shown: bool, tmp_path: Path
) -> None:
    clients = Federation.simulate("digits", clients=4, samples=40, seed=0)
    fitted = method.fit(clients, folder=tmp_path / "run")
    privacy = section(fitted.result_)
    assert privacy["epsilon"] is not None
    models = load_file(tmp_path / "run" / "models.safetensors")
    own = [fitted.model_of(client) for client in fitted.kept_.learned.local]
    exact = any(
        torch.equal(model[key], tensor)
        for model in own
        for key in model
        for name, tensor in models.items()
        if name.endswith(key)
    )
    assert exact == shown
    assert bool(re.search(ALONE, " ".join(privacy["uncovered_files"]))) == shown


def test_the_shared_files_with_the_numbers_of_samples_are_named(tmp_path: Path) -> None:
    clients = Federation.simulate("digits", clients=4, samples=40, seed=0)
    plain: dict[str, Any] = {"rounds": 1, "epochs": 1, "clip": 1.0}
    for name, method in {
        "noised": FedAvg(**plain, noise=2.0, dp_unit="example"),
        "alone": Local(**plain, dp_unit="example"),
    }.items():
        fitted = method.fit(clients, folder=tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        there = "sizes" in config["network"]
        assert there == (name == "noised")
        said = [
            text
            for text in section(fitted.result_)["uncovered_files"]
            if "number of samples" in text
        ]
        assert said == [
            f"{'config.json, ' if there else ''}learned.safetensors: each client's number of "
            "samples"
        ]


def test_numbers_of_samples_that_signatures_publish_are_named(small: Federation) -> None:
    for unit, there in (("example", True), ("client", False)):
        method = Signature(rounds=1, model="linear", k=2, signature_noise=1.0, dp_unit=unit)
        privacy = section(method.fit(small).result_)
        text = "config.json: each client's number of samples"
        assert (text in privacy["uncovered_files"]) == there


def test_labels_that_only_clients_know_are_named_where_files_have_them(tmp_path: Path) -> None:
    clients = two_clusters(8, 100)
    params: dict[str, Any] = {"rounds": 1, "model": "linear", "clip": 1.0, "noise": 0.02}
    assigned = Hidden(k=2, **params).fit(clients, folder=tmp_path)
    labels = json.loads((tmp_path / "result.json").read_text())["labels"]
    # they follow from the clients' points without noise
    assert labels == assigned.labels_.tolist() and len(set(labels)) == 2
    with safe_open(tmp_path / "models.safetensors", "pt") as models:
        shared = json.loads(models.metadata()["securecluster"])
    assert json.loads(shared["labels"]) == labels
    sentence = "each client's cluster, or what follows from it, which the client alone knows"
    for fitted, own in ((assigned, True), (FedAvg(**params).fit(clients), False)):
        named = [text for text in section(fitted.result_)["uncovered_files"] if sentence in text]
        assert bool(named) == own
        assert all("models.safetensors" in text for text in named)


def test_a_run_without_test_data_or_truth_or_transcript_does_not_name_them(
    small: Federation,
) -> None:
    bare = Federation.from_arrays(
        {name: (shard.x, shard.y) for name, shard in zip(small.names, small.shards, strict=True)},
        test={
            name: (shard.x[:0], shard.y[:0])
            for name, shard in zip(small.names, small.shards, strict=True)
        },
        classes=10,
        seed=0,
    )
    fitted = FedAvg(rounds=1, epochs=1, clip=1.0, noise=1.0).fit(bare, Settings(transcript="none"))
    text = " ".join(section(fitted.result_)["uncovered_files"])
    assert "accuracy" not in text and "true clusters" not in text and "transcript" not in text


def test_what_noise_rests_on_and_what_is_public_is_told(small: Federation) -> None:
    privacy = section(FedAvg(rounds=1, epochs=1, clip=1.0, noise=1.0).fit(small).result_)
    assert any("bounded computing power" in text for text in privacy["not_covered"])
    named = "the 10 classes are public, as the user or the data set names them"
    assert named in privacy["assumed"]
    draw = np.random.default_rng(0)
    windows = {name: (draw.integers(0, 9, (20, 5)), draw.integers(0, 9, (20, 5))) for name in "abc"}
    spoken = Federation.from_arrays(windows, objective=Language(), classes=9, seed=0)
    fitted = FedAvg(
        rounds=1, epochs=1, clip=1.0, noise=1.0, dp_unit="example", model="lstm-chars"
    ).fit(spoken)
    privacy = section(fitted.result_)
    assert any("vocabulary (9 tokens)" in text and "ag_news" in text for text in privacy["assumed"])
    assert any(
        "window of 5 tokens" in text and "share a token" in text for text in privacy["not_covered"]
    )


def test_a_mask_says_that_label_distributions_stay_readable(small: Federation) -> None:
    privacy = section(FedAvg(rounds=1, epochs=1, mask="permutation").fit(small).result_)
    assert any(
        "not how many samples of each label" in text and "0.88 and 0.99" in text
        for text in privacy["not_covered"]
    )

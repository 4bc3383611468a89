"""Data, scenarios and users' files on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import exit_of

from securecluster.cli.main import main
from securecluster.commands.options import as_typed
from securecluster.data import Dirichlet, Federation, Rotation, Tasks
from securecluster.data.simulation import Simulation

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

OWN = ["--client-column", "site", "--label-column", "ill"]
SMALL = ["--clients", "6", "--samples", "40", "--rounds", "2", "--quiet"]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Four sites with opposite labels in two of them."""
    n, draw = 160, np.random.default_rng(0)
    x, site = draw.normal(size=(n, 3)), np.arange(n) % 4
    y = np.where((x[:, 0] > 0) ^ (site % 2 == 1), "yes", "no")
    path = tmp_path / "own.parquet"
    pq.write_table(
        pa.table(
            {"site": site, "a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "ill": y, "kind": site % 2}
        ),
        path,
    )
    return path


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("arguments", "scenario", "clusters"),
    [
        (["--scenario", "label-permutation", "--clusters", "3"], "label-permutation", 3),
        (["--scenario", "rotation"], "rotation", 4),
        (["--scenario", "inversion"], "inversion", 2),
        (["--scenario", "pathological"], "pathological", None),
        (["--scenario", "pathological", "--clusters", "2"], "pathological", 2),
        (["--scenario", "dirichlet", "--alpha", "5"], "dirichlet", 6),
        (
            ["--scenario", "label-swap+client-dirichlet", "--clusters", "2", "--alpha", "5"],
            "label-swap+client-dirichlet",
            2,
        ),
        (["--scenario", "label-split"], "label-split", 2),
        (["--scenario", "tasks"], "tasks", None),
        (["--scenario", "tasks+inversion"], "tasks+inversion", 4),
    ],
)
def test_every_scenario_runs(
    arguments: list[str], scenario: str, clusters: int | None, tmp_path: Path
) -> None:
    assert exit_of("run fedavg", *arguments, *SMALL, "--out", tmp_path / "r") == 0
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert result["scenario"] == scenario and result["data"] == "digits"
    assert clusters is None or len(set(result["truth"])) == clusters


def test_options_make_the_scenario_they_name() -> None:
    def digest(**options: object) -> str:
        return Simulation(clients=6, samples=20, **options).federation().digest()  # type: ignore[arg-type]

    def dealt(kind: object) -> str:
        return Federation.simulate("digits", scenario=kind, clients=6, samples=20, seed=0).digest()  # type: ignore[arg-type]

    assert (
        digest(scenario="dirichlet", alpha=5.0)
        == dealt(Dirichlet(5.0))
        != digest(scenario="dirichlet")
    )
    # a list, as a run folder has it
    assert digest(scenario="tasks", minority=0.3, task_sizes=[2.0, 1.0]) == dealt(
        Tasks(0.3, (2.0, 1.0))
    )
    assert digest(scenario="rotation+dirichlet", clusters=2, alpha=5.0) == dealt(
        Rotation(2) + Dirichlet(5.0)
    )
    assert digest(clusters=2) == digest(scenario="label-swap", clusters=2)


def test_an_own_file_runs_resumes_from_anywhere_and_notices_other_data(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(own.parent)
    assert exit_of("run cfl --data own.parquet --truth-column kind --rounds 3 --quiet", *OWN) == 0
    (folder,) = (own.parent / "runs").iterdir()
    assert folder.name.startswith("cfl-own-")
    result, config = (
        json.loads((folder / name).read_text()) for name in ("result.json", "config.json")
    )
    assert (result["data"], result["scenario"], result["truth"], result["clients"]) == (
        "own",
        "own",
        [0, 1, 0, 1],
        4,
    )
    assert config["simulation"]["data"] == str(own) and config["clients"] == ["0", "1", "2", "3"]
    (own.parent / "elsewhere").mkdir()
    monkeypatch.chdir(own.parent / "elsewhere")
    assert exit_of("resume", folder) == 0 and exit_of("replay", folder) == 0
    table = pq.read_table(own)
    pq.write_table(table.set_column(1, "a", pa.array(np.zeros(160))), own)
    assert exit_of("resume", folder) == 2
    assert "was run on other data" in capsys.readouterr().err
    own.unlink()
    assert exit_of("resume", folder) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--data", "own.parquet"], "say which columns name the client and the label"),
        (["--data", "own.parquet", "--client-column", "site"], "say which columns"),
        (
            ["--data", "own.parquet", "--client-column", "sit", "--label-column", "ill"],
            "did you mean 'site'",
        ),
        (["--data", "own.parquet", *OWN, "--truth-column", "knd"], "did you mean 'kind'"),
        (
            ["--data", "own.parquet", *OWN, "--scenario", "iid"],
            "--scenario deals out a known data set",
        ),
        (["--data", "own.parquet", *OWN, "--clients", "4"], "--clients deals out"),
        (["--data", "other.parquet", *OWN], "other.parquet does not exist"),
        (["--data", "./here", *OWN], "does not exist"),
        (["--data", "mnist", *OWN], "--client-column belongs to a file of your own"),
        (["--data", "mnits"], "did you mean 'mnist'"),
        (
            ["--scenario", "rotation", "--alpha", "1"],
            "has no alpha: leave it out, or use dirichlet",
        ),
        (["--labels-per-client", "2"], "is set in Python, by Pathological(labels=...)"),
        (["--minority", "0.2"], "is set in Python, by Tasks(minority=...)"),
        (["--overlap"], "is set in Python, by IID(overlap=True)"),
        (["--scenario", "tasks", "--clusters", "2"], "takes its clusters from the data set"),
        (["--scenario", "iid+dirichlet"], "choose one of them"),
        (["--scenario", "rotation+rotation"], "name it once"),
        (["--scenario", "natural"], "needs a data set whose samples belong to clients"),
        (
            ["--scenario", "label-split", "--samples", "60"],
            "at most 48 each, not 60; with overlap=True",
        ),
    ],
)
def test_mistakes_get_one_sentence_and_leave_nothing(
    arguments: list[str],
    sentence: str,
    own: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(own.parent)
    assert exit_of("run cfl", *arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert [p.name for p in own.parent.iterdir()] == ["own.parquet"]


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    """Four sites with a row number, an age in years and two measurements."""
    n, draw = 160, np.random.default_rng(0)
    x, site = draw.normal(size=(n, 2)), np.arange(n) % 4
    columns = {
        "site": site,
        "patient_id": np.arange(n) + 10**9,
        "age": draw.integers(20, 90, n),
        "a": x[:, 0],
        "b": x[:, 1],
    }
    path = tmp_path / "patients.parquet"
    pq.write_table(pa.table(columns | {"ill": x[:, 0] > 0}), path)
    return path


def test_features_are_said_and_what_is_probably_not_meant_is_noted(
    patients: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "fedavg", "--data", str(patients), *OWN, "--rounds", "1"]
    assert main([*command, "--out", str(patients.parent / "r")]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("features (4): patient_id, age, a, b; client: site, label: ill, ")
    assert "2 classes, the rarest True (69 rows)" in said.out
    ids, scale = said.err.splitlines()
    assert ids == (
        "securecluster: note: column 'patient_id' looks like an id (a whole number that differs "
        "in nearly every row): leave it out (--drop-columns)"
    )
    assert (
        scale.startswith("securecluster: note: the root mean square of column 'age' is 5")
        and "standardise" in scale
    )
    assert main([*command, "--quiet", "--out", str(patients.parent / "q")]) == 0
    assert capsys.readouterr() == ("", ""), "quiet prints nothing but errors"
    assert exit_of("resume", patients.parent / "r", "--quiet") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "options", [["--drop-columns", "patient_id", "age"], ["--feature-columns", "a", "b"]]
)
def test_columns_are_left_out_and_a_run_goes_on_without_them(
    options: list[str], patients: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = patients.parent / "r"
    assert exit_of("run fedavg --rounds 2", "--data", patients, *OWN, *options, "--out", out) == 0
    said = capsys.readouterr()
    assert said.out.startswith("features (2): a, b; client: site, label: ill, 2 classes")
    assert said.err == ""
    config = json.loads((out / "config.json").read_text())
    assert config["network"]["shape"] == [2] and config["network"]["feature_names"] == ["a", "b"]
    assert exit_of("resume", out, "--quiet") == 0 and exit_of("replay", out) == 0


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--data", "patients.parquet", *OWN, "--drop-columns", "patient"],
            "unknown column of patients.parquet 'patient'",
        ),
        (
            ["--data", "patients.parquet", *OWN, "--drop-columns", "site"],
            "column 'site' names the client",
        ),
        (
            ["--data", "patients.parquet", *OWN, "--drop-columns", "a", "--feature-columns", "b"],
            "--feature-columns and --drop-columns say",
        ),
        (["--drop-columns", "a"], "--drop-columns belongs to a file of your own"),
        (["--feature-columns", "a"], "--feature-columns belongs to a file"),
    ],
)
def test_columns_that_cannot_be_chosen_are_refused(
    arguments: list[str],
    sentence: str,
    patients: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(patients.parent)
    assert exit_of("run fedavg", *arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("sentence", "typed"),
    [
        (
            "pre_rounds = 10 of 8 rounds leave none: lower pre_rounds",
            "--pre-rounds = 10 of 8 rounds leave none: lower --pre-rounds",
        ),
        ("lower pre_rounds.", "lower --pre-rounds."),
        ("oneshot: local_rounds, batch_size", "oneshot: --local-rounds, --batch-size"),
        ("column 'batch_size' of x", "column 'batch_size' of x"),
        (
            "runs/pre_rounds/config.json and pre_rounds.json",
            "runs/pre_rounds/config.json and pre_rounds.json",
        ),
        (
            "pass dp_unit='client', no_such_field, rounds = 3",
            "pass dp_unit='client', no_such_field, --rounds = 3",
        ),
        ("column 'noise' = 3, colour = 4", "column 'noise' = 3, colour = 4"),
        (
            "take aggregation plain, or signature update",
            "take --aggregation plain, or --signature update",
        ),
        (
            "take noise 0, with noise everything leaves",
            "take --noise 0, with noise everything leaves",
        ),
        ("leave mask out; leave the noise out", "leave --mask out; leave the noise out"),
        ("unknown mask 'x': choose a mask", "unknown --mask 'x': choose a mask"),
        (
            "say which (--client-column, --label-column)",
            "say which (--client-column, --label-column)",
        ),
        ("ag_news lacks fine_label", "ag_news lacks fine_label"),
    ],
)
def test_sentences_name_options_as_they_are_typed(sentence: str, typed: str) -> None:
    assert as_typed(sentence) == typed


def test_a_refusal_on_the_command_line_names_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["run", "flhc"], ["compare", "flhc", "fedavg"]):
        assert (
            main([*command, "--pre-rounds", "10", "--rounds", "8", "--out", str(tmp_path / "r")])
            == 2
        )
        said = capsys.readouterr().err
        assert "pre_rounds" not in said and "--pre-rounds" in said


def test_a_csv_file_runs_as_the_parquet_file_does(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv = pytest.importorskip("pyarrow.csv")
    path = tmp_path / "own.csv"
    csv.write_csv(pq.read_table(own), path)
    results = []
    for data in (own, path):
        out = tmp_path / f"of-{data.suffix[1:]}"
        arguments = ["run", "fedavg", "--data", str(data), *OWN, "--truth-column", "kind"]
        assert main([*arguments, "--rounds", "1", "--model", "linear", "--out", str(out)]) == 0
        results.append(json.loads((out / "result.json").read_text()))
    parquet, of_csv = results
    assert of_csv["names"] == parquet["names"] == ["0", "1", "2", "3"]
    assert of_csv["class_names"] == parquet["class_names"] == ["no", "yes"]
    assert of_csv["feature_names"] == ["a", "b", "c"] and of_csv["truth"] == parquet["truth"]
    assert of_csv["metrics"] == parquet["metrics"] and of_csv["data"] == "own"
    assert "classes: 0 'no', 1 'yes'" in capsys.readouterr().out
    assert exit_of(f"report {tmp_path / 'of-csv'} --html") == 0
    page = (tmp_path / "of-csv" / "report.html").read_text()
    assert "no, yes" in page and "a, b, c" in page


@pytest.mark.parametrize(
    ("arguments", "scaling"),
    [
        (["--scaling", "client"], {"kind": "client"}),
        (["--bounds", "-3:3.5"], {"kind": "bounds", "low": [-3.0], "high": [3.5]}),
        (
            ["--scaling", "bounds", "--bounds", "b=-4:4", "a=-5:5", "c=-6:6"],
            {"kind": "bounds", "low": [-5.0, -4.0, -6.0], "high": [5.0, 4.0, 6.0]},
        ),
        (["--scaling", "none"], None),
    ],
)
def test_scales_are_options_which_python_writes_too(
    arguments: list[str], scaling: object, own: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    small = ["--rounds", "1", "--model", "linear", "--drop-columns", "kind", "--quiet"]
    run = ["run", "fedavg", "--data", str(own), *OWN, *small, *arguments, "--out", str(out)]
    assert main(run) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["network"].get("scaling") == scaling
    options = Simulation(**config["simulation"])
    federation = options.noted_federation()
    again = Simulation.of(federation)
    assert again is not None
    assert again.noted_federation().digest() == federation.digest() == config["data_digest"]
    assert again.noted_federation().facts == federation.facts


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--scaling", "auto"], "--scaling auto: give one of none, client, bounds"),
        (["--scaling", "bounds"], "--scaling bounds needs public bounds: give --bounds age=0:120"),
        (["--bounds", "a=0:1"], "bounds lack b, c, kind: give a pair for each feature"),
        (["--scaling", "client", "--bounds", "0:1"], "--bounds are for --scaling bounds"),
        (["--bounds", "0-1"], "bounds of all features are a pair (low, high)"),
        (["--drop-columns", "a", "b", "c", "kind"], "no feature column besides"),
    ],
)
def test_scales_that_cannot_be_are_refused(
    arguments: list[str], sentence: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of(" ".join(["run fedavg --data", str(own), *OWN, *arguments])) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_text_columns_are_named_with_the_option_that_drops_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("site,ill,ward,f\n" + "a,0,er,1\na,1,icu,2\nb,0,er,3\nb,1,er,4\n" * 4)
    assert exit_of(" ".join(["run fedavg --data", str(path), *OWN])) == 2
    said = capsys.readouterr().err
    assert "column 'ward' of" in said
    assert (
        "holds text, not numbers, the first of it 'er' (line 2): drop it (--drop-columns)" in said
    )

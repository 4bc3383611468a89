"""What is handed over: of the unprotected twin only scores, and nothing that no ε covers."""

from __future__ import annotations

import base64
import io
import json
import re
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import SMALL_FEDERATION
from matplotlib.image import imread

from securecluster import Federation
from securecluster.audits import audit_files, audit_page
from securecluster.audits import run_audit as audit
from securecluster.cli.main import main
from securecluster.protocols import FedAvg, Settings
from securecluster.reports.finished_run import open_run

IMAGES = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=]+)")
# one step over one sample, which a gradient shows as it is, at ε = 1
PRIVATE = [
    *("run", "fedavg", "--clients", "4", "--samples", "1", "--clusters", "2", "--rounds", "1"),
    *("--epochs", "1", "--batch-size", "100", "--model", "linear", "--clip", "1"),
    *("--target-epsilon", "1", "--aggregation", "secagg", "--placement", "distributed", "--quiet"),
]
ATTACKS = ["label-counts", "gradient-inversion-analytic", "membership-loss-threshold"]
RECOGNISED = 20  # dB


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a private run, its audit, and bundles without and with what no ε covers."""
    home = tmp_path_factory.mktemp("private")
    folder = home / "run"
    assert main([*PRIVATE, "--out", str(folder)]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "attack_names", lambda: ATTACKS)
        for name, options in (("bundle", []), ("whole", ["--with-uncovered"])):
            bundle = ["--bundle", str(home / f"{name}.zip"), "--quiet", *options]
            assert main(["audit", str(folder), *bundle]) == 0
    return home


def entries(archive: Path) -> dict[str, str]:
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name).decode() for name in opened.namelist()}


def best_psnr(pages: Any) -> float:
    """Return how near any picture in some pages comes to any training sample, in dB."""
    samples = np.concatenate(
        [shard.x.reshape(len(shard.y), -1) for shard in open_federation().shards]
    ).astype(float)
    samples -= samples.min(1, keepdims=True)
    samples /= np.ptp(samples, axis=1)[:, None]
    best = 0.0
    for text in pages:
        for encoded in IMAGES.findall(text):
            picture = imread(io.BytesIO(base64.b64decode(encoded)))[..., 0]
            if picture.size != samples.shape[1]:
                continue
            error = ((samples - picture.reshape(1, -1)) ** 2).mean(1).min()
            best = max(best, 10 * np.log10(1 / max(error, 1e-9)))
    return best


def open_federation(samples: int = 1) -> Federation:
    from securecluster import LabelSwap

    return Federation.simulate("digits", scenario=LabelSwap(2), clients=4, samples=samples, seed=0)


@pytest.mark.parametrize("name", ["bundle", "whole"])
def test_a_bundle_at_epsilon_1_has_no_picture_of_a_sample(private: Path, name: str) -> None:
    page = (private / "run" / "audit-server.html").read_text()
    assert best_psnr([page]) > RECOGNISED  # of the unprotected twin: for the owner alone
    handed_over = entries(private / f"{name}.zip")
    assert best_psnr(handed_over.values()) < RECOGNISED
    for entry, text in handed_over.items():
        for what in ("reconstructed", "original", "True positives over false", "What the attacks"):
            assert what not in text, entry
    assert "What the attacks" in page
    # scores of the twin are there
    content = json.loads(handed_over["audit-server.json"])
    scores = {row["attack"]: row["unprotected"]["score"] for row in content["attacks"]}
    assert scores["gradient-inversion-analytic"]["value"] > 0
    assert "gradient-inversion-analytic" in handed_over["audit-server.html"]


def test_a_bundle_says_what_it_leaves_out_and_with_it_what_it_holds(private: Path) -> None:
    without, whole = (entries(private / f"{name}.zip") for name in ("bundle", "whole"))
    assert without.keys() == whole.keys()
    for name in ("report.html", "audit-server.html"):
        assert "it leaves out what no ε covers" in without[name]
        assert "test samples</td>" not in without[name]
        assert "This copy holds what no ε covers (--with-uncovered)" in whole[name]
        assert "test samples</td>" in whole[name]
    assert "<img" not in without["report.html"]
    result, full = (json.loads(texts["result.json"]) for texts in (without, whole))
    for entry in ("names", "truth", "metrics", "dropped"):
        assert entry not in result and entry in full
    assert result["privacy"]["epsilon"] == full["privacy"]["epsilon"] < 1.01
    config, full = (json.loads(texts["config.json"]) for texts in (without, whole))
    assert config["clients"] == 4 and full["clients"] == ["0", "1", "2", "3"]


def test_files_of_audits_are_for_their_owner(private: Path) -> None:
    for name in ("audit-server.html", "audit-server.json"):
        path = private / "run" / name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_bundle_of_a_hidden_assignment_has_no_label(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = [*SMALL_FEDERATION, "--rounds", "1", "--epochs", "1", "--quiet"]
    options += ["--clients", "12", "--k", "2"]
    assert main(["run", "hidden", *options, "--out", str(folder)]) == 0
    result = json.loads((folder / "result.json").read_text())
    assert len(set(result["labels"])) > 1
    for name, further in (("bundle", []), ("whole", ["--with-uncovered"])):
        bundle = ["--bundle", str(tmp_path / f"{name}.zip")]
        assert main(["report", str(folder), *bundle, *further]) == 0
    without, whole = (entries(tmp_path / f"{name}.zip") for name in ("bundle", "whole"))
    assert json.loads(whole["result.json"])["labels"] == result["labels"]
    handed_over = json.loads(without["result.json"])
    assert not {"labels", "clusters", "names", "truth", "metrics"} & handed_over.keys()
    sequence = re.compile(r"\W+".join(str(label) for label in result["labels"]))
    assert sequence.search(whole["result.json"])
    for name, text in without.items():
        assert not sequence.search(text), name
    assert "clusters found" not in without["report.html"]


def test_a_bundle_of_clusters_that_the_server_made_has_them(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = [*SMALL_FEDERATION, "--rounds", "1", "--epochs", "1", "--quiet"]
    assert main(["run", "fedavg", *options, "--out", str(folder)]) == 0
    assert main(["report", str(folder), "--bundle", str(tmp_path / "a.zip")]) == 0
    result = json.loads(entries(tmp_path / "a.zip")["result.json"])
    assert set(result["labels"]) == {0} and result["clusters"] == 1


@pytest.fixture
def hospitals(tmp_path: Path) -> FedAvg:
    """A run in a folder of clients with names, and an audit as one of them."""
    names = ("charite", "mayo", "karolinska", "necker")
    federation = open_federation(samples=5)
    arrays = {
        name: (shard.x.reshape(len(shard.y), -1), shard.y)
        for name, shard in zip(names, federation.shards, strict=True)
    }
    clients = Federation.from_arrays(arrays, classes=10, seed=0)
    fitted = FedAvg(rounds=1, epochs=1, model="linear", clip=1.0, noise=1.0).fit(
        clients, Settings(transcript="full", threads=1), folder=tmp_path / "run"
    )
    return_to = tmp_path / "run"
    run = open_run(return_to, "audit")
    adversary = audit.adversary_of(run.names, "server", "client:mayo")
    results = audit.audited(run, clients, adversary, attacks=["label-counts"])
    content = {
        **audit.content(results),
        "run": audit_files.identity(run),
        "numbered_name": "audit-server-client-1",
        "summary": audit_page.summary(run, results),
    }
    name = audit_files.stem(adversary, run.names, audit.BUDGET)
    page = audit_page.page(run, results, "")
    audit_files.write(return_to, name, content, page)
    return fitted


@pytest.mark.always
def test_a_bundle_names_no_client(hospitals: FedAvg, tmp_path: Path) -> None:
    names = ("charite", "mayo", "karolinska", "necker")
    run = open_run(tmp_path / "run", "audit")
    kept, refused = audit_files.kept(tmp_path / "run", run)
    assert refused == []
    texts = audit_files.handed_over(kept, run)
    assert set(texts) == {"audit-server-client-1.html", "audit-server-client-1.json"}
    assert main(["report", str(tmp_path / "run"), "--bundle", str(tmp_path / "a.zip")]) == 0
    for entry, text in {**texts, **entries(tmp_path / "a.zip")}.items():
        assert not [name for name in names if name in text], entry
    assert "the server and client #1" in texts["audit-server-client-1.html"]
    whole = audit_files.handed_over(kept, run, with_uncovered=True)
    assert "By name, it is the server and client mayo." in whole["audit-server-client-mayo.html"]


def test_the_option_is_refused_without_a_bundle(
    private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("report", "audit"):
        assert main([command, str(private / "run"), "--with-uncovered"]) == 2
        assert "give --bundle FILE.zip, too" in capsys.readouterr().err


def test_an_error_of_an_attack_stays_with_the_owner() -> None:
    text = "linkage: failed: ValueError: client mayo has 3 samples"
    assert audit.without_errors(text) == "linkage: failed, as the printed table says"
    assert audit.without_errors("linkage: not applicable") == "linkage: not applicable"


@pytest.mark.always
def test_a_link_in_the_place_of_a_picture_leads_nothing_into_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = [*SMALL_FEDERATION, "--rounds", "1", "--epochs", "1", "--quiet"]
    assert main(["run", "fedavg", *options, "--out", str(folder)]) == 0
    (tmp_path / "private").write_text("what lies elsewhere")
    (folder / "cost.png").symlink_to(tmp_path / "private")
    archive = tmp_path / "a.zip"
    bundle = ["--bundle", str(archive), "--with-uncovered"]
    assert main(["report", str(folder), "--html", *bundle]) == 0
    encoded = base64.b64encode(b"what lies elsewhere").decode()
    pages = [(folder / "report.html").read_text(), *entries(archive).values()]
    assert pages and not [page for page in pages if encoded in page]

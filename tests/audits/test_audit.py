"""Reports and audits of finished runs: pages, budgets, users' mistakes, and what is handed over."""

from __future__ import annotations

import copy
import dataclasses
import html
import inspect
import itertools
import json
import math
import re
import shutil
import subprocess
import time
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import SMALL_FEDERATION, two_clusters

import securecluster
from securecluster.attacks import experiments, registry, relevance_oracle
from securecluster.attacks.base import Attack, Guess, Truth
from securecluster.attacks.label_counts import LabelCounts
from securecluster.attacks.scoring import BETTER, CHANCE, Interval, Score
from securecluster.audits import audit_page, audit_summary, findings, twins
from securecluster.audits import run_audit as audit
from securecluster.audits.findings import BROKEN, REFUTED, WITHIN, Finding
from securecluster.cli import compatibility
from securecluster.cli.main import main
from securecluster.folders import run_folder
from securecluster.protocols.common.options.pair_options import PairOptions
from securecluster.protocols.common.options.privacy_options import PrivacyOptions
from securecluster.protocols.common.options.sum_options import SumOptions
from securecluster.reports import bundle, html_page, report_page
from securecluster.reports.finished_run import command_of, epsilon_by_client, open_run
from securecluster.results.saving import read_kept

RUN = ["run", "fedavg", *SMALL_FEDERATION, "--rounds", "2", "--epochs", "1", "--seed", "90417"]
MASKED = ["--mask", "permutation", "--clip", "1", "--noise", "3"]
CHEAP = ["label-counts", "linkage", "mean-image"]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
    with_pictures: Callable[[], AbstractContextManager[None]],
) -> Path:
    """A run with a mask and noise, and its pictures."""
    target = tmp_path_factory.mktemp("audited") / "run"
    with with_pictures():
        assert main([*RUN, *MASKED, "--pictures", "--quiet", "--out", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def audited(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with report, audit and bundle of the run."""
    target = tmp_path_factory.mktemp("pages")
    archive = str(target / "bundle.zip")
    command = ["audit", str(folder), "--out", str(target), "--quiet", "--bundle", archive]
    with pytest.MonkeyPatch.context() as patch:
        # all attacks take a minute
        patch.setattr(audit, "attack_names", lambda: CHEAP)
        assert main(command) == 0
        assert main([*command[:-2], "--as", "wire"]) == 0
    (target / "report.html").write_text(report_page.page(open_run(folder, "report")))
    return target


class Elements(HTMLParser):
    """All elements of a page: name and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.mark.parametrize("name", ["report.html", "audit-server.html"])
def test_a_page_needs_nothing_but_itself(audited: Path, folder: Path, name: str) -> None:
    text = (audited / name).read_text()
    elements = Elements(text).found
    tags = {tag for tag, _ in elements}
    assert not tags & {"script", "iframe", "object", "embed"}
    for tag, attributes in elements:
        for attribute in ("src", "href"):
            value = attributes.get(attribute)
            assert value is None or value.startswith("data:"), (tag, value)
    assert "http://" not in text and "https://" not in text and "url(" not in text
    viewports = [a["content"] for tag, a in elements if a.get("name") == "viewport"]
    assert viewports == ["width=device-width, initial-scale=1"]
    pictures = [a for tag, a in elements if tag == "img" and "over the run" in str(a["alt"])]
    assert len(pictures) == len(open_run(folder, "report").pictures) > 0


def test_the_report_shows_the_run_again(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["resume", str(folder)]) == 0
    tables = capsys.readouterr().out.partition("\n")[2]
    assert main(["report", str(folder), "--html", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert tables in printed and printed.startswith("round   1/2  clusters 1")
    assert (tmp_path / "report.html").is_file()
    assert not (folder / "report.html").exists()


def test_the_report_says_who_saw_what(folder: Path) -> None:
    run = open_run(folder, "report")
    page = report_page.page(run)
    privacy = run.result["privacy"]
    for sentence in [*privacy["server_view"], *privacy["assumed"], *privacy["not_covered"]]:
        assert report_page.html.escape(sentence) in page
    assert "under the permutation, with noise" in page and "the network" in page
    assert f"{privacy['epsilon']:.4g}" in page
    by_client = epsilon_by_client(run.ledger, privacy["delta"])
    assert len(by_client) == 6
    different = {f"{epsilon:.4g}" for epsilon in by_client.values()}
    assert page.count('data-head="ε of each"') == len(different), "a row for clients of one ε"
    assert max(by_client.values()) == privacy["epsilon"]


def test_the_command_of_a_run_repeats_it(folder: Path, tmp_path: Path) -> None:
    run = open_run(folder, "report")
    command = command_of(run)
    assert command is not None and "90417" not in command
    arguments = command.replace("SEED", "90417").split()[1:]
    again = tmp_path / "again"
    threads = ["--threads", str(run.config["settings"]["threads"])]
    assert main([*arguments, *threads, "--quiet", "--out", str(again)]) == 0
    repeated = run_folder.config_of(again)
    assert repeated["network"] == run.config["network"]
    assert repeated["data_digest"] == run.config["data_digest"]


@pytest.mark.always
def test_an_audit_sets_the_run_beside_its_unprotected_twin(audited: Path) -> None:
    content = json.loads((audited / "audit-server.json").read_text())
    assert content["protections"] == {"mask": "permutation", "clip": 1.0, "noise": 3.0}
    assert [row["attack"] for row in content["attacks"]] == CHEAP
    for row in content["attacks"]:
        for column in ("run", "unprotected"):
            assert not row[column]["verdict"].startswith("failed"), row
    (counts,) = [row for row in content["attacks"] if row["attack"] == "label-counts"]
    assert counts["run"]["verdict"] == CHANCE
    assert counts["unprotected"]["verdict"] == BETTER
    low, high = counts["unprotected"]["score"]["interval"].values()
    assert low <= counts["unprotected"]["score"]["value"] <= high


def test_a_run_without_protection_is_its_own_twin(tmp_path: Path) -> None:
    target = tmp_path / "plain"
    sizes = ["--mask", "none", "--transcript", "sizes"]
    assert main([*RUN, *sizes, "--quiet", "--out", str(target)]) == 0
    run = open_run(target, "audit")
    adversary = audit.adversary_of(run.names, "server")
    results = audit.audited(run, audit.federation_of(run), adversary, attacks=["label-counts"])
    assert results.findings[audit.RUN] is results.findings[audit.TWIN]
    assert results.findings[audit.RUN][0].outcome == BETTER
    assert results.notes[0].startswith("The run kept no contents of messages: the run was")
    page = audit_page.page(run, results, "securecluster audit plain")
    assert "secure sums (--aggregation secagg)" in page and "Labels of client 0, as run" in page
    (finding,) = results.findings[audit.RUN]
    assert finding.truth is not None
    named = replace(finding.truth.federation, class_names=tuple("abcdefghij"))
    findings = [replace(finding, truth=replace(finding.truth, federation=named))]
    results = replace(results, findings={audit.RUN: findings, audit.TWIN: findings})
    by_name = audit_page.page(run, results, "securecluster audit plain")
    assert ">j</text>" in by_name and ">j</text>" not in page


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--as", "client:nobody"], "there is no client 'nobody': clients go by name"),
        (["--as", "boss"], "there is no party 'boss': give server, authority, wire or"),
        (["--with", "client:99"], "there is no client '99'"),
        (["--as", "authority"], "this run has no key authority"),
        (["--budget", "0"], "the budget is a positive number of seconds"),
    ],
)
def test_a_mistake_is_one_sentence(
    folder: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


@pytest.mark.parametrize("command", ["report", "audit"])
def test_another_folder_than_a_finished_runs_is_refused(
    folder: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {run_folder.CONFIG: run_folder.comparison_json(["cfl", "flhc"])}
    with run_folder.claimed(tmp_path / "several", False, "", texts):
        pass
    texts = {run_folder.CONFIG: (folder / run_folder.CONFIG).read_text()}
    with run_folder.claimed(tmp_path / "begun", False, "", texts):
        pass
    for name, sentence in (
        ("nothing", "is not a run folder"),
        ("several", "holds a comparison: "),
        ("begun", "has not ended: go on with it first"),
    ):
        assert main([command, str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1


class Slow(LabelCounts):
    """An attack that does not end."""

    name = "slow"

    def run(self, view: Any, knowledge: Any) -> Guess:
        """Wait for longer than any budget."""
        time.sleep(60)
        return super().run(view, knowledge)


class Broken(LabelCounts):
    """An attack with a mistake in it."""

    name = "broken"

    def run(self, view: Any, knowledge: Any) -> Guess:
        """Fail."""
        raise ZeroDivisionError("a mistake")


def test_what_does_not_fit_into_the_budget_is_skipped_and_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Attack] = {"slow": Slow(), "broken": Broken()}
    original = registry.attack_named
    monkeypatch.setattr(audit, "attack_named", lambda name: made.get(name) or original(name))
    run = open_run(folder, "audit")
    adversary = audit.adversary_of(run.names, "server", "client:3")
    attacks = ["broken", "slow", "label-counts"]
    start = time.monotonic()
    results = audit.audited(run, audit.federation_of(run), adversary, 3, attacks)
    assert time.monotonic() - start < 20
    broken, slow, skipped = results.findings[audit.RUN]
    assert broken.reason == "failed: ZeroDivisionError: a mistake"
    assert slow.reason.startswith("skipped: ") and slow.score is None
    assert skipped.score is not None or skipped.reason.startswith("skipped: ")


def test_the_twin_is_without_every_protection() -> None:
    from securecluster.protocols import CFL, SRFCA, OneShot

    plain = twins.twin_of(OneShot(gram_noise=2.0, clip=1.0, noise=1.0, dp_unit="client"))
    assert twins.protections_of(plain) == {}
    assert (
        not plain.sums.hide_replies and plain.mask == "none" and not getattr(plain, "sealed", True)
    )
    pads = OneShot(relevance="pads")
    for protocol in (CFL(aggregation="secagg", sketch=64), SRFCA(sealed=True), pads):
        assert twins.protections_of(protocol)
        assert twins.protections_of(twins.twin_of(protocol)) == {}
    assert twins.protections_of(pads)["relevance"] == "pads"


def test_the_twin_is_without_whatever_protects() -> None:
    for method in compatibility.methods():
        plain = twins.twin_of(compatibility.build(method, compatibility.DEFAULT)).get_params()
        for values in compatibility.cells():
            twin = twins.twin_of(compatibility.build(method, values))
            assert twin.get_params() == plain, (method, values)


def test_every_option_of_privacy_is_one_that_a_twin_is_without() -> None:
    options = {
        name
        for group in (PrivacyOptions, SumOptions, PairOptions)
        for name in {field.name for field in dataclasses.fields(group)}
        if name in inspect.get_annotations(group) and hasattr(group, name)
    }
    assert {"noise", "relevance", "relevance_release", "aggregation"} <= options
    # δ alone protects nothing
    assert options - {"delta"} <= {*experiments.PROTECTION, *experiments.OPEN}


def test_an_audit_as_the_key_authority_sets_it_beside_a_plain_server(
    tmp_path: Path, no_pictures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "encrypted"
    run = ["run", "oneshot", *SMALL_FEDERATION, "--rounds", "1", "--epochs", "1", "--tasks", "2"]
    assert main([*run, "--relevance", "ckks", "--quiet", "--out", str(target)]) == 0
    finished = open_run(target, "audit")
    adversary = audit.adversary_of(finished.names, "authority")
    federation = audit.federation_of(finished)
    results = audit.audited(finished, federation, adversary, attacks=["mean-image"])
    assert results.findings[audit.RUN][0].reason.startswith("not applicable")
    assert results.findings[audit.TWIN][0].outcome == BETTER
    assert "No message has what the key authority decrypted" in results.notes[0]
    assert results.adversary.text == "the key authority"


def test_an_active_server_asks_clients_that_are_made_again(
    tmp_path: Path, no_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # energies of candidates are enough, and take few calls
    monkeypatch.setattr(relevance_oracle, "MOST_DIMENSIONS", 0)
    target = tmp_path / "open"
    run = ["run", "oneshot", *SMALL_FEDERATION, "--rounds", "1", "--epochs", "1", "--tasks", "2"]
    opened = ["--mask", "none", "--no-sealed"]
    assert main([*run, *opened, "--quiet", "--out", str(target)]) == 0
    finished = open_run(target, "audit")
    federation = audit.federation_of(finished)
    found = {}
    for party in ("server", "client:1"):
        adversary = audit.adversary_of(finished.names, party)
        results = audit.audited(finished, federation, adversary, attacks=["relevance-oracle"])
        found[party] = results.findings[audit.RUN][0]
    asked = found["server"].score
    assert asked is not None and asked.units == 6
    assert found["client:1"].reason.startswith("not applicable: the adversary only observed")
    # what the registry has is left as it is
    assert getattr(registry.attack_named("relevance-oracle"), "endpoint", 0) is None


def test_the_printed_table_breaks_no_attacks_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    interval = Interval(0.5, 1.0)
    scored = Score("membership TPR at 0.1 % FPR", 0.75, interval, 0.5, interval, True, 9)
    names = registry.attack_names()
    findings = [audit.Finding(name, scored, "", 0.0) for name in names]
    findings[0] = audit.Finding(names[0], None, "not applicable: nothing was seen", 0.0)
    columns = {audit.RUN: findings, audit.TWIN: findings}
    adversary = audit.Adversary(("server",), (), "the server")
    audit.show(audit.Audit(adversary, columns, {}, [], 1.0, 2.0))
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= 80
    # nothing is cut off at the right
    assert all(line.endswith("│") for line in printed.splitlines() if line.startswith("│"))
    assert f"{names[0]}: not applicable: nothing was seen" in printed
    for name in names[1:]:
        assert name in printed


def results_of(*findings: Finding) -> audit.Audit:
    """Return an audit by the server whose run is its own twin."""
    adversary = audit.Adversary(("server",), (), "the server")
    columns = {audit.RUN: list(findings), audit.TWIN: list(findings)}
    return audit.Audit(adversary, columns, {}, [], 1.0, 2.0)


def scored(name: str, low: float, value: float, *claims: str) -> Finding:
    """Return a finding whose chance reaches from 0.4 to 0.6."""
    chance = Interval(0.4, 0.6)
    result = Score("AUC", value, Interval(low, 1.0), 0.5, chance, True, 9)
    return Finding(name, result, "", 0.0, claims=claims)


def judged(finding: Finding, twins: dict[str, float]) -> Finding:
    """Return a finding with scores of its attack on twins, by what they are without."""
    found = {name: scored(finding.attack, value - 0.1, value) for name, value in twins.items()}
    return replace(finding, twins=found)


@pytest.mark.parametrize(
    ("value", "claims", "on_twins", "verdict", "held"),
    [
        (0.9, ("a mask",), {}, "broken", ()),
        (0.9, (), {}, "visible", ()),
        (0.5, ("a mask",), {"a mask": 0.9}, "at chance", ("a mask",)),
        # noise alone is enough, and so is the mask: neither is shown to hold
        (0.5, ("a mask",), {"any protection": 0.9, "a mask": 0.5, "noise": 0.5}, "at chance", ()),
        # the mask is not what hides it
        (0.5, ("a mask",), {"any protection": 0.9, "a mask": 0.5, "noise": 0.9}, "at chance",
         ("noise",)),
        # nothing shows that the attack could have succeeded
        (0.5, ("a mask",), {"a mask": 0.5}, "could not tell", ()),
        (0.5, ("a mask",), {"a mask": 0.65}, "could not tell", ()),
        (0.5, ("a mask",), {}, "could not tell", ()),
        (0.5, (), {}, "could not tell", ()),
    ],
)  # fmt: skip
def test_a_verdict_follows_from_twins(
    value: float,
    claims: tuple[str, ...],
    on_twins: dict[str, float],
    verdict: str,
    held: tuple[str, ...],
) -> None:
    finding = judged(scored("label-counts", value - 0.1, value, *claims), on_twins)
    assert (finding.verdict, finding.held) == (verdict, held)
    assert finding.judgement.startswith(f"{verdict}: ") and len(finding.why) > 20


def test_a_bound_tells_of_noise_only_what_it_could_have_refuted() -> None:
    bound = Score("ε", 0.0, None, 0.0, Interval(0.0, 0.0), True, 20)
    for without_noise, verdict in ((1.82, "could not tell"), (3.0, "at chance")):
        twin = Finding(
            "dp-audit-one-run", replace(bound, value=without_noise), "", 0.0, claimed=9.0
        )
        finding = Finding("dp-audit-one-run", bound, "", 0.0, claimed=2.34, twins={"noise": twin})
        assert finding.verdict == verdict
        assert f"{without_noise:.3g}" in finding.why
    results = results_of(replace(finding, twins={"noise": replace(twin, score=bound)}))
    assert results.untold == ["noise"] and results.broken == []


NOTHING = Finding("mean-image", None, "not applicable: no eigenvectors", 0.0)


def test_the_page_says_at_once_what_is_broken_and_what_is_visible() -> None:
    nothing_either = dataclasses.replace(NOTHING, attack="subspace-composition")
    results = results_of(
        scored("linkage", 0.7, 0.9),
        scored("label-counts", 0.5, 0.7),
        scored("differencing", 0.7, 0.9, "secure sums"),
        scored("low-bits", 0.4, 0.5, "clients' noise"),
        NOTHING,
        nothing_either,
    )
    text = html.unescape(audit_page.results(results))
    assert "4 of 6 attacks could be tried on the run." in text
    assert "Visible, as the report says: linkage." in text
    assert "Could not tell: label-counts, low-bits." in text
    assert audit.sentence(results).startswith("Broken, although the run claims it: secure sums by")
    # the broken protection, and none that held: nothing shows that an attack could have succeeded
    assert text.count('class="bad">') == 1 and text.count('class="good">') == 0
    assert text.index("broken: the run claims") < text.index("visible: no protection")
    assert "mean-image, subspace-composition: not applicable: no eigenvectors" in text


def test_the_first_paragraph_says_what_could_be_learned_in_the_order_of_harm() -> None:
    results = results_of(
        scored("linkage", 0.7, 0.9),
        scored("source-inference", 0.7, 0.9),
        scored("membership-loss-threshold", 0.5, 0.7),
        scored("mask-public-model", 0.7, 0.9, "a mask"),
        scored("mask-invariants", 0.4, 0.5),
        NOTHING,
    )
    twin = [scored(finding.attack, 0.7, 0.9) for finding in results.findings[audit.RUN]]
    results = replace(results, findings={**results.findings, audit.TWIN: twin})
    failed = Finding("label-counts", None, "failed: ValueError: of charite", 0.0)
    columns = {column: [*found, failed] for column, found in results.findings.items()}
    whole = replace(results, findings=columns)
    assert audit_summary.headline(whole, 7) == (
        "The server could learn a client's update behind the mask: the run claims to hide this by "
        "a mask, which broke."
    )
    who, learned, untold, guarantee = audit_summary.lines(whole, "No ε bounds it.")
    assert who.startswith("It is taken to follow the protocol, to keep and study all that it")
    assert learned == (
        "It could also learn which client a record belongs to; which messages of different rounds "
        "are of the same client, which nothing hides. Without the protections of the run, attacks "
        "also learn whether a record is in a client's data; which labels a client holds; the "
        "direction of the mean of a client's samples."
    )
    assert untold == (
        "Could not tell of whether a record is in a client's data; which labels a client holds: "
        "the table says what would. 5 of 7 attacks could be tried, and 1 found nothing to work on "
        "in this run; 1 failed or took too long, so nothing is known of these."
    )
    assert guarantee == "No ε bounds it."
    page = audit_page.results(results)
    names = ("mask-public-model", "source-inference", "linkage", "membership-loss", "mask-inv")
    table = page[page.index("<table") :]
    places = [table.index(name) for name in names]
    assert places == sorted(places)


def test_what_is_assumed_and_bounded_depends_on_who_attacks(folder: Path) -> None:
    run = open_run(folder, "audit")
    said = {
        "wire": "It is taken to see who sends, when, and how long each message is",
        "server": "and some public samples.",
        "client:3": "the data and keys of 1 of the clients, which undo masks",
    }
    for party, text in said.items():
        adversary = audit.adversary_of(run.names, party)
        assert text in audit_summary.assumption(adversary)
        assert "Differential privacy bounds every attack" in audit_page.guarantee(run, adversary)
    central = copy.deepcopy(run.config)
    central["network"]["placement"] = "central"
    trusted = replace(run, config=central)
    server, wire = (audit.adversary_of(run.names, party) for party in ("server", "wire"))
    assert "no ε bounds what it could learn" in audit_page.guarantee(trusted, server)
    assert "Differential privacy bounds" in audit_page.guarantee(trusted, wire)


def test_a_page_begins_with_what_it_is_of(audited: Path, folder: Path) -> None:
    page = (audited / "audit-server.html").read_text()
    begin = page.index("<h2>In short</h2>")
    assert "<h2>" not in page[:begin]
    first = page[begin : page.index("<h2>", begin + 1)]
    digest = bundle.digest(open_run(folder, "audit"))
    assert digest in first and f"with securecluster {securecluster.__version__}" in first
    table = json.loads((audited / "audit-server.json").read_text())
    assert table["made"][:10] in first and ">run, by securecluster" in first
    headline, _, _ = table["summary"].partition(". ")
    assert f'<p class="headline">{headline}' in html.unescape(first)
    assert 1 <= first.count("<li>") <= 5
    assert datetime.fromisoformat(table["made"]).utcoffset() == timedelta(0)
    assert table["version"] == securecluster.__version__


def test_no_page_is_a_clean_bill_where_nothing_was_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = results_of(NOTHING)
    text = audit_page.results(results)
    first = audit_summary.summary(results, 6, "")
    assert first.startswith("Nothing was tried: none of 1 attacks has what it needs")
    audit.show(results)
    for said in (text, " ".join(capsys.readouterr().out.split())):
        assert "0 of 1 attacks could be tried on the run." in said
        assert "mean-image: not applicable: no eigenvectors" in said
    assert "<table" not in text
    # visible things alone are no protection that held
    visible = audit.headline(results_of(scored("linkage", 0.7, 0.9), NOTHING))
    assert "no protection was put to the test" in visible[0]
    counts = judged(scored("label-counts", 0.4, 0.5, "a mask"), {"a mask": 0.9})
    held = audit.headline(results_of(counts, NOTHING))
    assert held[0].endswith("was broken, and these held: a mask against label-counts.")
    # rules that hold for rows of one's own say nothing of the rows of this run
    rules = scored("secure-sum-conformance", 0.4, 0.5, "secure sums")
    said = audit.headline(results_of(judged(rules, {"secure sums": 0.9}), NOTHING))
    assert said[-1].endswith("nothing that this run released was tested.")
    assert "No attack could be tried" in audit_page.advice(results)


def test_a_score_is_printed_with_the_range_that_decides(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    chance = Interval(0.418, 0.518)
    result = Score("correlation", 0.467, Interval(0.37, 0.559), 0.465, chance, True, 9)
    without = dataclasses.replace(result, value=1.0, interval=None)
    results = results_of(
        Finding("label-distributions", result, "", 0.0), Finding("linkage", without, "", 0.0)
    )
    audit.show(results)
    for text in (audit_page.results(results), capsys.readouterr().out):
        assert "0.467 (0.37 to 0.559); chance 0.465 (0.418 to 0.518)" in text
        assert "1; chance 0.465 (0.418 to 0.518)" in text
        assert "the range that decides" in text
    content = audit.content(results)
    assert content["reading"] == audit.READING
    assert content["attacks"][0]["run"]["score"]["chance_interval"] == {"low": 0.418, "high": 0.518}


def test_a_bound_that_is_as_good_as_infinite_reads_so() -> None:
    everywhere = Interval(0.0, 0.0)
    result = Score("ε", 504264.1, None, 0.0, everywhere, True, 8)
    finding = Finding("dp-audit-two-worlds", result, "", 0.0, claimed=math.inf)
    assert audit.score_text(finding) == (
        "over 100,000; chance 0 (0 to 0); the ledger's ε is infinite"
    )
    refuted = Finding("dp-audit-two-worlds", result, "", 0.0, claimed=2.0)
    assert (refuted.verdict, refuted.outcome) == (BROKEN, REFUTED)


def test_a_bundle_holds_no_key_seed_or_clients_file(audited: Path, folder: Path) -> None:
    secrets = _secrets(folder)
    with zipfile.ZipFile(audited / "bundle.zip") as archive:
        names = archive.namelist()
        data = {name: archive.read(name) for name in names}
    assert names == [
        "audit-server.html", "audit-server.json", "config.json", "report.html", "result.json",
    ]  # fmt: skip
    config = (folder / "config.json").read_bytes()
    assert any(secret in config for secret in secrets)
    for name, content in data.items():
        for secret in secrets:
            assert secret not in content, (name, secret)
        assert b'"seed"' not in content and b"data_digest" not in content
    # true label counts are clients' data
    assert "Labels of client 0, unprotected" in (audited / "audit-server.html").read_text()
    assert b"Labels of client" not in data["audit-server.html"]


def _secrets(folder: Path) -> list[bytes]:
    """Return the run's seed, data digest and clients' secrets, as bytes and as hex digits."""
    config = json.loads((folder / "config.json").read_text())
    secrets = [b"90417", config["data_digest"].encode()]
    found = [value for value in _values(read_kept(folder).clients.secrets) if len(value) >= 16]
    assert found
    for value in found:
        secrets += [value, value.hex().encode()]
    return secrets


def _values(value: Any) -> list[bytes]:
    """Return all bytes within a value."""
    if isinstance(value, bytes):
        return [value]
    if hasattr(value, "__dict__"):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return list(itertools.chain.from_iterable(map(_values, value)))


@pytest.mark.parametrize("name", ["bundle.txt", "bundle", ".", "none/bundle.zip", "folder.zip"])
def test_a_bundle_has_a_zip_files_name(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.zip").mkdir()
    monkeypatch.setattr(audit, "audited", None)  # it is refused before minutes of work
    for command in ("report", "audit"):
        assert main([command, str(folder), "--bundle", str(tmp_path / name)]) == 2


def test_pages_do_not_make_a_run_folder_somebody_elses(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for name in ("report.html", "audit-server-client-3-20s.json", "audit-wire.html"):
        (copy / name).write_text("page")
    assert run_folder.foreign(copy) == []
    (copy / "audit-of-mine.txt").write_text("notes")
    assert run_folder.foreign(copy) == [copy / "audit-of-mine.txt"]


def test_names_are_escaped_in_pages(folder: Path) -> None:
    text = report_page.html.table(("client",), [("<script>alert(1)</script>",)])
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_membership_of_candidates_has_a_roc_curve() -> None:
    federation = two_clusters(4, 20)
    shard = federation.shards[1]
    candidates = np.concatenate([shard.x[:3], shard.x_test[:2]])
    details = {"candidates": candidates}
    guess = Guess("membership", {1: np.array([0.9, 0.8, 0.7, 0.2, 0.1])}, details)
    finding = audit.Finding("any", None, "", 0.0, guess, Truth(federation))
    given = audit_page._given(finding)
    assert given is not None
    assert [part.tolist() for part in given] == [[0.9, 0.8, 0.7], [0.2, 0.1]]


def test_every_registered_attack_is_one_of_an_audits() -> None:
    assert audit.attack_names is registry.attack_names
    assert set(CHEAP) <= set(registry.attack_names())


def test_public_samples_are_no_training_samples_unless_membership_is_asked() -> None:
    federation = two_clusters(4, 20)
    public, labels = audit.known_samples(federation, False) or ((), ())
    asked, _ = audit.known_samples(federation, True) or ((), ())
    rows = {row.tobytes() for shard in federation.shards for row in shard.x}
    assert len(public) == len(labels) > 0
    assert not rows & {row.tobytes() for row in public}
    assert sum(row.tobytes() in rows for row in asked) == len(asked) / 2 == len(public)


def test_a_roc_curve_rises_from_corner_to_corner() -> None:
    points = audit_page.roc(np.array([0.9, 0.8, 0.4]), np.array([0.5, 0.1]))
    assert points[0] == (0.0, 0.0) and points[-1] == (1.0, 1.0)
    assert points == sorted(points) and (0.0, pytest.approx(2 / 3)) in points
    assert audit_page.png(np.eye(4)).startswith(b"\x89PNG")


class Copied(LabelCounts):
    """An attack that reconstructs one image exactly, and tells members from non-members."""

    name = "copied"

    def run(self, view: Any, knowledge: Any) -> Guess:
        """Return the label counts with pictures."""
        guess = super().run(view, knowledge)
        details = {"images": {2: np.full((1, 1, 8, 8), 0.5)}, "roc": ([0.9, 0.8], [0.1])}
        return Guess(guess.quantity, guess.values, details)


def test_reconstructions_stand_beside_originals_for_the_owner_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "attack_named", lambda name: Copied())
    monkeypatch.setattr(audit_page, "attack_named", lambda name: Copied())
    monkeypatch.setattr(findings, "attack_named", lambda name: Copied())
    run = open_run(folder, "audit")
    federation = audit.federation_of(run)
    adversary = audit.adversary_of(run.names, "server")
    results = audit.audited(run, federation, adversary, attacks=["copied"])
    own = audit_page.page(run, results, "")
    assert own.count(": reconstructed</span>") == own.count(": original</span>") == 2
    for with_uncovered in (False, True):
        handed_over = html_page.handed_over(own, with_uncovered)
        for picture in (": reconstructed</span>", ": original</span>", "true positive rate"):
            assert picture in own and picture not in handed_over
    samples = federation.shards[2].x
    assert np.array_equal(audit_page.nearest(samples[3] + 0.01, samples), samples[3])
    assert "Members found: as run (area 1.00), unprotected (area 1.00);" in own


@pytest.mark.exhaustive
@pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install -y chromium")
@pytest.mark.parametrize("name", ["report.html", "audit-server.html", "audit-overview.html"])
def test_a_real_browser_shows_the_page_without_errors_or_overflow(
    audited: Path, tmp_path: Path, name: str
) -> None:
    page = (audited / name).read_text()
    # a page of 380 px around it measures it, and writes down what it found
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>\n', page)
    assert policy is not None
    probe = """
<script>
window.onload = function () {
  const broken = [...document.images].filter(i => !i.complete || !i.naturalWidth).length;
  const wide = [...document.querySelectorAll('body *')].filter(
    e => e.getBoundingClientRect().right > window.innerWidth + 1).length;
  document.title = JSON.stringify({images: document.images.length, broken, wide,
    width: window.innerWidth, overflow: document.documentElement.scrollWidth});
};
</script></body>"""
    inner = page.replace(policy.group(), "").replace("</body>", probe)
    (tmp_path / "inner.html").write_text(inner)
    frame = """<iframe src="inner.html" width="380" height="800" style="border:0"
      onload="setTimeout(() => { document.title = this.contentDocument.title; }, 50)"></iframe>"""
    (tmp_path / "outer.html").write_text(f"<!DOCTYPE html><body>{frame}</body>")
    measured = _browsed(tmp_path / "outer.html", "--allow-file-access-from-files")
    found = json.loads(re.search(r"<title>(.*?)</title>", measured.stdout, re.S).group(1))  # type: ignore[union-attr]
    assert found["images"] == page.count("<img ")
    assert found["broken"] == 0
    assert found["width"] == 380 and found["overflow"] <= 380 and found["wide"] == 0
    (tmp_path / "page.html").write_text(page)
    console = _browsed(tmp_path / "page.html").stderr
    assert "CONSOLE" not in console, console


@pytest.mark.exhaustive
@pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install -y chromium")
def test_a_real_browser_prints_what_is_folded_and_shows_a_dark_page(
    audited: Path, tmp_path: Path
) -> None:
    page = (audited / "audit-server.html").read_text()
    probe = """
<script>
window.onload = function () {
  const folded = [...document.querySelectorAll('details')].map(
    e => e.getBoundingClientRect().height - e.firstElementChild.getBoundingClientRect().height);
  document.title = JSON.stringify({folded, page: getComputedStyle(document.body).backgroundColor});
};
</script></body>"""
    found = {}
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>\n', page)
    assert policy is not None
    inner = page.replace(policy.group(), "").replace("</body>", probe)
    dark = "--blink-settings=preferredColorScheme=0"
    for medium, text in (("screen", inner), ("print", inner.replace("@media print", "@media all"))):
        (tmp_path / "inner.html").write_text(text)
        title = re.search(r"<title>(.*?)</title>", _browsed(tmp_path / "inner.html", dark).stdout)
        assert title is not None
        found[medium] = json.loads(title.group(1))
    assert found["screen"]["page"] == "rgb(13, 17, 23)"
    assert found["print"]["page"] == "rgb(255, 255, 255)"
    assert len(found["screen"]["folded"]) == len(found["print"]["folded"]) == 3
    # a margin apart
    assert max(found["screen"]["folded"]) < 25 < min(found["print"]["folded"])
    (tmp_path / "page.html").write_text(page)
    _browsed(tmp_path / "page.html", f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF-")


def _browsed(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Return what a headless browser makes of a page, with its console on standard error."""
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        "--virtual-time-budget=3000",
        f"--user-data-dir={path.parent / 'profile'}",
        *options,
        "--dump-dom",
        path.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.always
def test_an_audit_bounds_epsilon_beside_the_ledgers(folder: Path) -> None:
    run = open_run(folder, "audit")
    attacks = ["dp-audit-one-run", "dp-audit-two-worlds", "dp-audit-losses"]
    federation = audit.federation_of(run)
    server = audit.adversary_of(run.names, "server")
    results = audit.audited(run, federation, server, attacks=attacks)
    one_run, two_worlds, losses = results.findings[audit.RUN]
    claimed = run.ledger.price(1e-5).epsilon
    for finding in (one_run, two_worlds):
        assert finding.claimed == pytest.approx(claimed, rel=1e-6)
        assert finding.outcome == WITHIN
    assert losses.reason == "not applicable: no losses leave clients in this run"
    # its twin has canaries and no noise
    bare = results.findings[audit.TWIN][1]
    assert bare.score is not None and bare.score.value > 1000
    assert bare.claimed is not None and np.isinf(bare.claimed)
    first = audit.content(results)["attacks"][0]
    assert first["run"]["ledger_epsilon"] == one_run.claimed
    assert first["unprotected"]["ledger_epsilon"] is None
    page = audit_page.page(run, results, "securecluster audit audited")
    assert f"the ledger&#x27;s ε is {claimed:.3g}" in page and "the ledger&#x27;s ε is inf" in page
    wire = audit.audited(run, federation, audit.adversary_of(run.names, "wire"), 9, attacks[1:])
    for finding in wire.findings[audit.RUN]:
        assert finding.reason.startswith("not applicable: ")


def test_a_bound_above_the_ledgers_epsilon_is_a_bad_finding() -> None:
    score = Score("ε", 2.0, Interval(1.5, 2.5), 0.0, Interval(0.0, 0.0), True, 9)
    for claimed, verdict in ((1.9, REFUTED), (2.0, WITHIN), (math.inf, BETTER)):
        finding = Finding("dp-audit-losses", score, "", 0.0, claimed=claimed)
        assert finding.outcome == verdict
    bare = Finding("dp-audit-losses", replace(score, value=2.1), "", 0.0, claimed=math.inf)
    kinds = {1.9: "bad", 2.0: "good", math.inf: "seen"}
    for claimed, kind in kinds.items():
        finding = Finding("dp-audit-losses", score, "", 0.0, claimed=claimed, twins={"noise": bare})
        assert audit_page._kind(finding) == kind


def test_a_run_without_noise_has_no_epsilon_to_be_refuted(
    tmp_path: Path, no_pictures: None
) -> None:
    target = tmp_path / "plain"
    assert main([*RUN, "--mask", "none", "--quiet", "--out", str(target)]) == 0
    run = open_run(target, "audit")
    server = audit.adversary_of(run.names, "server")
    results = audit.audited(run, audit.federation_of(run), server, attacks=["dp-audit-losses"])
    assert results.findings[audit.RUN][0].reason == "not applicable: the run has no noise"


def test_what_lowers_the_scores_of_two_sums_is_noise_and_not_secure_sums() -> None:
    for attack in ("hidden-differencing", "hidden-cluster", "hidden-label-counts"):
        better = Score("x", 1.0, Interval(1.0, 1.0), 0.5, Interval(0.4, 0.6), True, 9)
        finding = Finding(attack, better, "", 0.0)
        columns = {audit.RUN: [finding], audit.TWIN: [finding]}
        nobody = audit.Adversary(("server",), (), "the server")
        page = audit_page.advice(audit.Audit(nobody, columns, {}, [], 0.0, 1.0))
        assert "--target-epsilon" in page and "--aggregation" not in page

"""What may leave in a bundle is listed, at any depth, and what is not listed stays."""

from __future__ import annotations

import copy
import dataclasses
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from cases import SMALL_FEDERATION

from securecluster import IFCA, Federation
from securecluster.attacks import scoring
from securecluster.audits import audit_table
from securecluster.audits import run_audit as audit
from securecluster.cli.main import main
from securecluster.core import manifest
from securecluster.data.simulation import Simulation
from securecluster.folders import run_folder
from securecluster.folders import schemas as contents
from securecluster.protocols import CFL, ClusteringProtocol, FedAvg, Hidden, Signature
from securecluster.protocols.registry import protocol_class, protocol_names
from securecluster.reports import allow_list, bundle
from securecluster.reports.allow_list import AUDIT, CONFIG, OPTIONS, RESULT, STAYS, Each, Whose
from securecluster.reports.finished_run import open_run
from securecluster.runtime.settings import Settings

WORD = "what-nobody-listed"
SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear"}
# reports of many kinds: trees, hidden clusters, noise, secure sums, a target, own fields
METHODS: dict[str, ClusteringProtocol] = {
    "fallback": CFL(fallback=0.2, **SMALL),
    "hidden": Hidden(k=2, clip=1.0, noise=1.0, **SMALL),
    "secagg": IFCA(k=2, starts=2, start_rounds=1, aggregation="secagg", **SMALL),
    "target": FedAvg(rounds=2, epochs=1, target_epsilon=20.0),
    "example": FedAvg(dp_unit="example", clip=1.0, noise=1.0, mask="rotation", **SMALL),
    "own fields": Signature(k=2, **SMALL),
}
ALL = frozenset(Whose)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation.simulate("digits", clients=6, samples=24, seed=0)


@pytest.fixture(scope="module", params=METHODS)
def folder(
    request: pytest.FixtureRequest, federation: Federation, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("listed") / "run"
    METHODS[request.param].fit(federation, Settings(threads=1), folder=path)
    return path


def objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every object."""
    if isinstance(value, dict):
        yield path
        for name in value:
            yield from objects(value[name], (*path, name))
    elif isinstance(value, list):
        for position, item in enumerate(value[:2]):
            yield from objects(item, (*path, position))


def rule_at(rule: Any, path: tuple[Any, ...]) -> Any:
    """Return the rule at a path; None where none is listed."""
    for name in path:
        if isinstance(rule, tuple):
            rule = next((option for option in rule if isinstance(option, dict)), None)
        if isinstance(rule, Each):
            rule = rule.rule
        else:
            rule = rule.get(name) if isinstance(rule, dict) else None
    return rule


def missing(value: Any, rule: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry that no list names."""
    for path in objects(value):
        content = value
        for name in path:
            content = content[name]
        for name in content:
            if rule_at(rule, (*path, name)) is None:
                yield (*path, name)


def test_every_entry_that_runs_write_is_listed_as_leaving_or_staying(folder: Path) -> None:
    for name, rule in (("config.json", CONFIG), ("result.json", RESULT)):
        content = json.loads((folder / name).read_text())
        assert list(missing(content, rule)) == []
        # and nothing that is listed is lost on the way
        assert allow_list.leaving(content, rule, ALL) == content


def test_every_declared_entry_and_option_is_listed() -> None:
    for name in protocol_names():
        options = {field.name for field in dataclasses.fields(protocol_class(name))}
        assert options <= OPTIONS.keys()
    parts: list[tuple[Any, Any]] = [
        (Simulation, rule_at(CONFIG, ("simulation",))[1]),
        (Settings, rule_at(CONFIG, ("settings",))),
        (contents.RunConfig, CONFIG),
        (contents.Result, RESULT),
        (contents.Privacy, rule_at(RESULT, ("privacy",))),
        (contents.Field, rule_at(RESULT, ("privacy", "fields", 0))),
        (contents.PricedRelease, rule_at(RESULT, ("privacy", "releases", 0))),
        (contents.Occupied, rule_at(RESULT, ("privacy", "occupancy", 0))),
        (contents.OverRounds, rule_at(RESULT, ("privacy", "over_rounds"))),
        (contents.SmallestSums, rule_at(RESULT, ("privacy", "smallest_sums"))),
        (contents.UnsharedModels, rule_at(RESULT, ("privacy", "unshared_models"))),
        (contents.Metrics, rule_at(RESULT, ("metrics",))),
        (contents.PowerEntry, rule_at(RESULT, ("power",))),
        (contents.PowerOfRelease, rule_at(RESULT, ("power", "releases", 0))),
        (contents.PowerChange, rule_at(RESULT, ("power", "remedies", 0))),
        (audit_table.AuditTable, AUDIT),
        (audit_table.Row, rule_at(AUDIT, ("attacks", 0))),
        (audit_table.Outcome, rule_at(AUDIT, ("attacks", 0, "run"))),
        (audit_table.ScoreEntry, rule_at(AUDIT, ("attacks", 0, "run", "score"))[1]),
    ]
    for kind, rule in parts:
        assert set(get_type_hints(kind)) <= set(rule), kind
    score = {field.name for field in dataclasses.fields(scoring.Score)}
    assert score == set(get_type_hints(audit_table.ScoreEntry))


@pytest.mark.parametrize("value", [WORD, [WORD], {WORD: WORD}, {"up": {WORD: 1}}, [[{"k": WORD}]]])
def test_an_entry_that_nobody_listed_stays_at_any_depth(folder: Path, value: Any) -> None:
    for name, rule in (("config.json", CONFIG), ("result.json", RESULT)):
        content = json.loads((folder / name).read_text())
        paths = list(objects(content))
        assert len(paths) > 4
        for path in paths:
            grown = copy.deepcopy(content)
            inner = grown
            for part in path:
                inner = inner[part]
            inner["unlisted"] = value
            if isinstance(rule_at(rule, path), Each):
                continue  # names of messages and layers are the run's to choose
            for whose in ({Whose.PUBLIC}, set(Whose) - {Whose.OWNER}):
                text = json.dumps(allow_list.leaving(grown, rule, whose))
                assert "unlisted" not in text and WORD not in text, path


@pytest.mark.always
def test_a_bundle_has_no_entry_that_nobody_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    small = [*SMALL_FEDERATION, "--rounds", "1", "--epochs", "1", "--quiet"]
    assert main(["run", "fedavg", *small, "--out", str(folder)]) == 0
    config = json.loads((folder / "config.json").read_text())
    config |= {"owner": WORD}
    config["network"] |= {
        "contact": WORD,
        "objective": {**config["network"]["objective"], "of": WORD},
    }
    data = json.dumps(config).encode()
    (folder / "config.json").write_bytes(data)
    marker = manifest.encode({"config.json": manifest.Mark.of(data)})
    (folder / ".securecluster").write_bytes(marker)
    result = json.loads((folder / "result.json").read_text())
    result |= {"hospital": WORD}
    result["privacy"] |= {"note": WORD}
    result["privacy"]["fields"][0] |= {"note": WORD}
    result["bytes"] |= {"of": {WORD: 1}}
    run_folder.seal(folder, json.dumps(result).encode())

    @dataclasses.dataclass(frozen=True)
    class Wider(scoring.Score):
        per_client: str = WORD

    scored = audit._entry

    def wider(finding: audit.Finding, on_run: bool) -> dict[str, Any]:
        if finding.score is not None:
            score = Wider(**{f.name: getattr(finding.score, f.name)
                             for f in dataclasses.fields(scoring.Score)})  # fmt: skip
            finding = dataclasses.replace(finding, score=score)
        return {**scored(finding, on_run), "shown": WORD}

    monkeypatch.setattr(audit, "_entry", wider)
    monkeypatch.setattr(audit, "attack_names", lambda: ["label-counts"])
    for further in ([], ["--with-uncovered"]):
        archive = tmp_path / "b.zip"
        assert main(["audit", str(folder), "--quiet", "--bundle", str(archive), *further]) == 0
        assert WORD in (folder / "audit-server.json").read_text()
        with zipfile.ZipFile(archive) as opened:
            texts = {name: opened.read(name).decode() for name in opened.namelist()}
        assert len(texts) == 5
        assert not [name for name, text in texts.items() if WORD in text]


def test_what_a_rule_says_is_what_leaves() -> None:
    rule: Mapping[str, Any] = {
        "a": Whose.PUBLIC,
        "b": Whose.UNCOVERED,
        "c": {"d": Whose.LABELS, "e": Whose.OWNER},
        "f": Each({"g": Whose.PUBLIC}),
        "h": Each(Whose.PUBLIC, named=True),
    }
    value = {
        "a": [1, [2.5, None]],
        "b": "x",
        "c": {"d": 1, "e": 2, "z": 3},
        "f": [{"g": 1, "z": 2}, {}],
        "h": {"any": 1, "other": {"z": 1}},
    }
    public = {"a": [1, [2.5, None]], "f": [{"g": 1}, {}], "h": {"any": 1}}
    assert allow_list.leaving(value, rule, {Whose.PUBLIC}) == public
    labels = allow_list.leaving(value, rule, {Whose.PUBLIC, Whose.LABELS})
    assert labels == public | {"c": {"d": 1}}
    # a value of another kind than its rule's
    for wrong in ({"a": {"z": 1}}, {"a": [{"z": 1}]}, {"f": {"z": 1}}, {"f": [3]}, {"c": [1]}):
        assert allow_list.leaving(wrong, rule, ALL) == {}
    assert allow_list.leaving([1], rule, ALL) is STAYS
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert allow_list.leaving({"a": deep}, rule, ALL) == {}
    assert allow_list.leaving(float("nan"), Whose.PUBLIC, ALL) is STAYS
    assert allow_list.leaving("/home/me/a.csv", allow_list.FileName(), ALL) == "a.csv"


def test_numbers_of_samples_seeds_and_digests_stay(federation: Federation, tmp_path: Path) -> None:
    method = METHODS["example"]
    method.fit(federation, Settings(threads=1), folder=tmp_path / "run")
    run = open_run(tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert {"sizes", "seed"} <= config["network"].keys() and config["data_digest"]
    for with_uncovered in (False, True):
        texts = bundle.contents(run, with_uncovered)
        content = json.loads(texts["config.json"])
        assert ("sizes" in content["network"]) == with_uncovered
        assert config["data_digest"] not in "".join(texts.values())
        for part in (content, content["network"], json.loads(texts["result.json"])):
            assert "seed" not in part

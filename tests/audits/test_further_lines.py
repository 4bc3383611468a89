"""What each further line about a recorded app unlocks, beside what audits then score."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_app
import pytest
import torch

from securecluster import Federation
from securecluster.audits import further_lines
from securecluster.audits.recording_audit import audit_recording
from securecluster.audits.run_audit import RUN
from securecluster.cli.main import main
from securecluster.recordings.recorded_messages import HIDDEN, Exchange, Reply, Sent, Vector
from securecluster.recordings.recording_folder import Recording
from securecluster.recordings.training_facts import TrainingFacts

FEWEST = 10  # attacks that are scored where all is given


@pytest.fixture(scope="module")
def federation() -> Federation:
    return own_app.data()


def told(sentences: list[str]) -> dict[str, set[str]]:
    """Return by line the attacks that it unlocks; of no text those that need none."""
    unlocked = {}
    for sentence in sentences:
        found = re.fullmatch(r"(?:Scored with what is given|With (.*), at most).*", sentence)
        if found:
            count, names = re.findall(r"(\d+) attacks?(?: \(([a-z, -]+)\))?", sentence)[-1]
            listed = set(names.split(", ")) - {""}
            assert len(listed) == int(count)
            unlocked[found[1] or ""] = listed
    return unlocked


def test_what_a_line_unlocks_is_what_the_audit_then_scores(
    tmp_path: Path, federation: Federation
) -> None:
    nodes = {900 - 7 * i: i for i in range(own_app.CLIENTS)}
    unknown = replace(federation, truth=None)
    model = own_app.Net()
    steps: list[tuple[str, TrainingFacts, Mapping[str, Any]]] = [
        ("", TrainingFacts(), {}),
        ("--data", TrainingFacts(), {"federation": unknown, "partitions": nodes}),
        ("--model", TrainingFacts(), {"federation": unknown, "partitions": nodes, "model": model}),
        ("lr=", own_app.FACTS, {"federation": unknown, "partitions": nodes, "model": model}),
        ("truth=", own_app.FACTS, {"federation": federation, "partitions": nodes, "model": model}),
    ]
    own_app.record(tmp_path / "a", federation, TrainingFacts())
    own_app.record(tmp_path / "b", federation, own_app.FACTS)
    unlocked = told(further_lines.of_recording(Recording.read(tmp_path / "a")))
    expected: set[str] = set()
    scored: set[str] = set()
    for line, facts, given in steps:
        expected |= next(names for text, names in unlocked.items() if line in text)
        folder = tmp_path / ("b" if facts.known else "a")
        # those that were scored before are not run again
        left = sorted(set().union(*unlocked.values()) - scored)
        audit = audit_recording(folder, **given, attacks=left)
        scored |= {finding.attack for finding in audit.findings[RUN] if finding.score}
        assert scored == expected, line
        if line == "lr=":  # what an app of others has: nobody knows true clusters
            assert len(scored) >= FEWEST
        assert set(told(audit.notes)[""]) == scored & set(left)


def test_attacks_of_others_are_listed_by_what_they_ask_for(
    tmp_path: Path, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    from securecluster.attacks.loss_threshold import LossThreshold

    class Own(LossThreshold):
        name = "own"

        def applies(self, view: Any, knowledge: Any) -> str | None:
            return None if knowledge.config["momentum"] < 0.5 else "not applicable: it is too large"

    recording = own_app.record(tmp_path / "a", federation, told=True)
    monkeypatch.setattr(further_lines, "attack_names", lambda: ["own"])
    monkeypatch.setattr(further_lines, "attack_named", lambda name: Own())
    unlocked = told(further_lines.of_recording(recording))
    assert unlocked == {
        "": set(),
        "--data module:function and TrainingFacts(momentum=...)": {"own"},
    }
    unfit = own_app.record(tmp_path / "b", federation, TrainingFacts(momentum=0.9))
    assert told(further_lines.of_recording(unfit)) == {"": set()}


def test_nothing_is_promised_where_no_update_was_recorded(tmp_path: Path) -> None:
    recording = Recording.begin(tmp_path, "wards", TrainingFacts())
    hidden = Vector(reason=HIDDEN)
    sent = {1: Sent("train", "1", 4, hidden)}
    recording.record(Exchange("train", "1", sent, {1: Reply(hidden, 4)}))
    assert further_lines.of_recording(recording) == ["Scored with what is given: 0 attacks."]


def test_nodes_are_known_by_recordings_of_clients_beside_the_servers(
    tmp_path: Path, federation: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    server = own_app.record(tmp_path / "server", federation)
    assert main(["report", str(tmp_path / "server")]) == 0
    assert "mods=[recorded_client(" in capsys.readouterr().out
    for i, node in enumerate(server.nodes[::-1]):
        folder = tmp_path / "server" / str(node)
        folder.mkdir()
        client = Recording.begin(folder, "wards", TrainingFacts())
        client.number([node], {node: i})
        client.write_head(None)
    assert main(["report", str(tmp_path / "server")]) == 0
    assert "recorded_client" not in capsys.readouterr().out
    audit = audit_recording(tmp_path / "server", federation, attacks=["repeated-mask"])
    assert audit.findings[RUN][0].score is not None


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        ([(6, 3, 5, 5), (6,), (10, 6), (10,)], "label-counts"),
        ([(3, 3, 1, 8), (8,), (8, 10), (10,)], "label-counts"),
        ([(10, 64), (10,)], "label-counts"),
        ([(64,), ()], "membership-all-rounds"),
        ([()], "membership-all-rounds"),
    ],
    ids=["convolutions", "channels last", "linear", "one output", "a number"],
)
def test_networks_of_any_shape_have_stand_ins(
    tmp_path: Path, shapes: list[tuple[int, ...]], named: str
) -> None:
    recording = Recording.begin(tmp_path, "wards", TrainingFacts())
    layout = tuple((f"w{number}", shape) for number, shape in enumerate(shapes))
    start = torch.zeros(sum(torch.Size(shape).numel() for shape in shapes))
    for round in ("1", "2"):
        sent = {node: Sent("train", round, 4, Vector(start, layout)) for node in range(4)}
        replies = {node: Reply(Vector(start + node, layout), 4) for node in range(4)}
        recording.record(Exchange("train", round, sent, replies))
    unlocked = told(further_lines.of_recording(recording))
    assert unlocked[""] == {"linkage"}
    assert named in set().union(*unlocked.values())

"""Agreement on a run: each party derives the configuration from facts, and compares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster import Federation
from securecluster.data.facts import ClientFacts, Facts, Form, agree
from securecluster.errors import FrameError, PolicyError, UsageError
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal, accepted
from securecluster.parties.derived import needs_samples
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.protocols import CFL, FedAvg, OneShot, Signature
from securecluster.runtime.endpoint import config_hash
from tests.protocols import cases

CLIENTS = 4
NOISY: dict[str, Any] = {"clip": 1.0, "noise": 1.0}
EXAMPLE: dict[str, Any] = {**NOISY, "dp_unit": "example"}
MANY = [
    *[cases.variant(name) for name in cases.VARIANTS],
    FedAvg(aggregation="secagg"),
    FedAvg(rounds=2, **EXAMPLE),
    FedAvg(rounds=2, clip=1.0, target_epsilon=8.0, dp_unit="example", epochs=1),
    FedAvg(rounds=2, clip=1.0, target_epsilon=8.0, epochs=1),
    Signature(rounds=2, clip=1.0, target_epsilon=8.0, dp_unit="example", epochs=1),
    CFL(mask="rotation", **NOISY),
]


def facts_by_clients(federation: Federation, samples: bool) -> Facts:
    """Return what the clients' own facts make, each told by a client that sees its own shard."""
    told = []
    for i in range(len(federation)):
        own = federation.select([i]).facts_of(0, samples)
        told.append(ClientFacts.read(json.loads(json.dumps(own.as_json()))))
    return agree(told, federation.seed, federation.classes)


@pytest.mark.parametrize("made", MANY, ids=lambda made: made.name)
def test_the_configuration_follows_from_what_each_client_tells(
    made: Any, federation: Federation
) -> None:
    whole = made.config(federation, "float32")
    samples = needs_samples(made)
    assert made.config(facts_by_clients(federation, samples), "float32") == whole
    if samples:
        with pytest.raises(UsageError, match="number of samples"):
            made.config(facts_by_clients(federation, False), "float32")


def test_numbers_of_samples_are_told_only_where_a_price_or_a_bound_follows_from_them() -> None:
    assert not needs_samples(FedAvg())
    assert not needs_samples(FedAvg(**NOISY))
    assert not needs_samples(FedAvg(aggregation="secagg", **NOISY))
    assert needs_samples(FedAvg(aggregation="secagg"))
    assert needs_samples(FedAvg(**EXAMPLE))
    assert needs_samples(FedAvg(clip=1.0, target_epsilon=1.0, dp_unit="example"))


def test_clients_with_data_of_another_kind_are_told_apart(federation: Federation) -> None:
    told = [federation.facts_of(i) for i in range(4)]
    assert agree(told, 0, 10).samples is None
    told[2] = replace(told[2], x=Form((3,), "float32"))
    with pytest.raises(UsageError, match=r"client 2 has data of another kind than client 0 \(x\)"):
        agree(told, 0, 10)
    with pytest.raises(UsageError, match="no client told"):
        agree([], 0)
    with pytest.raises(UsageError, match="neither given nor told"):
        agree([federation.facts_of(0)], 0)
    with pytest.raises(UsageError, match="fewer than the 10"):
        agree([federation.facts_of(i, classes=True) for i in range(4)], 0, 3)
    counted = agree([federation.facts_of(i, classes=True) for i in range(4)], 0)
    assert counted.classes == federation.classes


@pytest.mark.parametrize(
    "told", [None, [], "x", {}, {"x": 1}, {"x": {"shape": [-1], "dtype": "f"}}]
)
def test_what_is_no_facts_is_one_sentence(told: Any) -> None:
    with pytest.raises(UsageError, match="told no facts"):
        ClientFacts.read(told)


@pytest.mark.parametrize("size", [-1, 1 << 40, 1.0, True, "8", None])
def test_sizes_that_no_data_have_are_no_facts(size: Any, federation: Federation) -> None:
    told = federation.facts_of(0).as_json()
    assert ClientFacts.read(told) == federation.facts_of(0)
    with pytest.raises(UsageError, match="told no facts"):
        ClientFacts.read({**told, "x": {**told["x"], "shape": [size]}})


# --- what a node accepts ---


def offered(
    made: Any, federation: Federation, roster: Roster | None = None, **changes: Any
) -> Proposal:
    proposal = Proposal.of(made, federation.facts, "float32", roster)
    proposal = Proposal.unpacked(proposal.packed())
    return replace(proposal, config={**proposal.config, **changes})


def accept(
    proposal: Proposal,
    made: Any,
    federation: Federation,
    policy: Policy | None = None,
    roster: Roster | None = None,
    number: int = 1,
) -> dict[str, Any]:
    own = federation.select([number]).facts_of(0, samples=True, classes=True)
    return accepted(proposal, made, own, number, policy or Policy(roster=False), roster)


@pytest.mark.parametrize("made", [FedAvg(), FedAvg(**EXAMPLE), FedAvg(aggregation="secagg")])
def test_a_node_derives_the_proposed_configuration_itself(
    made: Any, federation: Federation
) -> None:
    proposal = offered(made, federation)
    found = accept(proposal, made, federation)
    number = proposal.config["run"]
    assert found == {**made.config(federation, "float32"), "run": number}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"noise": 0.1}, r"proposes noise = 0.1, and this client's protocol has 1.0"),
        ({"noise": 0.1, "clip": 9.0}, r"clip = 9.0, .* \(and noise differ, too\)"),
        ({"mask": "none"}, "mask = 'none', and this client's protocol has 'rotation'"),
        ({"lr": 7.0}, "lr = 7.0"),
        ({"rounds": 99}, "rounds = 99"),
        ({"new": 1}, "new = 1, and this client's protocol has None"),
        ({"protocol": "cfl"}, "proposes cfl, and this client runs fedavg"),
        ({"clients": 1}, "a run of 1 clients without this one"),
        ({"classes": 3}, "3 classes, and this client's data need more"),
    ],
)
def test_a_server_that_changes_its_proposal_is_refused(
    changes: dict[str, Any], sentence: str, federation: Federation
) -> None:
    made = FedAvg(mask="rotation", **NOISY)
    with pytest.raises(PolicyError, match=sentence):
        accept(offered(made, federation, **changes), made, federation)


def test_the_roster_is_part_of_the_agreement(federation: Federation) -> None:
    made = FedAvg()
    identities = [Identity.generate() for _ in range(4)]
    roster = Roster({i: identity.public for i, identity in enumerate(identities)})
    other = Roster({**{i: one.public for i, one in enumerate(identities)}, 3: bytes(32)})
    config = accept(offered(made, federation, roster), made, federation, roster=roster)
    assert config["roster"] == roster.digest != other.digest
    for theirs, own in ((other, roster), (None, roster), (roster, None)):
        with pytest.raises(PolicyError, match="roster"):
            accept(offered(made, federation, theirs), made, federation, roster=own)
    with pytest.raises(PolicyError, match="only in runs with a roster"):
        accept(offered(made, federation), made, federation, Policy())
    with pytest.raises(UsageError, match="no digest"):
        _ = Roster(lambda client: None).digest


def test_other_numbers_of_samples_than_told_are_refused(federation: Federation) -> None:
    made = FedAvg(**EXAMPLE)
    proposal = offered(made, federation)
    assert proposal.samples == (20, 20, 20, 20)
    for samples in (None, (20, 19, 20, 20), (20, 20)):
        with pytest.raises(PolicyError, match="other numbers of samples"):
            accept(replace(proposal, samples=samples), made, federation)
    with pytest.raises(PolicyError, match="does not tell its number of samples"):
        accept(proposal, made, federation, Policy(samples=False, roster=False))


@pytest.mark.parametrize(
    ("policy", "made", "sentence"),
    [
        ({"protocols": ["cfl"]}, FedAvg(), "allows protocol cfl, and not fedavg"),
        ({"protocols": []}, FedAvg(), "allows protocol none at all"),
        ({"masks": ["haar"]}, FedAvg(), "allows mask haar, and not none"),
        ({"aggregations": ["secagg"]}, FedAvg(), "allows aggregation secagg, and not plain"),
        ({"relevances": ["pads"]}, OneShot(), "allows relevance pads, and not plain"),
        ({"placements": ["local"]}, FedAvg(**NOISY, placement="central"), "placement local"),
        ({"least_noise": 2}, FedAvg(**NOISY), "of at least 2, and the run has 1"),
        ({"least_clients": 5}, FedAvg(), "runs of at least 5 clients, and this one has"),
        ({"unit": "example"}, FedAvg(**NOISY), "unit of privacy is example, and the run's client"),
    ],
)
def test_the_owner_s_policy_holds_even_where_the_protocol_object_would_not(
    policy: dict[str, Any], made: Any, sentence: str, federation: Federation
) -> None:
    with pytest.raises(PolicyError, match=sentence):
        accept(offered(made, federation), made, federation, Policy(roster=False, **policy))


JUNK = [b"", b"\xff", b"[]", b"{}", b'{"config": {}, "samples": null}', b"[" * 100_000]


@pytest.mark.parametrize("data", JUNK, ids=range(len(JUNK)))
def test_a_proposal_may_be_anything(data: bytes) -> None:
    with pytest.raises(FrameError, match="proposed no run"):
        Proposal.unpacked(data)


def test_a_proposal_of_another_type_is_none(federation: Federation) -> None:
    proposal = Proposal.of(FedAvg(), federation.facts, "float32", None)
    for changes in ({"clients": 1 << 30}, {"dtype": "int8"}, {"seed": "x"}, {"classes": True}):
        data = replace(proposal, config={**proposal.config, **changes}).packed()
        with pytest.raises(FrameError, match="proposed no run"):
            Proposal.unpacked(data)


# --- policies in files ---


def test_a_policy_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('masks = ["rotation"]\nleast_noise = 1\nmost_epsilon = 8.0\nunit = "client"\n')
    expected = Policy(masks=["rotation"], least_noise=1, most_epsilon=8.0, unit="client")
    assert Policy.load(path) == expected
    path.write_text("")
    assert Policy.load(path) == Policy()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("noise = 1", "a policy has no noise"),
        ("masks = 1", "masks is a list of names"),
        ("roster = 1", "roster is true or false"),
        ('least_noise = "1"', "least_noise is a number"),
        ("least_noise = nan", "least_noise is a number"),
        ("least_noise = -1", "give a number of at least 0"),
        ("least_clients = -1", "give a number of at least 0"),
        ("most_epsilon = 1", "give unit too"),
        ('unit = "person"', "runs protect a client or an example"),
        ("=", "no policy in TOML"),
        ("\udcff", "no policy in TOML"),
        ("a = " + "[" * 5_000 + "]" * 5_000, "no policy in TOML"),
        ("[" * 5_000, "no policy in TOML"),
        ("a = " + "{b = " * 5_000 + "1" + "}" * 5_000, "no policy in TOML"),
        (".".join("a" * 5_000) + " = 1", "policy"),
    ],
)
def test_a_policy_that_is_none_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=sentence) as told:
        Policy.load(path)
    assert "policy.toml" in str(told.value) and "\n" not in str(told.value)


def test_there_is_no_policy_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no policy"):
        Policy.load(tmp_path / "policy.toml")


def test_facts_of_a_federation_need_no_sample(federation: Federation) -> None:
    empty = replace(federation.shards[0], x=np.zeros((0, 1, 8, 8), np.float32))
    assert Form.of(empty.x) == federation.facts.x == Form((1, 8, 8), "float32")


# --- names of classes, and scales ---

WARDS = np.array(["er", "icu", "ward"])


def own_data(classes: Any = None, scaling: Any = "none") -> Federation:
    draw = np.random.default_rng(0)
    arrays = {}
    for k, name in enumerate(("ann", "bob")):
        y = WARDS[np.arange(20) % (3 - k)]  # bob has two of the three classes
        arrays[name] = (draw.normal(size=(20, 4)), y)
    return Federation.from_arrays(arrays, classes=classes, scaling=scaling, seed=0)


def told_by(federation: Federation, client: int) -> ClientFacts:
    facts = federation.facts_of(client, classes=True).as_json()
    return ClientFacts.read(json.loads(json.dumps(facts)))


def test_clients_agree_on_classes_by_name_and_on_scales() -> None:
    bounds = [(-9.0, 9.0), (-8.0, 8.0), (-7.0, 7.0), (-6.0, 6.0)]
    federation = own_data(WARDS.tolist(), dict(enumerate(bounds)))
    facts = agree([told_by(federation, 0), told_by(federation, 1)], 0)
    made = FedAvg(model="linear")
    config = made.config(facts, "float32")
    assert config == made.config(federation, "float32")
    assert config["class_names"] == WARDS.tolist()
    assert config["scaling"]["low"] == [-9.0, -8.0, -7.0, -6.0]
    proposal = offered(made, federation)
    assert accept(proposal, made, federation) == {**config, "run": proposal.config["run"]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"classes": ["er", "ward", "icu"]}, r"\(class_names\): .*same classes in the same order"),
        ({"scaling": "client"}, r"\(scaling\)"),
        ({"scaling": (-9.0, 8.0)}, r"\(scaling\)"),
    ],
)
def test_clients_that_number_or_scale_otherwise_are_refused(
    changes: dict[str, Any], sentence: str
) -> None:
    usual = {"classes": WARDS.tolist(), "scaling": (-9.0, 9.0)}
    one, other = own_data(**usual), own_data(**{**usual, **changes})
    with pytest.raises(UsageError, match=f"client 1 has data of another kind .*{sentence}"):
        agree([told_by(one, 0), told_by(other, 1)], 0)
    made = FedAvg(model="linear")
    with pytest.raises(PolicyError, match=r"the server proposes (class_names|scaling)"):
        accept(offered(made, one), made, other)


def test_a_server_is_told_no_labels_that_only_a_clients_data_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"names of all classes, .*\(classes=\["):
        Node(FedAvg(), own_data().select(["bob"]), tmp_path, number=1)
    Node(FedAvg(), own_data(WARDS.tolist()).select(["bob"]), tmp_path, number=1)


@pytest.mark.parametrize("names", [5, [None], [["er"]], [{}]])
def test_what_names_no_classes_is_no_facts(names: Any, federation: Federation) -> None:
    told = federation.facts_of(0).as_json()
    for wrong in ({"class_names": names}, {"scaling": {"kind": "auto"}}, {"scaling": 3}):
        with pytest.raises(UsageError, match="told no facts"):
            ClientFacts.read({**told, **wrong})


# --- the number of a run ---


@pytest.mark.parametrize("number", ["", "AB" * 16, 7, ["a" * 32]])
def test_a_number_of_another_form_is_no_proposal(number: Any, federation: Federation) -> None:
    with pytest.raises(FrameError, match="proposed no run"):
        Proposal.unpacked(offered(FedAvg(), federation, run=number).packed())


def test_a_run_without_a_number_goes_on_where_it_was_agreed_to_and_no_other_begins(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions had none, a node may be in the middle of one."""
    policy = Policy(roster=False)
    node = Node(FedAvg(), federation.select([1]), tmp_path / "n", number=1, policy=policy)
    proposal = offered(FedAvg(), federation)
    config = {name: value for name, value in proposal.config.items() if name != "run"}
    old = replace(proposal, config=config).packed()
    with pytest.raises(PolicyError, match="without a number of its own, as earlier versions"):
        node.agree(old)
    assert node.runs() == []
    run = config_hash(config)
    folder = tmp_path / "n" / f"run-{run}"
    folder.mkdir()
    (folder / "agreed.json").write_text(json.dumps(config, sort_keys=True))
    assert node.agree(old) == run
    assert node.agree(proposal.packed()) != run

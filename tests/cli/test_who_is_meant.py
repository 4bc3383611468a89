"""A client is the same one wherever a user gives it: in Python and on the command line."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import FULL

from securecluster import FedAvg, Federation, Local, at, open_transcript
from securecluster.attacks.experiments import (
    with_malicious_updates,
    with_poisoned_data,
    without_client,
)
from securecluster.attacks.malicious_clients import run_with
from securecluster.attacks.views import knowledge_of, view_of
from securecluster.audits import run_audit as audit
from securecluster.cli.main import main
from securecluster.data.federation import Shard
from securecluster.errors import UpdateError, UsageError
from securecluster.messaging.parties import Party, client
from securecluster.reports.finished_run import epsilon_by_client, open_run

pytestmark = pytest.mark.filterwarnings("ignore::securecluster.errors.SecureClusterWarning")

SMALL: dict[str, Any] = {"model": "linear", "rounds": 1, "epochs": 1}
CLIENTS = 5
# what clients are called in each federation, in their order
FEDERATIONS: dict[str, tuple[Any, ...]] = {
    "hospitals": (1, 2, 3, 4, 5),
    "hospitals as text": ("1", "2", "3", "4", "5"),
    "hospitals of numpy": tuple(np.arange(1, 6)),
    "hospitals as floats": (1.0, 2.0, 3.0, 4.0, 5.0),
    "from the end": ("4", "3", "2", "1", "0"),
    "as simulated": ("0", "1", "2", "3", "4"),
    "padded": ("001", "002", "003", "004", "005"),
    "sites": ("north", "south", "east", "west", "mid"),
    "one number": ("north", "south", "2", "west", "mid"),
}
REFUSED = None
# what is given in which federation, and the position of the client that it means
TABLE = [
    *[
        (federation, given, 2)
        for federation in FEDERATIONS
        if federation.startswith("hospitals")
        for given in (3, "3", np.int64(3), 3.0, at(2))
    ],
    ("hospitals", 0, REFUSED),
    ("hospitals", "0", REFUSED),
    ("hospitals", 6, REFUSED),
    ("hospitals", True, REFUSED),
    ("hospitals", at(5), REFUSED),
    ("from the end", 3, 1),
    ("from the end", "0", 4),
    ("from the end", at(3), 3),
    ("as simulated", 3, 3),
    ("as simulated", "3", 3),
    ("as simulated", at(3), 3),
    ("as simulated", 5, REFUSED),
    ("padded", "003", 2),
    ("padded", 3, REFUSED),
    ("padded", "3", REFUSED),
    ("padded", at(3), 3),
    ("sites", "east", 2),
    ("sites", 2, 2),
    ("sites", "2", 2),
    ("sites", at(2), 2),
    ("sites", 5, REFUSED),
    ("sites", -1, REFUSED),
    ("one number", 2, 2),
    ("one number", "2", 2),
    ("one number", 1, REFUSED),
    ("one number", "1", REFUSED),
    ("one number", at(1), 1),
]


@functools.cache
def federation_of(kind: str) -> Federation:
    draw = np.random.default_rng(0)
    samples = [(draw.random((12, 3)), draw.integers(0, 2, 12)) for _ in range(CLIENTS)]
    return Federation.from_arrays(
        dict(zip(FEDERATIONS[kind], samples, strict=True)), classes=2, seed=0
    )


@functools.cache
def fitted_of(kind: str) -> Local:
    """Each client trains alone, so no two have the same model."""
    return Local(**SMALL).fit(federation_of(kind), FULL)


@functools.cache
def averaged_of(kind: str) -> FedAvg:
    masked = FedAvg(**SMALL, clip=1.0, noise=1.0, mask="permutation")
    return masked.fit(federation_of(kind), FULL)


def by_model(kind: str, given: Any) -> int:
    fitted = fitted_of(kind)
    found = torch.cat([value.flatten() for value in fitted.model_of(given).values()])
    rows = [fitted.client_models_.row(k) for k in range(CLIENTS)]
    (position,) = [k for k, row in enumerate(rows) if torch.equal(row.sort()[0], found.sort()[0])]
    return position


def by_secrets(kind: str, given: Any) -> int:
    (position,) = averaged_of(kind).secrets_of(given).seed
    return position


def position_of(parties: set[Party]) -> int:
    (party,) = parties
    assert party.kind == "client" and party.index is not None
    return party.index


def by_frames(kind: str, given: Any) -> int:
    """Whose frames its observer sees."""
    frames = averaged_of(kind).transcript_.seen_by(given)
    ends = {end for frame in frames for end in (frame.sender, frame.receiver)}
    return position_of({end for end in ends if end.kind == "client"})


def by_view(kind: str, given: Any) -> int:
    frames = view_of(averaged_of(kind), [given]).messages()
    return position_of({frame.receiver for frame in frames if frame.receiver.kind == "client"})


def by_party(kind: str, given: Any) -> int:
    """Users also write `client("north")`."""
    if isinstance(given, str):
        given = client(given)  # type: ignore[arg-type]
    return position_of(set(averaged_of(kind).transcript_.resolved(given)))


def position_of_shard(kind: str, shard: Shard) -> int:
    shards = federation_of(kind).shards
    (position,) = [k for k in range(CLIENTS) if shards[k] is shard]
    return position


def by_selection(kind: str, given: Any) -> int:
    (shard,) = federation_of(kind).select([given]).shards
    return position_of_shard(kind, shard)


def by_ledger(kind: str, given: Any) -> int:
    """Whose releases are priced: ε of a person."""
    (position,) = averaged_of(kind).ledger_.of(given).names
    return position


def by_collusion(kind: str, given: Any) -> int:
    (found,) = knowledge_of(averaged_of(kind), federation_of(kind), [given]).colluders.values()
    assert position_of_shard(kind, found.shard) == found.number
    return found.number


def by_poison(kind: str, given: Any) -> int:
    marked: list[int] = []

    def change(position: int, shard: Shard) -> Shard:
        marked.append(position)
        assert position_of_shard(kind, shard) == position
        return shard

    with_poisoned_data(federation_of(kind), [given], change)
    (position,) = marked
    return position


def by_malice(kind: str, given: Any) -> int:
    marked = set()

    def change(position: int, update: torch.Tensor, round: int) -> torch.Tensor:
        marked.add(position)
        return update

    with_malicious_updates(FedAvg(**SMALL), federation_of(kind), [given], change)
    (position,) = marked
    return position


def by_leaving(kind: str, given: Any) -> int:
    stayed = without_client(FedAvg(**SMALL), federation_of(kind), given).kept_.learned.names
    names = federation_of(kind).names
    (left,) = set(names) - set(stayed)
    return names.index(left)


def typed(given: Any) -> str:
    """What a user types who means the same on the command line."""
    if isinstance(given, type(at(0))):
        return f"#{given.position}"
    return str(given)


def by_adversary(kind: str, given: Any) -> int:
    """`audit --as client:NAME`."""
    names = federation_of(kind).names
    adversary = audit.adversary_of(names, f"client:{typed(given)}")
    (position,) = adversary.clients
    assert adversary.parties == (client(position),)
    assert adversary.text == f"client {names[position]}"
    return position


def by_helper(kind: str, given: Any) -> int:
    """`audit --with client:NAME`."""
    names = federation_of(kind).names
    (position,) = audit.adversary_of(names, "server", f"wire, client:{typed(given)}").clients
    return position


ENTRIES: list[Callable[[str, Any], int]] = [
    by_model, by_secrets, by_frames, by_view, by_party, by_selection, by_ledger, by_collusion,
    by_poison, by_malice, by_leaving, by_adversary, by_helper,
]  # fmt: skip
# floats are for Python: 3.0 is a text of its own on the command line
IN_PYTHON_ONLY = (float, bool)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_whoever_is_given_is_the_same_client_everywhere(entry: Callable[[str, Any], int]) -> None:
    for kind, given, position in TABLE:
        if entry in (by_adversary, by_helper) and isinstance(given, IN_PYTHON_ONLY):
            continue
        if position is not REFUSED:
            assert entry(kind, given) == position, (kind, given)
            continue
        with pytest.raises(UsageError, match=r"no (client|party) ") as caught:
            entry(kind, given)
        assert "\n" not in str(caught.value), (kind, given)


def test_the_behaviour_of_malicious_clients_is_theirs_by_name() -> None:
    run = functools.partial(run_with, FedAvg(**SMALL), federation_of("hospitals"), "label-flip")
    named, numbered, other = (run([who]).models_[0] for who in (3, at(2), at(3)))
    assert named is not None and numbered is not None and other is not None
    for key, value in named.items():
        assert torch.equal(value, numbered[key])
    assert any(not torch.equal(value, other[key]) for key, value in named.items())


def test_a_party_of_a_frame_is_the_one_of_its_position() -> None:
    transcript = averaged_of("hospitals").transcript_
    frame = next(frame for frame in transcript.seen_by(3) if frame.sender.kind == "client")
    assert frame.sender == client(2)
    assert len(list(transcript.seen_by(frame.sender))) == len(list(transcript.seen_by("3")))


def test_newcomers_are_found_by_their_names_too() -> None:
    hospitals = federation_of("hospitals")
    fitted = FedAvg(**SMALL).fit(hospitals.select([1, 2, 3]), FULL)
    fitted.join(hospitals.select([5, 4]))
    joined = fitted.joined_.transcript
    assert joined.resolved([5]) == {client(3)} and joined.resolved(4) == {client(4)}
    assert joined.resolved(at(1)) == joined.resolved(2) == {client(1)}
    assert fitted.model_of(4).keys() == fitted.model_of(2).keys()
    with pytest.raises(UsageError, match=r"no client 9"):
        fitted.model_of(9)


def test_an_error_of_a_run_names_the_client() -> None:
    hospitals = federation_of("hospitals")
    huge = replace(hospitals.shards[2], x=hospitals.shards[2].x * np.float32(1e38))
    shards = (*hospitals.shards[:2], huge, *hospitals.shards[3:])
    with pytest.raises(UpdateError, match=r"client\(s\) 2 .* \(client 2 is '3'\)$"):
        FedAvg(**{**SMALL, "epochs": 9}).fit(replace(hospitals, shards=shards))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a parquet file whose column `hospital` is 1 … 12."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("hospitals")
    draw = np.random.default_rng(0)
    table = pandas.DataFrame(draw.random((144, 3)), columns=list("abc"))
    table["hospital"] = np.repeat(np.arange(1, 13), 12)
    table["ill"] = draw.integers(0, 2, 144)
    table.to_parquet(folder / "patients.parquet")
    columns = [
        "--client-column", "hospital", "--label-column", "ill", "--classes", "0", "1", "--model",
        "linear",
    ]  # fmt: skip
    masked = ["--clip", "1", "--noise", "2", "--mask", "permutation", "--transcript", "full"]
    length = ["--rounds", "1", "--epochs", "1", "--threads", "1"]
    target = folder / "run"
    command = ["run", "fedavg", "--data", str(folder / "patients.parquet"), *columns]
    assert main([*command, *masked, *length, "--quiet", "--out", str(target)]) == 0
    return target


@pytest.mark.parametrize(
    ("arguments", "text", "position"),
    [
        (["--as", "client:3"], "client 3", 2),
        (["--as", "client:#3"], "client 4", 3),
        (["--as", "client:12"], "client 12", 11),
        (["--with", "client:12"], "the server and client 12", 11),
        (["--with", "client:#0,client:1"], "the server and client 1", 0),
    ],
)
def test_an_audit_is_of_the_client_that_is_called_so(
    run_folder: Path,
    arguments: list[str],
    text: str,
    position: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[set[Party]] = []
    made = audit.view_of

    def observed(fitted: Any, parties: Any, *more: Any) -> Any:
        view = made(fitted, parties, *more)
        seen.append({party for party in view.parties if party.kind == "client"})  # type: ignore[attr-defined]
        return view

    monkeypatch.setattr(audit, "view_of", observed)
    monkeypatch.setattr(audit, "attack_names", lambda: ["mask-known-plaintext"])
    assert main(["audit", str(run_folder), *arguments, "--quiet", "--out", str(tmp_path)]) == 0
    content = json.loads(next(tmp_path.glob("audit*.json")).read_text())
    assert content["adversary"] == text
    assert seen and all(parties == {client(position)} for parties in seen)


@pytest.mark.parametrize("arguments", [["--as", "client:0"], ["--with", "client:13"]])
def test_a_number_that_nobody_is_called_by_is_refused(
    run_folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run_folder), *arguments, "--quiet"]) == 2
    assert "clients go by name ('1', '2', '3' …) or position (client:#0" in capsys.readouterr().err


def test_results_name_clients_as_they_are_called(run_folder: Path) -> None:
    run = open_run(str(run_folder))
    hospitals = [str(number) for number in range(1, 13)]
    assert list(run.names) == hospitals
    assert list(epsilon_by_client(run.ledger, 1e-5)) == hospitals
    transcript = open_transcript(run_folder)
    assert transcript.resolved("3") == transcript.resolved(3) == {client(2)}


def test_names_with_commas_and_colons_can_collude() -> None:
    names = ["Berlin, wireless", "a:b", "x,client:y"]
    adversary = audit.adversary_of(names, "client:a:b", "client:Berlin, wireless,wire,client:#2")
    assert adversary.clients == (1, 0, 2)
    assert (
        adversary.text
        == "client a:b and client Berlin, wireless and the wire and client x,client:y"
    )

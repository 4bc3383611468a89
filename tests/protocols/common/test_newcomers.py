"""What newcomers cost: each of them over all calls, in memory and in a folder, never more than the
target without a word.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
from cases import SPLITTING, Protocol

from securecluster import Federation
from securecluster.cli.main import main
from securecluster.errors import (
    FrameError,
    RunFolderError,
    SecureClusterError,
    SecureClusterWarning,
    UsageError,
)
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.protocols import (
    CFL,
    FLHC,
    IFCA,
    NSIM,
    SRFCA,
    ClusteringProtocol,
    FedAvg,
    FineTune,
    LocalKMeans,
    OneShot,
    Settings,
)
from securecluster.protocols.common.newcomers import check_offered
from securecluster.protocols.nsim.random_walks import Format

TARGET = 3.0


def users(form: Format, count: int, draw: np.random.Generator) -> list[Any]:
    """Synthetic users of NSIM."""
    return [
        (draw.random((20, 12)).astype(np.float32), draw.integers(k % 2, 4, 20))
        for k in range(count)
    ]


EXAMPLE: dict[str, Any] = {"dp_unit": "example", "batch_size": 10, "epochs": 1}
METHODS: dict[str, tuple[Protocol, dict[str, Any]]] = {
    "local-kmeans": (LocalKMeans, {**EXAMPLE, "rounds": 1}),
    "local-kmeans, longer": (LocalKMeans, {**EXAMPLE, "rounds": 3, "local_rounds": 2}),
    "flhc of examples": (FLHC, {**EXAMPLE, "rounds": 2, "batch_size": 5}),
    "flhc of sketches": (FLHC, {"rounds": 3, "sketch": 32}),
    "srfca by weights": (SRFCA, {**EXAMPLE, "rounds": 1, "local_rounds": 2, "distance": "l2"}),
    "srfca by losses": (SRFCA, {"rounds": 1, "refine": 2}),
    "ifca": (IFCA, {"rounds": 3}),
    "ifca of examples": (IFCA, {**EXAMPLE, "rounds": 2, "starts": 1}),
    "cfl of examples": (CFL, {**SPLITTING, **EXAMPLE, "rounds": 3, "fallback": 0.2}),
    "cfl of gradients": (CFL, {**SPLITTING, "rounds": 3, "similarity": "gradient", "epochs": 1}),
    "oneshot of examples": (OneShot, {**EXAMPLE, "rounds": 2}),
    "oneshot": (OneShot, {"dp_unit": "client", "rounds": 2}),
    "nsim of examples": (NSIM, {**EXAMPLE, "walks": users, "rounds": 2}),
    "finetune of examples": (FineTune, {**EXAMPLE, "rounds": 3}),
    "fedavg, central": (FedAvg, {"rounds": 5, "placement": "central", "participation": 0.5}),
}
KMEANS: dict[str, Any] = {
    **EXAMPLE,
    "rounds": 1,
    "k": 2,
    "local_rounds": 1,
    "clip": 0.7,
    "target_epsilon": TARGET,
}
ROWS: dict[str, Any] = {
    "rounds": 2, "pre_rounds": 1, "clip": 0.7, "noise": 3.0, "epochs": 1, "model": "linear",
}  # fmt: skip


def people(sizes: dict[str, int], seed: int = 0) -> Federation:
    """Clients of two kinds, with so many samples each."""
    draw = np.random.default_rng(seed)
    rules = [np.random.default_rng(7 + c).normal(size=(12, 4)) for c in range(2)]
    data, test = {}, {}
    for k, (name, n) in enumerate(sizes.items()):
        x = draw.normal(size=(n, 12)).astype(np.float32)
        y = (x @ rules[k % 2]).argmax(1)
        y[: min(4, n)] = np.arange(4)[: min(4, n)]
        held = draw.normal(size=(8, 12)).astype(np.float32)
        data[name], test[name] = (x, y), (held, (held @ rules[k % 2]).argmax(1))
    return Federation.from_arrays(data, test=test, classes=4, seed=seed)


def team(n: int = 60, count: int = 6) -> Federation:
    return people({f"c{k}": n for k in range(count)})


def spent(fitted: ClusteringProtocol, *names: str) -> float:
    """ε of some newcomers over all calls."""
    known = set(names) & set(fitted.ledger_.names.values())
    return fitted.ledger_.of(known).price(1e-5).epsilon


def of_newcomers(fitted: ClusteringProtocol) -> list[Any]:
    clients = fitted.kept_.learned.config["clients"]
    return [event for event in fitted.ledger_.events if min(event.ids) >= clients]


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("name", list(reversed(METHODS)))  # the dearest at the end
def test_no_newcomer_costs_more_than_the_target(name: str) -> None:
    kind, params = METHODS[name]
    noisy = {"mask": "none", "clip": 0.7, "target_epsilon": TARGET, "model": "linear"}
    method = cases.build(kind, **{**noisy, **params})
    fitted = method.fit(team(), Settings(dropout=0.3))
    assert fitted.ledger_.price(1e-5).epsilon <= TARGET
    for sizes in (
        {"n0": 60, "n1": 200, "n2": 60},
        {"m0": 6, "m1": 8, "m2": 60},
        {"o0": 61, "o1": 65, "o2": 119},
    ):
        try:
            fitted.join(people(sizes, seed=5))
        except UsageError as error:
            assert "training samples" in str(error) and "\n" not in str(error)
            assert spent(fitted, *sizes) == 0, "refused before anything is asked"
        assert spent(fitted, *sizes) <= TARGET
    assert fitted.ledger_.price(1e-5).epsilon <= TARGET


def test_newcomers_with_fewer_samples_than_the_runs_clients_are_refused_before_they_are_asked() -> (
    None
):
    fitted = LocalKMeans(**KMEANS).fit(team())
    with pytest.raises(
        UsageError, match=r"'n1' has 8 training samples, fewer than any client of the run \(60\)"
    ):
        fitted.join(people({"n0": 60, "n1": 8}))
    assert not hasattr(fitted, "joined_") and not of_newcomers(fitted)
    choosing = IFCA(
        **{**EXAMPLE, "rounds": 2, "k": 2, "starts": 1, "clip": 0.7, "target_epsilon": TARGET}
    ).fit(team())
    # by its losses: nothing is trained, so nothing sampled
    assert len(choosing.join(people({"n0": 60, "n1": 8}))) == 2
    assert 0 < spent(choosing, "n1") <= TARGET
    plain = LocalKMeans(
        **{**KMEANS, "target_epsilon": None, "clip": None, "dp_unit": "client"}
    ).fit(team())
    assert len(plain.join(people({"n0": 60, "n1": 8}))) == 2  # nothing is sampled for privacy


def test_the_same_newcomer_costs_nothing_more_with_the_same_data_and_more_with_other_data() -> None:
    fitted = FLHC(**ROWS).fit(team())
    run = list(fitted.ledger_.events)
    labels = fitted.join(people({"n0": 60, "n1": 60}))
    once = spent(fitted, "n0", "n1")
    assert once == pytest.approx(gaussian_epsilon(1 / 3.0, 1e-5), rel=1e-8)
    assert fitted.ledger_.events == run + fitted.joined_.ledger.events
    fitted.join(people({"n5": 60}))  # somebody else in between
    assert list(fitted.join(people({"n0": 60, "n1": 60}))) == list(labels)
    assert spent(fitted, "n0", "n1") == once
    assert len(fitted.joined_.ledger.events) == 1 and len(fitted.ledger_.events) == len(run) + 2
    fitted.join(people({"n0": 60}, seed=9))
    assert spent(fitted, "n0") == pytest.approx(
        gaussian_epsilon(math.sqrt(2) / 3.0, 1e-5), rel=1e-8
    )
    assert spent(fitted, "n1") == once
    fitted.join(people({"n0": 70}, seed=9))
    assert spent(fitted, "n0") == pytest.approx(
        gaussian_epsilon(math.sqrt(3) / 3.0, 1e-5), rel=1e-8
    )


def test_a_newcomer_called_like_a_client_of_the_run_is_the_same_person() -> None:
    fitted = FLHC(**ROWS).fit(team())
    before = spent(fitted, "c3")
    fitted.join(people({"c3": 60}, seed=5))
    own = {number for number, name in fitted.ledger_.names.items() if name == "c3"}
    noised = [event for event in fitted.ledger_.events if event.mechanism == "gaussian"]
    releases = sum(1 for event in noised if own & set(event.ids))
    assert own == {3, 6} and spent(fitted, "c3") > before
    assert spent(fitted, "c3") == pytest.approx(
        gaussian_epsilon(math.sqrt(releases) / 3.0, 1e-5), rel=1e-8
    )


def test_newcomers_who_cost_more_than_the_target_after_several_calls_are_named() -> None:
    fitted = LocalKMeans(**KMEANS).fit(team())
    fitted.join(people({"n0": 60, "n1": 60}))
    fitted.join(people({"n0": 60, "n1": 60}))
    with pytest.warns(
        SecureClusterWarning,
        match=r"newcomer 'n1' has now released ε = .*, more than target_epsilon = 3",
    ) as caught:
        fitted.join(people({"n1": 60}, seed=8))
    assert len(caught) == 1 and caught[0].filename == __file__
    assert spent(fitted, "n1") > TARGET >= spent(fitted, "n0")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    FLHC(**ROWS).fit(team(), Settings(transcript="full", threads=1), folder=folder)
    return folder


def test_what_newcomers_release_is_in_the_runs_folder_before_they_are_placed(
    home: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(home, tmp_path / "run")
    fitted = FLHC.load(folder)
    run = len(fitted.ledger_.events)

    class KilledError(Exception):
        pass

    def die(*_: Any) -> None:
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        # the first thing that is done with replies
        patch.setattr("securecluster.protocols.authoring.check_newcomers", die)
        with pytest.raises(KilledError):
            fitted.join(people({"n0": 60, "n1": 60}))
    found = FLHC.load(folder)
    assert len(found.ledger_.events) == run + 1
    assert spent(found, "n1") == pytest.approx(gaussian_epsilon(1 / 3.0, 1e-5), rel=1e-8)
    found.join(people({"n0": 60, "n1": 60}))
    assert len(FLHC.load(folder).ledger_.events) == run + 1  # the same bits
    found.join(people({"n1": 60}, seed=9))
    assert FLHC.load(folder).ledger_ == found.ledger_
    assert spent(FLHC.load(folder), "n1") == pytest.approx(
        gaussian_epsilon(math.sqrt(2) / 3.0, 1e-5), rel=1e-8
    )
    assert main(["replay", str(folder)]) == 0
    assert main(["resume", str(folder), "--quiet"]) == 0
    again = FLHC(**ROWS).fit(team(), Settings(transcript="full", threads=1), folder=folder)
    assert again.ledger_ == found.ledger_
    assert (
        json.loads((folder / "result.json").read_text())["privacy"]["epsilon"]
        == FLHC.load(home).ledger_.price(1e-5).epsilon
    )


def test_saved_protocols_have_what_newcomers_released(home: Path, tmp_path: Path) -> None:
    fitted = FLHC(**ROWS).fit(team())
    fitted.join(people({"n0": 60, "n1": 60}))
    fitted.save(tmp_path / "kept")
    found = FLHC.load(tmp_path / "kept")
    assert found.ledger_ == fitted.ledger_
    found.join(people({"n0": 60, "n1": 60}))
    assert found.ledger_ == fitted.ledger_
    found.join(people({"n2": 60}))
    found.join(people({"n0": 60}, seed=9))
    assert FLHC.load(tmp_path / "kept").ledger_ == found.ledger_
    other = FLHC.load(tmp_path / "kept")
    other.join(people({"n7": 60}))
    found.save(tmp_path / "kept")  # with what the other one recorded there meanwhile
    last = FLHC.load(tmp_path / "kept")
    assert not (tmp_path / "kept" / "newcomers.jsonl").exists()
    assert {"n0", "n1", "n2", "n7"} <= {
        last.ledger_.names[i] for event in of_newcomers(last) for i in event.ids
    }
    last.join(people({"n8": 60}))
    assert FLHC.load(tmp_path / "kept").ledger_ == last.ledger_


def test_a_save_does_not_drop_what_newcomers_released(home: Path, tmp_path: Path) -> None:
    first = FLHC.load(home)
    kept = tmp_path / "kept"
    first.save(kept)
    other = FLHC.load(kept)
    other.join(people({"n0": 60}))
    price = spent(other, "n0")
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    with pytest.raises(
        UsageError, match="holds releases of newcomers that this protocol's ledger lacks"
    ) as caught:
        first.save(kept)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert spent(FLHC.load(kept), "n0") == price > 0
    other.save(kept)  # now the saved ledger has them
    with pytest.raises(
        UsageError,
        match="load the protocol from there before it is saved there, or save to another folder",
    ):
        first.save(kept)
    assert spent(FLHC.load(kept), "n0") == price
    first.save(tmp_path / "elsewhere")
    assert spent(FLHC.load(tmp_path / "elsewhere"), "n0") == 0
    same = FLHC.load(tmp_path / "elsewhere")
    same.join(people({"n0": 60}))  # the bits that are there
    same.join(people({"n1": 60}))
    same.save(kept)
    assert spent(FLHC.load(kept), "n0") == spent(FLHC.load(kept), "n1") == price


def test_a_save_over_a_ledger_that_cannot_be_read_is_refused(home: Path, tmp_path: Path) -> None:
    fitted = FLHC.load(home)
    fitted.save(tmp_path / "kept")
    path = tmp_path / "kept" / "learned.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        UsageError,
        match="holds a ledger that cannot be read, and would be lost: save to another folder",
    ):
        fitted.save(tmp_path / "kept")


def test_what_another_process_records_during_a_call_is_in_the_ledger(
    home: Path, tmp_path: Path
) -> None:
    FLHC.load(home).save(tmp_path / "kept")
    one, two = FLHC.load(tmp_path / "kept"), FLHC.load(tmp_path / "kept")
    place = FLHC.assign_newcomers

    def late(self: FLHC, *given: Any) -> list[int]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(FLHC, "assign_newcomers", place)
            two.join(people({"n7": 60}))
        return place(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FLHC, "assign_newcomers", late)
        one.join(people({"n0": 60}))
    price = spent(one, "n0")
    assert spent(one, "n7") == price > 0
    assert len(of_newcomers(one)) == 2
    one.join(people({"n7": 60}, seed=9))
    again = FLHC.load(tmp_path / "kept")
    assert spent(one, "n7") == spent(again, "n7") > price
    assert spent(one, "n0") == spent(again, "n0") == price


def test_a_file_that_was_begun_anew_is_taken_from_its_start(home: Path, tmp_path: Path) -> None:
    FLHC.load(home).save(tmp_path / "kept")
    one, two = FLHC.load(tmp_path / "kept"), FLHC.load(tmp_path / "kept")
    two.join(people({"n0": 60}))
    one.join(people({"n1": 60}))
    two.save(tmp_path / "kept")  # and the file is gone
    third = FLHC.load(tmp_path / "kept")
    for name in ("n2", "n3", "n4"):
        third.join(people({name: 60}))
    one.join(people({"n5": 60}))
    assert spent(one, "n0", "n1", "n2", "n3", "n4") == spent(one, "n2") == spent(one, "n5") > 0
    assert len(of_newcomers(one)) == len(of_newcomers(FLHC.load(tmp_path / "kept"))) == 6


def test_noise_in_gram_matrices_alone_needs_a_record_as_well(tmp_path: Path) -> None:
    method = OneShot(rounds=1, epochs=1, model="linear", tasks=6, gram_noise=3.0, dp_unit="client")
    fitted = method.fit(team(), folder=tmp_path / "run")
    assert 0 < fitted.ledger_.price(1e-5).epsilon < math.inf
    (tmp_path / "run" / "newcomers.jsonl").mkdir()
    with pytest.raises(RunFolderError, match=r"is recorded: make the folder writable"):
        fitted.join(people({"n0": 60}))
    assert not of_newcomers(fitted)


def test_a_folder_that_cannot_be_written_to_is_said_before_anything_is_released(
    home: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(home, tmp_path / "run")
    fitted = FLHC.load(folder)
    (folder / "newcomers.jsonl").mkdir()
    before = list(fitted.ledger_.events)
    with pytest.raises(
        RunFolderError, match=r"cannot write .*newcomers\.jsonl, .* make the folder writable"
    ) as caught:
        fitted.join(people({"n0": 60}))
    assert "\n" not in str(caught.value)
    assert fitted.ledger_.events == before and not hasattr(fitted, "joined_")
    plain = FLHC(rounds=2, pre_rounds=1, epochs=1, model="linear").fit(
        team(), folder=tmp_path / "plain"
    )
    (tmp_path / "plain" / "newcomers.jsonl").mkdir()
    assert len(plain.join(people({"n0": 60}))) == 1  # ε is infinite, whatever is recorded
    assert len(of_newcomers(plain)) > 0


def test_damage_to_what_newcomers_released_is_noticed_and_a_torn_line_dropped(
    home: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(home, tmp_path / "run")
    fitted = FLHC.load(folder)
    fitted.join(people({"n0": 60}))
    fitted.join(people({"n1": 60}))
    path = folder / "newcomers.jsonl"
    whole = path.read_bytes()
    first, second = whole.splitlines(keepends=True)
    for wrong in (
        whole.replace(b"3.0", b"4.0", 1),
        second,
        second + first,
        b"{}\n" + whole,
        b"[]\n",
        b"\xff\n",
        whole.replace(b'"n0"', b'"n9"'),
    ):
        path.write_bytes(wrong)
        with pytest.raises(SecureClusterError, match=r"newcomers\.jsonl") as caught:
            FLHC.load(folder)
        assert "\n" not in str(caught.value)
    path.write_bytes(whole[:-7])
    torn = FLHC.load(folder)
    assert len(of_newcomers(torn)) == 1
    torn.join(people({"n1": 60}))
    assert path.read_bytes() == whole


def test_a_run_without_a_target_says_nothing_of_its_newcomers_price() -> None:
    fitted = FLHC(**ROWS).fit(team())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            fitted.join(people({"n0": 60}, seed=seed))


def test_a_newcomer_that_chooses_what_it_was_not_offered_is_refused() -> None:
    assert check_offered([7, 3], [2, 0], [0, 2]) == {7: 2, 3: 0}
    for choice in (1, 3, -1):
        with pytest.raises(FrameError, match=f"client 3 chose {choice}, which it was not offered"):
            check_offered([7, 3], [2, choice], [0, 2])

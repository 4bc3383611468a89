"""Every protocol × mask × transport: the properties a protocol must keep whatever it does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from cases import AVERAGING, EVERY_PROTOCOL, FULL, MASKS, ONE_MODEL, Protocol

from securecluster import Federation, Iid, LabelSwap, Tasks
from securecluster.errors import FrameError, PolicyError, RunFolderError, UpdateError, UsageError
from securecluster.messaging.messages import Call, Empty
from securecluster.messaging.transcript import load_entries
from securecluster.parties.endpoints import build_client
from securecluster.protocols import (
    CFL,
    CFLGP,
    FLHC,
    FLUX,
    IFCA,
    MRMTL,
    NSIM,
    PACFL,
    RDPCFL,
    SRFCA,
    CLoVE,
    ClusteringProtocol,
    FedAvg,
    FineTune,
    Hidden,
    Local,
    LocalKMeans,
    OneShot,
    RandomClusters,
    Settings,
    Signature,
    conformance,
)
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.run import Run
from securecluster.training.local_trainer import LocalTrainer

MASKED = [(protocol, mask) for protocol in AVERAGING for mask in ("none", *MASKS)]
EVERY = [*MASKED, (Local, "none")]
HIDDEN = [(protocol, mask) for protocol, mask in MASKED if mask != "none"]


def method(protocol: Protocol, mask: str, **params: Any) -> Any:
    """Return a small protocol with a mask, and a model that is small enough for the mask."""
    return cases.build(protocol, mask=mask, model="linear" if mask == "haar" else "mlp", **params)


SHARED = pytest.mark.parametrize(("protocol", "mask"), cases.covering(EVERY), scope="module")
# What runs anew meets each protocol once, and the other masks where all updates are read or summed
AGAIN = [(protocol, "permutation") for protocol in AVERAGING]
AGAIN += [(Local, "none"), (FedAvg, "none"), (CFL, "rotation")]
RERUN = pytest.mark.parametrize(("protocol", "mask"), cases.covering(EVERY, AGAIN), scope="module")


@pytest.fixture(scope="module")
def run(protocol: Protocol, mask: str, small: Federation) -> conformance.Example:
    """One run of a protocol under a mask, which all `SHARED` tests read."""
    return conformance.example(partial(method, protocol), small, mask=mask)


@pytest.mark.few(10)
@SHARED
def test_bytes_equal_the_encoded_length_of_every_frame(run: conformance.Example) -> None:
    conformance.check_frames(run.fitted)


@pytest.mark.few(10)
@SHARED
def test_the_server_replays_bit_for_bit(run: conformance.Example) -> None:
    conformance.check_replay(run)


@pytest.mark.few(3)
@RERUN
def test_the_same_seed_gives_the_same_result(run: conformance.Example) -> None:
    conformance.check_repeats(run)


@pytest.mark.few(3)
@RERUN
def test_a_run_stopped_after_any_round_resumes_to_the_same_result(
    run: conformance.Example, tmp_path: Path
) -> None:
    conformance.check_resume(run, tmp_path)


@pytest.mark.few(10)
@SHARED
def test_labels_are_numbered_from_zero(run: conformance.Example) -> None:
    labels = run.fitted.labels_
    assert set(labels) == set(range(max(labels) + 1))


# R-DPCFL standardises each coordinate, so that a rotation leads to other clusters
KEEPING = [pair for pair in HIDDEN if pair not in {(RDPCFL, "rotation"), (RDPCFL, "haar")}]


@pytest.mark.few(3)
@pytest.mark.parametrize(("protocol", "mask"), cases.covering(KEEPING))
def test_one_masked_round_equals_a_plain_one(
    protocol: Protocol, mask: str, small: Federation
) -> None:
    conformance.check_masked_round(partial(method, protocol), small, mask)


# FedAvg and RandomClusters do what FineTune does; for the others see nodes/test_every_node.py
AT_NODES = (CFL, FLHC, FineTune, LocalKMeans, MRMTL, NSIM, OneShot, PACFL, SRFCA, Signature)


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("protocol", "mask"),
    cases.covering(
        [case for case in HIDDEN if case[0] in AT_NODES],
        cases.COVERED - {(CFL, "haar")},  # whose matrix every node draws
    ),
)
def test_nodes_with_one_client_each_mask_alike_behind_real_frames(
    protocol: Protocol, mask: str, small: Federation
) -> None:
    conformance.check_nodes(partial(method, protocol), small, mask=mask)


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dtype", "model", "rounds", "masks"),
    [
        ("float64", "mlp", 16, MASKS[:3]),
        ("float64", "linear", 16, MASKS[3:]),
        cases.exhaustive("float32", "mlp", 16, MASKS[:3]),
        ("float32", "linear", 16, MASKS[3:]),
    ],
)
def test_a_whole_masked_run_equals_a_plain_one(
    dtype: str, model: str, rounds: int, masks: tuple[str, ...]
) -> None:
    federation = Federation.simulate("digits", clients=12, samples=50, seed=0)
    plain, *masked = (
        CFL(mask=mask, model=model, rounds=rounds, level=0.01).fit(
            federation, Settings(dtype=dtype)
        )
        for mask in ("none", *masks)
    )
    assert plain.agreement_ is not None
    assert plain.agreement_["exact"]
    for one in masked:
        assert list(plain.labels_) == list(one.labels_)
        if dtype == "float64":
            torch.testing.assert_close(
                one.client_models_.values, plain.client_models_.values, rtol=0, atol=1e-9
            )
        assert abs(np.mean(plain.accuracy_) - np.mean(one.accuracy_)) <= 0.01


def test_masked_updates_are_not_the_updates_and_change_their_order_each_round(
    small: Federation,
) -> None:
    plain, masked = (
        [_update(CFL(rounds=2, mask=mask, lr=1e-3).fit(small, FULL), n) for n in (0, 1)]
        for mask in ("none", "permutation")
    )
    for one, other in zip(plain, masked, strict=True):
        assert not torch.equal(one, other)
    assert torch.equal(plain[0].sort().values, masked[0].sort().values)
    dead = [(update == 0).all(0) for update in plain]  # weights of pixels that are always empty
    zeros = [(update == 0).all(0) for update in masked]
    assert [int(z.sum()) for z in zeros] == [int(d.sum()) for d in dead]
    # they stay where they are; a fresh map moves them
    assert (dead[0] == dead[1]).float().mean() > 0.99
    assert (zeros[0] == zeros[1]).float().mean() < 0.8


def _update(fitted: ClusteringProtocol, number: int) -> torch.Tensor:
    """The updates (m, d) of one training call, as the server got them."""
    calls = [
        k for k, e in enumerate(fitted.transcript_.entries) if e.method in ("train", "contribute")
    ]
    delta: torch.Tensor = fitted.transcript_.content(calls[number])[1].reply.delta.values
    return delta


@pytest.mark.parametrize("protocol", [FedAvg, FineTune, Local, RandomClusters])
def test_clients_of_methods_that_need_sums_alone_refuse_to_answer_one_by_one(
    protocol: Protocol, small: Federation
) -> None:
    made = method(protocol, "none", rounds=1)
    endpoint, query = (
        build_client(made, small, Settings()),
        PendingUpdates.start(6, fresh=False).message_for([0]),
    )
    for name, params in (("train", query), ("post", Empty()), ("contribute", query)):
        with pytest.raises((FrameError, PolicyError)):
            endpoint.answer(
                Call(
                    config_hash(made.config(small, "float32")),
                    name,
                    "gather",
                    1,
                    1,
                    (0,),
                    params,
                    (1,),
                )
            )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("protocol", "mask"),
    cases.covering(
        [(protocol, mask) for protocol in EVERY_PROTOCOL for mask in ("none", "permutation")],
        [
            *((protocol, "permutation") for protocol in AVERAGING),
            *((protocol, "none") for protocol in (CFL, FedAvg, IFCA, Local)),
        ],
    ),
)
def test_what_is_declared_to_tell_nothing_new_does_not_change_with_data(
    protocol: Protocol, mask: str, small: Federation
) -> None:
    """Of private=False and of derived replies; under masks seven methods' clients post models."""
    mask = "none" if protocol is Local else mask
    compared = conformance.check_free_replies(partial(method, protocol), small, mask=mask)
    assert bool(compared) == (
        protocol in (CFL, CFLGP, CLoVE, FLHC, FLUX, IFCA, RDPCFL, SRFCA) and mask != "none"
    )


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("protocol", "masks"),
    [
        (protocol, tuple(m for p, m in MASKED if (p, m) in cases.COVERED and p is protocol))
        for protocol in AVERAGING
    ]
    + [
        cases.exhaustive(
            protocol, ("none", *(mask for mask in MASKS if (protocol, mask) in KEEPING))
        )
        for protocol in AVERAGING
    ],
)
def test_newcomers_are_placed_alike_under_every_mask(
    protocol: Protocol, masks: tuple[str, ...]
) -> None:
    scenario = Tasks() if protocol is OneShot else LabelSwap(clusters=2)
    whole = Federation.simulate("digits", scenario=scenario, clients=14, samples=40, seed=0)

    def make(**params: Any) -> Any:
        return method(protocol, **params).set_params(model="linear")

    conformance.check_newcomers(make, whole.select(range(8)), whole.select(range(8, 14)), masks)


SPLITS = {"criterion": "absolute", "eps1": 100, "eps2": 1e-3, "gamma_max": 0.0, "fallback": 0.3}
PHASES: list[tuple[Protocol, dict[str, Any], int]] = [
    (CFL, SPLITS, 4),
    (IFCA, {}, 4),
    (SRFCA, {"retrain": 1}, 3),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("protocol", "params", "phases"), PHASES)
def test_a_run_killed_between_its_last_phases_resumes_to_the_same_frames(
    protocol: Protocol,
    params: dict[str, Any],
    phases: int,
    small: Federation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the loop come delivery, the leaves and the fallback of CFL, the models that IFCA offers
    to newcomers.
    """
    made = method(protocol, "permutation", rounds=2, **params)
    whole = made.fit(small, FULL)
    checkpoint = Run._checkpoint
    for stop in range(made.total_rounds + 1, made.total_rounds + phases + 1):

        def killed(run: Run, stop: int = stop) -> None:
            checkpoint(run)
            if run._clock.number == stop:
                raise KeyboardInterrupt

        folder = tmp_path / str(stop)
        with monkeypatch.context() as patch:
            patch.setattr(Run, "_checkpoint", killed)
            with pytest.raises(KeyboardInterrupt):
                made.fit(small, FULL, folder=folder)
        resumed = made.fit(small, FULL, folder=folder)
        assert resumed.transcript_.entries == whole.transcript_.entries
        assert resumed.ledger_ == whole.ledger_
        assert (
            made.replay(resumed.transcript_, made.config(small, "float32")) == whole.server_state_
        )


def test_a_run_stopped_before_its_first_checkpoint_starts_over_cleanly(
    small: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            LocalTrainer, "scores", interrupt
        )  # the observer, after the first round's messages
        with pytest.raises(KeyboardInterrupt):
            CFL(rounds=2).fit(small, FULL, folder=tmp_path)
    assert list((tmp_path / "transcript").glob("*.safetensors"))
    fitted = CFL(rounds=2).fit(small, FULL, folder=tmp_path)
    assert load_entries(tmp_path / "transcript") == fitted.transcript_.entries
    assert fitted.transcript_.entries == CFL(rounds=2).fit(small, FULL).transcript_.entries


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("protocol", "mask"), cases.covering([case for case in MASKED if case[0] in ONE_MODEL])
)
def test_a_client_that_misses_rounds_is_named_and_catches_up(
    protocol: Protocol, mask: str, small: Federation
) -> None:
    made = method(protocol, mask, rounds=5)

    def lost(call: Call) -> set[int]:
        return {2} if call.round in (2, 3) else set()

    served = cases.serve(made, small, lost, Settings(), record="sizes")
    state, models = served.state, served.endpoint.client.models.values
    assert served.net.state.lost == {2: [2, 3]}
    assert not state.outbox.lagging_clients()
    labels = made.observer.known_labels(served.endpoint.client, state)
    same = [i for i in range(6) if labels[i] == labels[2]]
    assert len(same) > 1
    assert all(torch.equal(models[2], models[i]) for i in same)
    training = ("train", "contribute", "contribute_block", "contribute_counted")
    late = next(e for e in served.transcript.entries if e.method in training and e.round == 4)
    behind, current = late.down[2], late.down[0]
    assert behind > 2 * current if mask != "none" else behind == current


def test_dropouts_do_not_keep_cfl_from_the_clusters() -> None:
    federation = Federation.simulate("digits", samples=50, seed=0)
    fitted = CFL(rounds=20, level=0.01).fit(federation, Settings(dropout=0.05))
    assert fitted.dropped_
    assert fitted.agreement_ is not None
    assert fitted.agreement_["exact"]


@pytest.mark.exhaustive
def test_partial_participation_waits_for_complete_rounds_and_recovers_the_clusters() -> None:
    for scenario, rounds in ((LabelSwap(), 30), (Iid(), 60)):
        fitted = CFL(rounds=rounds, participation=0.3).fit(
            Federation.simulate("digits", scenario=scenario, seed=0)
        )
        assert fitted.agreement_ is not None
        assert fitted.agreement_["exact"]
        asked = [
            len(e.to) for e in fitted.transcript_.entries if e.method in ("train", "contribute")
        ]
        assert min(asked) == 6
        assert asked.count(20) == 1, "of IID clients, too, a few once look as if they were clusters"


def test_padding_is_on_the_wire_and_in_the_result(small: Federation) -> None:
    plain, masked = (
        CFL(rounds=1, mask=mask).fit(small, FULL) for mask in ("permutation", "rotation")
    )
    train = [
        next(e for e in fitted.transcript_.entries if e.method in ("train", "contribute"))
        for fitted in (plain, masked)
    ]
    assert _update(masked, 0).shape == (6, 4864)  # 64·64 + 64 + 64·10 + 10 = 4810, then 8·8·76
    assert train[1].up[0] - train[0].up[0] == 4 * 54
    assert (plain.mask_info().padding_bytes, masked.mask_info().padding_bytes) == (0, 4 * 54)


@pytest.mark.parametrize("protocol", [CFL, FedAvg])
def test_a_dense_rotation_of_a_large_model_is_refused_before_anything_runs(
    protocol: Protocol, small: Federation
) -> None:
    made = protocol(mask="haar")
    for start in (
        lambda: made.config(small, "float32"),
        lambda: build_client(made, small, Settings()),
        lambda: made.fit(small),
    ):
        with pytest.raises(UsageError, match=r"4,810 numbers .* use the mask 'rotation'"):
            start()


def test_client_and_server_agree_on_the_dimension(small: Federation) -> None:
    made = CFL(mask="rotation")
    config = made.config(small, "float32")
    assert (
        config["dimension"] == build_client(made, small, Settings()).client.cohort.model.dimension
    )
    assert (
        config_hash({**config, "dimension": 4811}) != build_client(made, small, Settings())._config
    )


CHANGES: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"model": "linear"},
    {"model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))},
]
RESUMED = (
    CFL, CLoVE, FedAvg, FineTune, Hidden, IFCA, Local, LocalKMeans, MRMTL, OneShot, RandomClusters,
    SRFCA,
)  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("protocol", "change"),
    [
        # each protocol once, and every change
        (protocol, change)
        if protocol in (CFL, FedAvg) or place % 3 == number
        else cases.exhaustive(protocol, change)
        for place, protocol in enumerate(RESUMED)
        for number, change in enumerate(CHANGES)
    ],
)
def test_a_folder_of_another_configuration_is_not_resumed(
    protocol: Protocol, change: dict[str, Any], small: Federation, tmp_path: Path
) -> None:
    start: dict[str, Any] = {
        "rounds": 2,  # one for each start of IFCA
        "model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
    }
    cases.build(protocol, **start).fit(small, folder=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RunFolderError, match="another configuration"):
        cases.build(protocol, **(start | change)).fit(small, folder=tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    resumed = cases.build(protocol, **start).fit(small, folder=tmp_path)
    assert len(resumed.history_) == resumed.total_rounds


@pytest.mark.parametrize(
    "protocol",
    [CFL, FLHC, FedAvg, FineTune, IFCA, Local, LocalKMeans, OneShot, RandomClusters, SRFCA],
)
def test_divergence_is_an_error_that_names_the_clients(
    protocol: Protocol, small: Federation
) -> None:
    with pytest.raises(UpdateError, match=r"round 1: .* client\(s\) \d.*lower the learning rate"):
        method(protocol, "none", rounds=3, lr=1e30).fit(small)


def test_numpy_numbers_are_numbers_and_others_are_refused(small: Federation) -> None:
    one, other = (
        CFL(rounds=1, lr=0.5, epochs=2),
        CFL(rounds=np.int64(1), lr=np.float64(0.5), epochs=np.int32(2)),
    )  # type: ignore[arg-type]
    assert config_hash(one.config(small, "float32")) == config_hash(other.config(small, "float32"))
    assert torch.equal(one.fit(small).client_models_.values, other.fit(small).client_models_.values)
    for params in ({"rounds": 1.5}, {"rounds": "3"}, {"participation": "all"}):
        with pytest.raises(UsageError, match="is not possible: it is a"):
            CFL(**params).fit(small)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("protocol", "mask"),
    [(CFL, "permutation"), (FLHC, "none"), (IFCA, "permutation"), (IFCA, "none"), (Local, "none")],
)
def test_about_so_many_rows_are_on_the_wire(
    protocol: Protocol, mask: str, small: Federation
) -> None:
    made = method(protocol, mask, rounds=6)
    made.set_params(**({"k": 3} if protocol is IFCA else {}))
    fitted = made.fit(small)
    row = 4 * fitted.client_models_.table.shape[1]
    sent = fitted.bytes_["up"] + fitted.bytes_["down"]
    told = made.vectors_per_round * row * len(small) * made.total_rounds
    # besides rows: headers, choices, the tree
    assert 0.6 * told <= sent <= 1.2 * told + 1000 * len(small) * made.total_rounds


def test_clients_that_are_no_federation_are_refused(small: Federation) -> None:
    fitted = FedAvg(rounds=1).fit(small)
    for wrong in (None, np.zeros((3, 4)), list(small.shards)):
        for use in (FedAvg(rounds=1).fit, fitted.join):
            with pytest.raises(UsageError, match=r"\.from_frame, from_csv or from_arrays"):
                use(wrong)  # type: ignore[operator]
    with pytest.raises(UsageError, match="no newcomers"):
        fitted.join(small.select([]))


@pytest.mark.parametrize("params", [{"eps1": np.inf}, {"eps2": np.inf}])
def test_what_is_not_finite_is_no_bound(params: dict[str, Any], small: Federation) -> None:
    # a configuration is JSON, which has no infinity
    with pytest.raises(UsageError, match="finite"):
        CFL(**params).fit(small)
    with pytest.raises(UsageError, match="finite"):
        FLHC(threshold=np.inf).fit(small)


@pytest.mark.parametrize(
    ("protocol", "told"), [(CFL, "kept aside"), (IFCA, "lowest training loss")]
)
def test_what_the_plain_sum_reads_of_each_client_is_said(protocol: Protocol, told: str) -> None:
    made = protocol(**({"fallback": 0.2} if protocol is CFL else {}))  # type: ignore[arg-type]
    assert any(
        told in text and text.startswith("each client's") and "plain sum" in text
        for text in made.disclosures().server
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"eps1": "a"},
        {"level": np.nan},
        {"min_size": None},
        {"gamma_max": "x"},
        {"fallback": "x"},
        {"fallback": np.nan},
        {"mask": None},
    ],
)
def test_what_is_no_number_or_name_is_refused(wrong: dict[str, Any], small: Federation) -> None:
    with pytest.raises(UsageError):
        CFL(**wrong).fit(small)
    for settings in ({"dropout": "x"}, {"threads": "x"}, {"threads": 0.5}, {"target": "x"}):
        with pytest.raises(UsageError, match=r"threads is a whole number|dropout lies in \[0, 1\)"):
            FedAvg(rounds=1).fit(small, Settings(**settings))  # type: ignore[arg-type]
    for left in ({"engine": "ray"}, {"workers": 2}):
        with pytest.raises(UsageError, match=r"left securecluster: .* train in several threads"):
            Settings(**left)  # type: ignore[arg-type]
    for odd in ({"metric": None}, {"linkage": 1}):
        with pytest.raises(UsageError, match="unknown"):
            FLHC(**odd).fit(small)  # type: ignore[arg-type]

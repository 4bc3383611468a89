"""Runs on the pretended device of `pretended` equal those on the CPU, resume and replay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from cases import Protocol
from pretended import NAME, PRETENDED, Placed, pretending

from securecluster import Federation, protocols
from securecluster.core import devices
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.messaging import chunks
from securecluster.messaging.messages import Picks, Rows, Shared, placed
from securecluster.models.architectures import NETWORKS
from securecluster.models.objectives import OBJECTIVES
from securecluster.models.validation import build
from securecluster.parties import endpoints, server_half
from securecluster.privacy.compression import codecs
from securecluster.privacy.compression.sketches import Sketch
from securecluster.privacy.dp.gaussian_mechanism import Clip, Noise
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.masking import masks
from securecluster.runs import carry_out
from securecluster.training.local_trainer import LocalTrainer, LocalTraining


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every run computes on the pretended device."""
    for module in (carry_out, endpoints, server_half):
        monkeypatch.setattr(module, "choose_device", lambda name: PRETENDED)
    monkeypatch.setitem(chunks.CHUNK_BYTES, NAME, 1 << 20)
    with pretending():
        yield


def test_the_pretended_device_refuses_what_cuda_refuses() -> None:
    with pretending():
        there, here = torch.ones(3, device=PRETENDED), torch.ones(3)
        index = torch.zeros(1, dtype=torch.long)
        assert (there + 1).tolist() == [2.0] * 3
        assert there[index].tolist() == [1.0]
        for wrong in (
            lambda: there + here,
            lambda: torch.stack([there, here]),
            lambda: here[index.to(PRETENDED)],
            lambda: there.index_select(0, index),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                wrong()
        for wrong in (there.numpy, lambda: np.asarray(there)):
            with pytest.raises(TypeError, match="numpy"):
                wrong()


def test_the_pretended_device_rounds_differently() -> None:
    x = torch.rand(4, 5, dtype=torch.float64)
    with pretending():
        there = x.to(PRETENDED)
        assert torch.equal(there.cpu(), x)
        product = (there @ there.T).cpu()
    assert not torch.equal(product, x @ x.T)
    torch.testing.assert_close(product, x @ x.T, rtol=1e-14, atol=0)


PRIVATE = {"clip": 1.0, "noise": 0.1}
RUNS: list[tuple[Protocol, str, dict[str, Any]]] = [
    (protocols.CFL, "permutation", {}),
    (protocols.CFL, "none", {"sketch": 32, **PRIVATE}),
    (protocols.CFL, "none", {"placement": "central", **PRIVATE}),
    (protocols.CFL, "rotation", {"compress": "1bit"}),
    (protocols.FLHC, "signed-permutation", {}),
    (protocols.FLHC, "none", {"compress": "topk:0.1"}),
    (protocols.SRFCA, "rotation", {}),
    (protocols.SRFCA, "none", PRIVATE),
    (protocols.OneShot, "haar", {}),
    (protocols.OneShot, "none", {"features": "conv", "components": 8}),
    (protocols.OneShot, "none", PRIVATE),
    (protocols.NSIM, "permutation", {}),
    (protocols.IFCA, "rotation", {}),
    (protocols.IFCA, "none", {"starts": 1, **PRIVATE}),
    (protocols.LocalKMeans, "signed-permutation", {}),
    (protocols.RandomClusters, "permutation", {}),
    (protocols.FedAvg, "rotation", {}),
    (protocols.FineTune, "rotation", {}),
    (protocols.FedAvg, "none", {"clip": 1.0, "noise": 0.5, "dp_unit": "example"}),
    (protocols.Local, "none", {}),
    (protocols.MRMTL, "rotation", {}),
]


@dataclass(frozen=True, eq=False)
class Message:
    rows: Rows
    shared: Shared
    picks: Picks
    number: int


FULL = protocols.Settings(transcript="full", dtype="float64", dropout=0.1)


@pytest.fixture(scope="module")
def few() -> Federation:
    """Six clients with so few samples that an epoch is two batches: each operation costs much."""
    return cases.two_clusters(clients=6, samples=12)


# each protocol once, under a mask where it has one
COVERED = list(
    {protocol: (protocol, mask, params) for protocol, mask, params in reversed(RUNS)}.values()
)
NOISY_RUNS = [run for run in RUNS if run[2].get("noise")]
OTHERS = [run for run in RUNS if run not in COVERED]


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("protocol", "mask", "params"),
    [*COVERED, *(run if run in NOISY_RUNS[:2] else cases.exhaustive(*run) for run in OTHERS)],
)
def test_a_run_elsewhere_equals_that_on_the_cpu_and_replays(
    protocol: Protocol,
    mask: str,
    params: dict[str, Any],
    few: Federation,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    cases.stub_pair_network(monkeypatch)
    made = cases.build(protocol, mask=mask, model="linear", rounds=3, epochs=1, **params)
    cpu = made.fit(few, FULL).client_models_.values
    request.getfixturevalue("elsewhere")
    whole = made.fit(few, FULL)
    assert whole.device_ == NAME
    models = whole.client_models_.values.cpu()
    assert made.replay(whole.transcript_, made.config(few, "float64")) == whole.server_state_
    if params.get("noise"):  # the noise belongs to the very bits of a row
        assert models.isfinite().all()
    else:
        torch.testing.assert_close(models, cpu, rtol=0, atol=1e-11)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("protocol", "mask", "params"), [*COVERED, *(cases.exhaustive(*run) for run in OTHERS)]
)
def test_a_run_elsewhere_resumes(
    protocol: Protocol,
    mask: str,
    params: dict[str, Any],
    few: Federation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    cases.stub_pair_network(monkeypatch)
    made = cases.build(protocol, mask=mask, model="linear", rounds=3, epochs=1, **params)
    request.getfixturevalue("elsewhere")
    with pytest.raises(KeyboardInterrupt):
        made.fit(few, FULL, folder=tmp_path, report=cases.interrupt_after(2))
    resumed = made.fit(few, FULL, folder=tmp_path)
    state, models = resumed.server_state_, resumed.client_models_.values.cpu()
    whole = made.fit(few, FULL)
    assert torch.equal(whole.client_models_.values.cpu(), models)
    assert whole.server_state_ == state


@pytest.mark.exhaustive
def test_newcomers_are_placed_elsewhere(small: Federation, elsewhere: None) -> None:
    for made in (
        protocols.CFL(rounds=2, mask="permutation"),
        protocols.IFCA(rounds=2, k=2, starts=2),
        protocols.SRFCA(rounds=2, refine=1),
    ):
        assert len(made.fit(small, FULL).join(small)) == len(small)


def test_a_transcript_in_memory_stays_off_the_device(small: Federation, elsewhere: None) -> None:
    transcript = protocols.FedAvg(rounds=1).fit(small, FULL).transcript_
    for position in range(len(transcript.entries)):
        call, answer = transcript.content(position)
        for value in (*vars(call.query).values(), *vars(answer.reply).values()):
            tables = [getattr(value, name) for name in ("table", "value") if hasattr(value, name)]
            assert not any(isinstance(table, Placed) for table in tables)


def test_fields_of_a_message_lie_where_they_are_told_to() -> None:
    message = Message(
        Rows(torch.ones(2, 3)), Shared(torch.ones(2)), Picks(torch.ones(2, 1), ((0,), (1,))), 7
    )
    assert placed(message, (), torch.device("cpu")) is message
    with pretending():
        moved = placed(message, ("rows", "picks"), PRETENDED)
        assert type(moved.rows.table) is type(moved.picks.table) is Placed
        assert type(moved.shared.value) is torch.Tensor
        assert (moved.number, moved.picks.picks) == (7, message.picks.picks)
        back = placed(moved, ("shared",), PRETENDED)
        assert [type(back.rows.table), type(back.shared.value)] == [torch.Tensor, Placed]


@pytest.mark.parametrize("mask", masks.MASKS[1:])
def test_masks_elsewhere(mask: str) -> None:
    rows = torch.rand(3, 50, dtype=torch.float64)
    (stage,) = masks.build(mask, 50)
    stage.unlock(bytes(32))  # type: ignore[attr-defined]
    masked = stage.forward(rows, 1)
    with pretending():
        there = stage.forward(rows.to(PRETENDED), 1)
        back = stage.inverse(there, 1)
        assert isinstance(there, Placed)
        torch.testing.assert_close(there.cpu(), masked, rtol=0, atol=1e-13)
        torch.testing.assert_close(back.cpu(), rows, rtol=0, atol=1e-13)


def test_mechanisms_elsewhere() -> None:
    rows = torch.randn(3, 51, dtype=torch.float64)
    draws = NoiseStreams(lambda client: bytes([client] * 32), "run")
    noise = Noise(1.0, 0.5)
    noise.arm(draws)
    sketch, clip = Sketch(8, Randomness(0)), Clip(0.5)
    codes = {name: codecs.build(name, 51)[0] for name in ("8bit", "4bit", "1bit", "topk:0.2")}

    def released(x: torch.Tensor) -> list[torch.Tensor]:
        noised = noise.forward_for(x.clone(), 1, [4, 5, 6], "row")
        return [sketch.forward(x, 1), clip.forward(x, 1), noised]

    here = released(rows)
    # the rows of a device have streams of their own, which the CPU can compute
    draws.noise_together([4, 5, 6], "row", 1, here[2].copy_(rows), 0.5, 1.0)
    coded = {name: code.decode(code.forward(rows, 1)) for name, code in codes.items()}
    with pretending():
        far = rows.to(PRETENDED)
        there = released(far)
        for one, other in zip(here, there, strict=True):
            torch.testing.assert_close(other.cpu(), one, rtol=1e-13, atol=1e-13)
        for name, code in codes.items():
            torch.testing.assert_close(
                code.decode(code.forward(far, 1)).cpu(), coded[name], rtol=1e-6, atol=0
            )


IMAGE = (1, 28, 28)
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "classification": (IMAGE, 4), "regression": (IMAGE, 3), "multilabel": (IMAGE, 3),
    "binary": (IMAGE, 2), "trajectory": ((5, 2), 2), "language": ((6,), 12),
}  # fmt: skip
# so many weights that a minute goes into their noise; cnn-ali convolves too, lstm-chars recurs
WIDE = ("cnn-briggs", "cnn-cifar", "resnet9", "lstm-chars-256")
TRAINED = [
    cases.exhaustive(kind, name, clip) if name in WIDE else (kind, name, clip)
    for kind, names in NETWORKS.items()
    for name, clip in itertools.product(names, (0.0, 1.0))
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "name", "clip"), TRAINED)
def test_networks_train_elsewhere(kind: str, name: str, clip: float) -> None:
    shape, classes = SHAPES[kind]
    if name == "resnet9":
        shape = (1, 8, 8)  # the smallest image that it takes
    draw, objective = np.random.default_rng(0), OBJECTIVES[kind]()

    def samples(count: int) -> tuple[Any, Any]:
        if kind == "language":
            return draw.integers(classes, size=(count, *shape)), draw.integers(
                classes, size=(count, *shape)
            )
        x = draw.random((count, *shape)).astype(np.float32)
        if kind in ("trajectory", "regression"):
            return x, draw.random((count, classes))
        of_one = (count, classes) if kind == "multilabel" else count
        return x, draw.integers(2 if kind == "multilabel" else classes, size=of_one)

    arrays = {f"c{k}": samples(3 + k) for k in range(3)}
    none: dict[str, Any] = {key: ([], []) for key in arrays}
    federation = Federation.from_arrays(
        arrays, test=none, objective=objective, classes=classes, seed=0
    )
    flat = build(name, shape, classes, Randomness(0), objective)
    plan = LocalTraining(lr=0.1, epochs=1, batch_size=3, steps=2, momentum=0.5, clip=clip)
    secret = NoiseStreams(lambda client: bytes(32), "run")

    def trained(device: torch.device, plan: LocalTraining) -> torch.Tensor:
        cohort = LocalTrainer(federation, flat, Randomness(0), device, torch.float64, secret=secret)
        updates = cohort.train(Rows(cohort.start[None], (0, 0, 0)), range(3), plan, 1)
        assert cohort.loss(Rows(cohort.start[None] + updates), range(3)).shape == (3,)
        return updates.cpu()

    # batches of DP-SGD are drawn from the bits of a client's samples, which are the same everywhere
    here = trained(torch.device("cpu"), plan)
    with pretending():
        there = trained(PRETENDED, plan)
    torch.testing.assert_close(there, here, rtol=1e-9, atol=1e-11)
    if clip:  # a device has noise of its own
        noisy = replace(plan, noise=0.1)
        with pretending():
            once, again = trained(PRETENDED, noisy), trained(PRETENDED, noisy)
        assert torch.equal(once, again)
        assert once.isfinite().all() and (once - there).std() > 1e-4


def test_a_gpu_computes_float32_alike_every_time_and_settings_are_put_back() -> None:
    def settings() -> list[Any]:
        return [getattr(place, name) for place, name, _ in devices._exact_settings()]

    before, mode = settings(), torch.get_deterministic_debug_mode()
    with devices.reproducible(torch.device("cpu")):
        assert (settings(), torch.get_deterministic_debug_mode()) == (before, mode)
    with pytest.raises(UsageError), devices.reproducible(torch.device("cuda")):
        assert settings() == [value for _, _, value in devices._exact_settings()]
        assert torch.get_deterministic_debug_mode() == 1
        raise UsageError("stop")
    assert (settings(), torch.get_deterministic_debug_mode()) == (before, mode)


def test_numbers_go_to_a_gpu_from_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.tolist())
        return tensor

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking == (device.type == "cuda")
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    for name in ("cpu", "cuda"):
        found = devices.to_device([1, 2], torch.device(name), torch.float64)
        assert found.dtype == torch.float64
    assert pinned == [[1.0, 2.0]]


def test_drawing_a_model_leaves_the_generators_of_devices_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch.cuda, "manual_seed_all", lambda seed: pytest.fail("CUDA's generators were seeded")
    )
    flat = build("mlp", (4,), 3, Randomness(0))
    assert flat.redrawn(Randomness(0), "again").shape == (flat.dimension,)

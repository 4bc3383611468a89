"""Adapters: of a module with frozen parameters, only the trainable ones travel, under every
protection, and all clients share one copy of the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import two_clusters
from safetensors.torch import load_file
from torch import nn

from securecluster import CFL, Federation, at
from securecluster.core.randomness import Randomness
from securecluster.messaging.parties import SERVER
from securecluster.models.validation import build, prepare_module
from securecluster.protocols import IFCA, ClusteringProtocol, FedAvg, Settings
from securecluster.training import local_trainer
from securecluster.training.local_trainer import LocalTrainer

RANK = 4
INPUTS, HIDDEN, CLASSES = 64, 48, 10
TRAINED = RANK * (INPUTS + HIDDEN) + HIDDEN * CLASSES + CLASSES
DOUBLE = Settings(dtype="float64", transcript="full")


class Adapted(nn.Module):
    """A frozen dense layer with an adapter of low rank, after LoRA."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + self.up(self.down(x))
        return out


def adapted() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [Adapted(nn.Linear(INPUTS, HIDDEN)), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)]
        return nn.Sequential(nn.Flatten(), *layers)


@pytest.fixture(scope="module")
def swapped() -> Federation:
    return two_clusters(8, 80)


def fitted(
    swapped: Federation, kind: type[ClusteringProtocol] = FedAvg, **params: Any
) -> ClusteringProtocol:
    made = kind(model=adapted(), **{"rounds": 3, "mask": "none", **params})
    return made.fit(swapped.select([at(k) for k in range(6)]), DOUBLE)


@pytest.fixture(scope="module")
def plain(swapped: Federation) -> ClusteringProtocol:
    return fitted(swapped)


def trained_of(run: ClusteringProtocol, position: int = 0) -> torch.Tensor:
    """Return the trainable parameters of a client, after a check that the frozen ones are kept."""
    state = run.model_of(at(position))
    for name, start in adapted().state_dict().items():
        if ".layer." in name:
            torch.testing.assert_close(state[name].float(), start, rtol=0, atol=0)
    trained = [value for name, value in state.items() if ".layer." not in name]
    return torch.cat([value.flatten() for value in trained])


def test_clients_send_and_receive_the_trainable_numbers_alone(plain: ClusteringProtocol) -> None:
    assert plain.network_.dimension == TRAINED == len(trained_of(plain))
    replies = [
        seen.content for seen in plain.transcript_.seen_by(SERVER) if seen.receiver == SERVER
    ]
    widths = {reply.delta.values.shape[1] for reply in replies if hasattr(reply, "delta")}
    assert widths == {TRAINED}
    # six clients, three rounds, eight bytes a number, and some headers
    exact = 6 * 3 * TRAINED * 8
    assert exact <= plain.bytes_["up"] < 1.1 * exact


@pytest.mark.parametrize(
    ("params", "tolerance"),
    [
        ({"mask": "permutation"}, 1e-9),
        ({"mask": "rotation"}, 1e-9),
        ({"aggregation": "secagg"}, 1e-3),
    ],
)
def test_masks_and_secure_sums_change_nothing(
    params: dict[str, Any], tolerance: float, swapped: Federation, plain: ClusteringProtocol
) -> None:
    protected = fitted(swapped, **params)
    torch.testing.assert_close(
        trained_of(protected), trained_of(plain), rtol=tolerance, atol=tolerance
    )
    # a sum sends words of eight bytes, a mask at most what fills a power of two
    assert protected.bytes_["up"] < 6 * 3 * 8 * 2 * TRAINED


@pytest.mark.parametrize("unit", ["client", "example"])
def test_noise_covers_the_trainable_numbers_alone(unit: str, swapped: Federation) -> None:
    quiet = fitted(swapped, rounds=1, clip=0.01, noise=1e-9, dp_unit=unit)
    start = torch.cat([p.detach().flatten() for p in adapted().parameters() if p.requires_grad])
    moved = trained_of(quiet) - start
    if unit == "client":  # a mean of updates of norm 0.01 at most
        assert 0 < float(moved.norm()) <= 0.01 + 1e-6
    noisy = fitted(swapped, rounds=1, clip=0.01, noise=1.0, dp_unit=unit)
    assert float((trained_of(noisy) - start).norm()) > float(moved.norm())
    assert 0 < noisy.ledger_.epsilon < np.inf


def test_clusters_and_newcomers_are_found_by_adapters(swapped: Federation, tmp_path: Path) -> None:
    run = fitted(swapped, IFCA, k=2, rounds=12, starts=4, start_rounds=1, mask="permutation")
    truth = np.array(swapped.truth)
    assert run.agreement_["ari"] == 1
    labels = run.join(swapped.select([at(6), at(7)]))
    of_truth = {int(t): int(c) for t, c in zip(truth, run.labels_, strict=False)}
    assert labels.tolist() == [of_truth[int(t)] for t in truth[6:]]
    run.export(tmp_path / "adapters")
    sizes = [sum(t.numel() for t in load_file(file).values()) for file in tmp_path.rglob("clu*.s*")]
    assert sizes == [TRAINED, TRAINED]
    frozen = load_file(tmp_path / "adapters" / "frozen.safetensors")
    assert sum(tensor.numel() for tensor in frozen.values()) == HIDDEN * (INPUTS + 1)


def test_all_threads_and_clients_share_one_copy_of_the_frozen_part(
    swapped: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacked: list[list[bool]] = []

    class Watched(Adapted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tensors = self.layer.weight, self.up.weight
            stacked.append([torch._C._functorch.is_batchedtensor(t) for t in tensors])
            return super().forward(x)

    module = nn.Sequential(nn.Flatten(), Watched(nn.Linear(INPUTS, CLASSES)))
    model = prepare_module(module, (1, 8, 8), CLASSES)
    assert model.together
    # the trainable factors of clients are stacked, the frozen weight is not
    assert [False, True] in stacked and all(not frozen for frozen, _ in stacked)
    cpu = torch.device("cpu")
    trainer = LocalTrainer(swapped, model, Randomness(0), cpu)
    workers = trainer._for_threads(3)
    weights = [worker.model.module[1].layer.weight for worker in workers]
    assert len({w.data_ptr() for w in [*weights, trainer.model.module[1].layer.weight]}) == 1
    trainable = {worker.model.module[1].up.weight.data_ptr() for worker in workers}
    assert len(trainable) == 3
    # one row of trainable numbers a client
    assert trainer.start.shape == (RANK * (INPUTS + CLASSES),)
    # activations are of all layers, so frozen ones count for how many clients train together
    whole = sum(parameter.numel() for parameter in module.parameters())
    monkeypatch.setattr(local_trainer, "CPU_CHUNK", 3 * whole)
    trainer = LocalTrainer(swapped, model, Randomness(0), cpu)
    assert trainer.models_in_chunk() == 3


@pytest.mark.parametrize(
    ("free", "kept", "most"),
    [(1 << 40, 0, local_trainer.GPU_CHUNK), (3 << 30, 0, 1 << 26), (3 << 30, 1 << 30, 1 << 27)],
)
def test_as_many_models_train_together_as_a_gpu_has_free_memory_for(
    free: int, kept: int, most: int, swapped: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stub in the place of CUDA."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 41))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: kept + 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    model = build("linear", (1, 8, 8), 10, Randomness(0))
    trainer = LocalTrainer(swapped, model, Randomness(0), torch.device("cpu"))
    trainer.device = torch.device("cuda", 0)
    assert trainer.models_in_chunk() == most // 650
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 1))
    assert trainer.models_in_chunk() == most // 650  # as at first


def test_a_model_of_peft_is_taken_as_it_is(swapped: Federation, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    body = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    config = peft.LoraConfig(
        r=RANK, target_modules=["1"], modules_to_save=["3"], lora_dropout=0.1, bias="none"
    )
    model = peft.get_peft_model(body, config)
    run = CFL(model=model, rounds=2).fit(swapped, DOUBLE)
    assert run.network_.dimension == TRAINED and run.network_.together
    module = run.module_of(at(0))
    assert type(module) is type(model)
    x, y = swapped.shards[0].x_test, swapped.shards[0].y_test
    assert run.score(at(0), x, y) == pytest.approx(run.accuracy_[0])
    run.export(tmp_path)
    assert sum(t.numel() for t in load_file(tmp_path / "cluster0.safetensors").values()) == TRAINED

"""Layers that stay with each client: what clients learn, send, keep and show.

The oracle is FedAvg with personal heads by torch alone.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from torch import nn

from securecluster import Federation, at
from securecluster.core.randomness import Randomness
from securecluster.errors import PolicyError, UsageError
from securecluster.models import validation
from securecluster.models.foreign import ForeignModel
from securecluster.parties.endpoints import build_client
from securecluster.protocols import IFCA, FedAvg, Settings
from securecluster.protocols.conformance.runs import check_nodes

EXACT = Settings(dtype="float64", transcript="full")
HEAD: dict[str, Any] = {
    "rounds": 3, "epochs": 2, "batch_size": 1000, "lr": 0.1, "model": "mlp-32",
    "local_layers": ("3",),
}  # fmt: skip
SHARED = 64 * 32 + 32  # numbers of mlp-32 below its head, on digits
WHOLE = SHARED + 32 * 10 + 10


def initial(fed: Federation) -> nn.Module:
    model = validation.build("mlp-32", fed.shape, fed.classes, Randomness(fed.seed))
    module = copy.deepcopy(model.module).double()
    nn.utils.vector_to_parameters(model.initial().double(), module.parameters())
    return module


def personal_heads(fed: Federation, rounds: int, momentum: float = 0.0) -> list[nn.Module]:
    """Return each client's network after FedAvg of all layers but the last one."""
    networks = [initial(fed) for _ in fed.shards]
    total = sum(len(shard.y) for shard in fed.shards)
    for _ in range(rounds):
        for network, shard in zip(networks, fed.shards, strict=True):
            optimizer = torch.optim.SGD(network.parameters(), HEAD["lr"], momentum)
            x, y = torch.as_tensor(shard.x).double(), torch.as_tensor(shard.y)
            for _ in range(HEAD["epochs"]):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(x), y).backward()
                optimizer.step()
        states = [network.state_dict() for network in networks]
        for name in ("1.weight", "1.bias"):
            parts = [
                state[name] * len(shard.y) / total
                for state, shard in zip(states, fed.shards, strict=True)
            ]
            for state in states:
                state[name].copy_(torch.stack(parts).sum(0))
    return networks


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_heads_are_each_clients_own(small: Federation, momentum: float, tmp_path: Path) -> None:
    found = FedAvg(**HEAD, momentum=momentum).fit(small, EXACT)
    for k, network in enumerate(personal_heads(small, 3, momentum)):
        own = found.model_of(at(k))
        for name, value in network.state_dict().items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=1e-10)
    # frames have room for the shared layers alone
    sizes = [size for entry in found.transcript_.entries for size in (*entry.up, *entry.down)]
    assert 8 * SHARED < max(sizes) < 8 * WHOLE
    # what is told of the cluster has the head that it began with
    shared, first = found.models_[0], initial(small).state_dict()
    assert torch.equal(shared["3.weight"], first["3.weight"])
    assert torch.equal(shared["1.weight"], found.model_of(at(0))["1.weight"])
    found.save(tmp_path / "saved")
    again = FedAvg.load(tmp_path / "saved")
    assert torch.equal(again.client_models_.values, found.client_models_.values)
    assert torch.equal(again.models_[0]["3.weight"], first["3.weight"])


def test_an_export_has_heads_of_those_clients_alone(small: Federation, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    found = FedAvg(**HEAD).fit(small, EXACT)
    found.export(tmp_path / "out", clients=[at(1)])
    heads = [found.model_of(at(k))["3.weight"] for k in range(len(small))]
    written = [load_file(path) for path in (tmp_path / "out").glob("*.safetensors")]
    of_files = [tensors["3.weight"] for tensors in written if "3.weight" in tensors]
    for k, head in enumerate(heads):
        assert any(torch.equal(head, other) for other in of_files) == (k == 1)


@pytest.mark.few(4)
@pytest.mark.parametrize("protocol", cases.EVERY_PROTOCOL, ids=lambda protocol: protocol.__name__)
def test_each_protocol_sends_shared_layers_alone_or_refuses_by_name(
    protocol: Any, small: Federation
) -> None:
    made = protocol(**{**HEAD, "batch_size": 10, **cases.SMALL[protocol], "model": "mlp-32"})
    if not protocol.client.one_model:
        with pytest.raises(UsageError, match=f"clients of {protocol.name} .*leave local_layers"):
            made.fit(small, EXACT)
        return
    found = made.fit(small, EXACT)
    config = found.kept_.learned.config
    assert config["dimension"] == SHARED and found.client_models_.table.shape[1] == WHOLE
    heads = {found.model_of(at(k))["3.weight"].numpy().tobytes() for k in range(len(small))}
    assert len(heads) == len(small)


def test_nodes_keep_their_layers(small: Federation) -> None:
    check_nodes(lambda **more: FedAvg(**{**HEAD, **more}), small)


def test_a_repeated_request_gets_the_same_update_and_a_late_one_none(small: Federation) -> None:
    client = build_client(FedAvg(**HEAD), small, EXACT).client
    trainer, everyone = client.cohort, range(len(small))
    first = trainer.train(client.models, everyone, client.training, 1)
    assert first.shape[1] == SHARED
    again = trainer.train(client.models, everyone, client.training, 1)
    assert torch.equal(first, again)
    second = trainer.train(client.models, everyone, client.training, 2)
    assert not torch.equal(first, second)
    # what a resumed client remembers
    other = build_client(FedAvg(**HEAD), small, EXACT).client
    other.cohort.recall(trainer.memory())
    assert torch.equal(other.cohort.train(client.models, everyone, client.training, 2), second)
    with pytest.raises(PolicyError, match="local layers"):
        trainer.train(client.models, everyone, client.training, 1)


def test_newcomers_begin_with_the_first_layers(small: Federation) -> None:
    run, newcomer = small.select([at(k) for k in range(1, len(small))]), small.select([at(0)])
    found = FedAvg(**HEAD).fit(run, EXACT)
    found.join(newcomer)
    state = found.model_of(newcomer.names[0])
    assert torch.equal(state["3.weight"], initial(small).state_dict()["3.weight"])
    assert torch.equal(state["1.weight"], found.models_[0]["1.weight"])


def test_layers_that_normalise_have_one_name(small: Federation) -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )
    found = FedAvg(rounds=1, model=module, local_layers=("norm",), lr=0.1).fit(small, EXACT)
    assert found.network_.local == ("1.weight", "1.bias")
    own = [found.model_of(at(k)) for k in range(2)]
    assert torch.equal(own[0]["0.weight"], own[1]["0.weight"])
    assert not torch.equal(own[0]["1.weight"], own[1]["1.weight"])


@pytest.mark.parametrize(
    ("protocol", "options", "words"),
    [
        (FedAvg, {"local_layers": ("head",)}, "'head'.*3.weight"),
        (FedAvg, {"local_layers": ("1", "3")}, "nothing is shared"),
        (FedAvg, {"local_layers": ("norm",)}, "'norm'"),
        (FedAvg, {"dp_unit": "example", "clip": 1.0}, "dp_unit client"),
        (IFCA, {"k": 2}, "clients of ifca"),
    ],
)
def test_layers_that_cannot_stay_are_refused(
    protocol: Any, options: Any, words: str, small: Federation
) -> None:
    with pytest.raises(UsageError, match=words):
        protocol(**{**HEAD, **options}).fit(small)


def test_functions_of_users_have_no_layers(small: Federation) -> None:
    foreign = ForeignModel([np.zeros((64, 10))], train=lambda theta, x, y, call: theta)
    with pytest.raises(UsageError, match="local_layers"):
        FedAvg(**{**HEAD, "model": foreign}).fit(small)


@pytest.mark.parametrize("private", [False, True])
def test_frozen_batch_norm_is_that_of_torch_in_evaluation_mode(
    small: Federation, private: bool
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )
    module(torch.as_tensor(small.shards[0].x))  # it has seen some data
    with pytest.raises(UsageError, match="eval"):
        FedAvg(rounds=1, model=module).fit(small, EXACT)
    module[1].eval()
    options = {**HEAD, "rounds": 1, "model": module, "local_layers": None if private else ("norm",)}
    if private:
        options |= {"clip": 1e9, "dp_unit": "example"}
    found = FedAvg(**options).fit(small.select([at(0), at(1)]), EXACT)
    trained = []
    for shard in small.shards[:2]:
        own = copy.deepcopy(module).double()
        optimizer = torch.optim.SGD(own.parameters(), HEAD["lr"])
        for _ in range(HEAD["epochs"]):
            optimizer.zero_grad()
            x, y = torch.as_tensor(shard.x).double(), torch.as_tensor(shard.y)
            nn.functional.cross_entropy(own(x), y).backward()
            optimizer.step()
        trained.append(own.state_dict())
    for k in range(2):
        state = found.model_of(at(k))
        assert torch.equal(state["1.running_mean"], module[1].running_mean.double())
        mean = (trained[0]["0.weight"] + trained[1]["0.weight"]) / 2
        torch.testing.assert_close(state["0.weight"], mean, rtol=0, atol=1e-9)
        expected = (trained[0]["1.weight"] + trained[1]["1.weight"]) / 2
        if not private:
            expected = trained[k]["1.weight"]
        torch.testing.assert_close(state["1.weight"], expected, rtol=0, atol=1e-9)

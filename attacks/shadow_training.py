"""Local training as clients do it, on data that the adversary has."""

from __future__ import annotations

from collections.abc import Sequence

from securecluster.attacks.base import Knowledge
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.data import Federation
from securecluster.data.federation import Shard
from securecluster.messaging.messages import Rows
from securecluster.training.local_trainer import LocalTrainer, LocalTraining


def local_updates(
    knowledge: Knowledge, shards: Sequence[Shard], numbers: Sequence[int], step: int
) -> torch.Tensor:
    """Return the updates of local training from θ_0, (n, d), of all shards in one batch.

    A run's client has the same batches and dropout: they follow from the seed, the client's number
    and the call.

    Args:
        knowledge: of the network and of the hyper-parameters.
        shards: data to train on, (n,).
        numbers: of the clients, (n,).
        step: number of the call.
    """
    config = knowledge.config
    federation = Federation(
        names=tuple(f"shadow {k}" for k in range(len(shards))),
        shards=tuple(shards),
        classes=int(config["classes"]),
        seed=int(config["seed"]),
        objective=knowledge.network.objective,
    )
    trainer = LocalTrainer(
        federation,
        knowledge.network,
        Randomness(federation.seed),
        torch.device("cpu"),
        knowledge.initial.dtype,
        numbers=numbers,
    )
    plan = LocalTraining(
        config["lr"],
        config["epochs"],
        config["batch_size"],
        config["optimizer"],
        config["momentum"],
    )
    count = len(shards)
    start = Rows(knowledge.initial[None].cpu(), (0,) * count)
    return trainer.train(start, range(count), plan, step)

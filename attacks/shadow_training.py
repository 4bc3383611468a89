"""Local training as clients do it, on data that the adversary has.

Shadow models are trained as clients are, bit for bit on the same data, and clipped and noised as
updates are.
"""

from __future__ import annotations

from collections.abc import Sequence

from securecluster.attacks.base import Knowledge
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.data import Federation
from securecluster.data.federation import Shard
from securecluster.messaging.messages import Rows
from securecluster.training.foreign_trainer import trainer_of
from securecluster.training.local_trainer import LocalTrainer, LocalTraining


def local_updates(
    knowledge: Knowledge, shards: Sequence[Shard], numbers: Sequence[int], step: int
) -> torch.Tensor:
    """Return the updates of local training from θ_0, (n, d), of all shards in one batch.

    A run's client has the same batches and dropout: they follow from the seed, the client's name
    and the call.

    Args:
        knowledge: of the network and of the hyper-parameters.
        shards: data to train on, (n,).
        numbers: of the clients, (n,).
        step: number of the call.
    """
    count = len(shards)
    start = Rows(knowledge.initial[None].cpu(), (0,) * count)
    trainer = _trainer(knowledge, shards, numbers)
    return trainer.train(start, range(count), _plan(knowledge), step)


def locally_trained(
    knowledge: Knowledge,
    shards: Sequence[Shard],
    numbers: Sequence[int],
    steps: Sequence[int],
    initial: torch.Tensor,
) -> torch.Tensor:
    """Return how far local trainings in a row move a model, (n, d), of all shards in one batch.

    Args:
        knowledge: of the network and of the hyper-parameters.
        shards: data to train on, (n,).
        numbers: of the clients, (n,).
        steps: numbers of the calls in which they train, in order.
        initial: the model that they start from, (d,).
    """
    count = len(shards)
    trainer = _trainer(knowledge, shards, numbers)
    updates = torch.zeros(count, knowledge.dimension, dtype=initial.dtype)
    # each call draws other batches, as it did at the client
    for step in steps:
        models = Rows(initial.cpu() + updates, tuple(range(count)))
        updates += trainer.train(models, range(count), _plan(knowledge), step)
    return updates


def _trainer(knowledge: Knowledge, shards: Sequence[Shard], numbers: Sequence[int]) -> LocalTrainer:
    """Return the local training of some data."""
    config = knowledge.config
    federation = Federation(
        # names and not positions seed the batches, so that a colluder's training is its own
        names=tuple(map(knowledge.name_of, numbers)),
        shards=tuple(shards),
        classes=int(config["classes"]),
        seed=int(config["seed"]),
        objective=knowledge.network.objective,
    )
    return trainer_of(knowledge.network)(
        federation,
        knowledge.network,
        Randomness(federation.seed),
        torch.device("cpu"),
        knowledge.initial.dtype,
        numbers=numbers,
    )


def _plan(knowledge: Knowledge) -> LocalTraining:
    """Return the hyper-parameters of local training."""
    config = knowledge.config
    return LocalTraining(
        config["lr"],
        config["epochs"],
        config["batch_size"],
        config["optimizer"],
        config["momentum"],
    )

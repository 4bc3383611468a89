"""Local training by users' own functions, in any framework."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.core.progress import told_while_running
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.messaging.messages import Rows
from securecluster.training.config import FULL_GRADIENT, LocalTraining
from securecluster.training.local_trainer import FloatArray, IntArray, LocalTrainer, LossTerm

if TYPE_CHECKING:
    from securecluster.models.foreign import ForeignModel
    from securecluster.models.validation import FlatModel


class TrainingCall:
    """Request of a protocol for one client's training.

    Args:
        client: number of the client.
        name: of the client.
        plan: hyper-parameters.
        size: number of the client's samples.
        generator: see below.
        batches: returns the rows of each mini-batch in order.

    Attributes:
        client: number of the client, which depends on the other clients of the run.
        name: of the client, which does not.
        epochs: passes over the client's samples.
        batch_size: samples of a mini-batch.
        optimizer: "sgd" or "adam".
        momentum: of sgd.
        generator: random numbers that follow from the run's seed, the client's name and the call,
            so that a resumed run repeats them. The seed is public: noise that protects samples must
            come from a secret of your own.
    """

    def __init__(
        self,
        client: int,
        name: str,
        plan: LocalTraining,
        size: int,
        generator: np.random.Generator,
        batches: Callable[[], Iterator[IntArray]],
    ) -> None:
        self.client = client
        self.name = name
        self.epochs = plan.epochs
        self.batch_size = min(plan.batch_size, size)
        self.optimizer = plan.optimizer
        self.momentum = plan.momentum
        self.generator = generator
        self._lr = plan.lr
        self._batches = batches
        self._used: set[str] = set()

    @property
    def lr(self) -> float:
        """Return the learning rate."""
        self._used.add("lr")
        return self._lr

    def batches(self) -> Iterator[IntArray]:
        """Yield the rows of each mini-batch in order, as the package's own networks take them.

        Each epoch is a new permutation; its last mini-batch may be smaller.
        """
        self._used.add("batches")
        return self._batches()

    @property
    def followed(self) -> bool:
        """Return whether the function has read the rate and the batches."""
        return self._used == {"lr", "batches"}


class ForeignTrainer(LocalTrainer):
    """Trainer of a `ForeignModel`: it differs in training, and in scores that nobody can measure.

    Whoever runs the client is told, here and nowhere else, of a function that takes long, and of
    values that count as zeros: to the server they may tell of data.

    The arguments are those of `LocalTrainer`.
    """

    @property
    def _foreign(self) -> ForeignModel:
        model: Any = self.model.module
        foreign: ForeignModel = model
        return foreign

    @property
    def measures(self) -> bool:
        """Return whether models have outputs, without which nothing is scored."""
        return self._foreign.functions.outputs is not None

    def train(  # noqa: PLR0913 (that of `LocalTrainer`)
        self,
        start: Rows,
        clients: Sequence[int],
        plan: LocalTraining,
        step: int,
        row_width: int = 0,
        scale: Sequence[float] | None = None,
        regularizer: LossTerm | None = None,
        apart: bool = False,
    ) -> torch.Tensor:
        """Return the clients' updates by the user's function, one client after the other.

        The arguments and the result are those of `LocalTrainer.train`.

        Raises:
            UsageError: a term is added to the loss, of which the function does not know; or the
                function fails, or does not return the model's arrays.
        """
        if regularizer is not None:
            raise UsageError(
                "this method adds a term to the clients' loss, and a ForeignModel's train has a "
                "loss of its own: set the term's strength to 0, or give a torch module as model"
            )
        d = self.model.dimension
        plan = plan.at(self.access.round)
        with self.permitted(plan, clients, step):
            out = self.start.new_zeros(len(clients), max(row_width, d))
            for n, client in enumerate(clients):
                theta = start.row(n)
                update = out[n, :d]
                torch.sub(self._trained(theta, client, plan, step), theta, out=update)
                if scale is not None:
                    update *= scale[n]
        return out

    def _trained(
        self, theta: torch.Tensor, client: int, plan: LocalTraining, step: int
    ) -> torch.Tensor:
        """Return a client's model after its training, (d,).

        Args:
            theta: the model before, (d,).
            client: position of the client.
            plan: hyper-parameters.
            step: number of the call.
        """
        number = self.ids[client]
        generator = self._randomness.generator("client", self._streams[client], "foreign", step)
        batches = partial(self._own_batches, client, plan, step)
        name, size = self.names[client], self._sizes[client]
        call = TrainingCall(number, name, plan, size, generator, batches)
        rows = slice(int(self._offsets[client]), int(self._offsets[client + 1]))
        # copies: a function may work in place
        x = np.array(self._x[rows].cpu().numpy())
        y = np.array(self._y[rows].cpu().numpy())
        foreign = self._foreign
        client_label = f"client {number}" if name == str(number) else f"client {number} ({name!r})"
        try:
            with told_while_running(f"{client_label}: the function train of its ForeignModel"):
                result = foreign.functions.call("train", foreign.split(theta), x, y, call)
            trained = foreign.joined(result)
        except UsageError as error:
            raise UsageError(f"client {number}: {error}") from error
        if self.tells_of_zeros and not bool(trained.isfinite().all()):
            warnings.warn(
                f"{client_label}: train returned values that are not finite, which count as zeros "
                "in a run with noise, so that nothing is learned of its data: lower its learning "
                "rate, or look for the cause in train",
                SecureClusterWarning,
                stacklevel=2,
            )
        if plan.batch_size == FULL_GRADIENT.batch_size and not call.followed:
            raise UsageError(
                "this protocol compares gradients, and asks for one step of a rate it chooses over "
                "all samples: let train follow call.lr and call.batches(), or take another protocol"
            )
        return trained.to(theta)

    def _own_batches(self, client: int, plan: LocalTraining, step: int) -> Iterator[IntArray]:
        """Yield a client's mini-batches, as rows among its own samples."""
        for rows in self.batches(client, plan, step):
            yield rows - self._offsets[client]

    def scores(self, models: Rows) -> FloatArray:
        """Return the objective's metric on each client's test data, (m,); NaN without outputs.

        Args:
            models: one model per client.
        """
        if not self.measures:
            return np.full(len(self.ids), np.nan)
        return super().scores(models)


def trainer_of(model: FlatModel) -> type[LocalTrainer]:
    """Return the class that trains a model.

    Args:
        model: a torch network, or a `ForeignModel`.
    """
    from securecluster.models.foreign import ForeignModel

    return ForeignTrainer if isinstance(model.module, ForeignModel) else LocalTrainer


def check_foreign(model: Any, plan: LocalTraining) -> None:
    """Raise UsageError for training that a user's own function does not do.

    Args:
        model: of a protocol: a name, or an object of the user's.
        plan: hyper-parameters.
    """
    if isinstance(model, str):
        return
    from securecluster.models.foreign import ForeignModel

    if not isinstance(model, ForeignModel):
        return
    if plan.private:
        raise UsageError(
            "dp_unit example clips the gradient of each sample, which a ForeignModel's train does "
            "not show: take dp_unit client, whose noise is added to clipped updates, or let train "
            "add noise and say what your accountant finds, ForeignModel(example_privacy=...)"
        )
    added = ("class_weight", "weight_decay", "proximal", "ditto", "keep_local")
    given = [name for name in added if getattr(plan, name)]
    if "keep_local" in given:
        raise UsageError(
            "a ForeignModel has no layers that are known by name: leave local_layers out"
        )
    if given:
        raise UsageError(
            f"{given[0]} changes the loss of local training, and a ForeignModel's train has a loss "
            "of its own: leave it out, and let train add it"
        )
    if plan.keep_momentum:
        raise UsageError(
            "keep_momentum keeps a buffer of torch's sgd, which a ForeignModel's train does not "
            "have: leave it out"
        )

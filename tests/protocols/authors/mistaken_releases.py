"""Mistakes by which a reply tells more than its price says, with a finite ε and no error.

Each class deviates in one point from FlexCFL as it should be: in what it computes of released
numbers, in the scale of its noise, or in what steers a training with noise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from flexcfl import FirstUpdate, FirstUpdateClient, FlexCFL
from mistaken import units

from securecluster.errors import PolicyError
from securecluster.protocols.authoring import (
    GATHER,
    Ack,
    CallContext,
    ClientTensor,
    ClusterOnceState,
    Empty,
    Real,
    Rows,
    Run,
    ServerChannel,
    answers,
)
from securecluster.training.local_trainer import MeanRegularizer


class Telling(FirstUpdateClient):
    """Clients that release numbers in a method of their own, `told`."""

    kept = ClientTensor()

    @answers(GATHER, private=False)
    def look(self, context: CallContext, query: Empty) -> Ack:
        """Keep the share of samples of the first class."""
        for k in context.positions:
            self.kept[k] = float((self.cohort.labels(k) == 0).double().mean())
        return Ack()

    @answers(GATHER, unmasked=("update",), trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        return FirstUpdate(Rows(self.told(context)))

    def told(self, context: CallContext) -> torch.Tensor:
        """Return what leaves the clients."""
        raise NotImplementedError

    def means(self, context: CallContext) -> torch.Tensor:
        """Return the mean of each client's samples, at most of norm 1."""
        rows = [self.cohort.inputs(k).flatten(1).mean(0) for k in context.positions]
        return units(torch.stack(rows))

    def firsts(self, context: CallContext) -> torch.Tensor:
        """Return how many samples of the first class each client has, (b, 1)."""
        return torch.stack([(self.cohort.labels(k) == 0).sum() for k in context.positions])[:, None]

    def trained_by(self, context: CallContext, **options: Any) -> torch.Tensor:
        """Return the updates of one training from θ_0, each client's with options of its own."""
        rows = []
        for n, k in enumerate(context.positions):
            own = {name: of_client(n, k) for name, of_client in options.items()}
            start = own.pop("start", self.cohort.start)
            plan = own.pop("plan", self.training)
            rows.append(self.cohort.train(Rows(start[None]), [k], plan, context.step, **own)[0])
        return torch.stack(rows)


class Samples(Telling):
    """Clients that tell something of their samples without training."""

    @answers(GATHER, unmasked=("update",))
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        return FirstUpdate(Rows(self.told(context)))


class Base(FlexCFL):
    """Asks clients to look at their data first."""

    def run_server(self, net: ServerChannel, run: Run) -> ClusterOnceState:
        look: Any = type(self).client.look  # type: ignore[attr-defined]
        net.gather(look, Empty(), to=net.clients)
        return super().run_server(net, run)


class OfSamples(Base):
    """Clusters by numbers as wide as a sample."""

    def signature_width(self, facts: Any) -> int:
        return int(np.prod(facts.x.shape))


class OfClasses(Base):
    """Clusters by a number for each class."""

    def signature_width(self, facts: Any) -> int:
        return int(facts.classes)


class Told(OfSamples):
    """Asks for a message more, `tell`."""

    def run_server(self, net: ServerChannel, run: Run) -> ClusterOnceState:
        tell: Any = type(self).client.tell  # type: ignore[attr-defined]
        net.gather(tell, Empty(), to=net.clients)
        return super().run_server(net, run)


@dataclass(frozen=True, eq=False)
class Note:
    """Client to server: numbers that may be missing."""

    note: Annotated[Rows | None, Real(("width",))]


@dataclass(frozen=True, eq=False)
class Size:
    """Client to server: a number of samples."""

    size: Annotated[Rows, Real()]


def mistake(client: Any, base: type = Base) -> Any:
    """Return the protocol of a client's class, with its sentence."""
    parts = {
        "__doc__": client.__doc__,
        "__module__": __name__,
        "__annotations__": {"client": "ClassVar[Any]", "signature_method": "ClassVar[Any]"},
        "client": client,
        "signature_method": client.pretrain,
    }
    return type(client.__name__.removesuffix("Client"), (base,), parts)


# What is computed of released numbers


class NormBackClient(Telling):
    """Releases a direction, and gives it its exact length again."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows = self.first_updates(context)
        lengths = rows.norm(dim=1, keepdim=True)
        return context.postprocess(lambda told: told * lengths, context.release(units(rows)))


class TopClient(Telling):
    """Keeps the released coordinates that are largest without noise."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows = self.first_updates(context)
        largest = rows.abs().topk(20, dim=1).indices
        keep = partial(torch.Tensor.gather, dim=1, index=largest)
        wide = context.postprocess(keep, context.release(rows))
        pad = partial(torch.nn.functional.pad, pad=(0, rows.shape[1] - 20))
        return context.postprocess(pad, wide)


class WeightedClient(Telling):
    """Weights a released row by a number of samples that is private."""

    def told(self, context: CallContext) -> torch.Tensor:
        sizes = torch.tensor([float(self.cohort.sizes[k]) for k in context.positions])

        def weighted(told: torch.Tensor, by: torch.Tensor = sizes) -> torch.Tensor:
            return told * by[:, None]

        return context.postprocess(weighted, context.release(self.first_updates(context)))


class CountsInsideClient(Telling):
    """Weights a released row by private numbers that it reads in post-processing."""

    def told(self, context: CallContext) -> torch.Tensor:
        return context.postprocess(
            lambda told: told * torch.tensor([[self.cohort.sizes[k]] for k in context.positions]),
            context.release(self.first_updates(context)),
        )


class BoundMethodClient(Telling):
    """Post-processes by a method that uses what its client kept."""

    def told(self, context: CallContext) -> torch.Tensor:
        self.now = context.positions
        released = context.release(self.first_updates(context))
        return context.postprocess(self.doubled, released)

    def doubled(self, told: torch.Tensor) -> torch.Tensor:
        return told * 2 if bool((self.kept[self.now] > 2).all()) else told


class UnseenBranchClient(Telling):
    """Holds exact numbers in a function whose result does not show them with most data."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows = self.first_updates(context)
        released = context.release(rows)
        return context.postprocess(lambda told: told if rows.max() < 1e6 else -told, released)


class ReorderedClient(Telling):
    """Reorders what was released in its own memory, with the same sum."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows = self.first_updates(context)
        released = context.release(rows)
        memory = released.numpy()
        ascending = np.sort(memory, 1)
        np.put_along_axis(memory, rows.argsort(1).numpy(), ascending, 1)
        return released


class OneOfTwoClient(Telling):
    """Sends the one or the other of two releases, by its data."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows = self.first_updates(context)
        both = [context.release(rows), context.release(-rows)]
        return both[int(float(self.kept[context.positions].mean()) > 0.5)]


class SometimesTwiceClient(Telling):
    """Releases twice where its data are of one class."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows = self.first_updates(context)
        if float(self.kept[context.positions].mean()) > 0.5:
            context.release(rows)
        return context.release(rows)


class RefusingClient(Telling):
    """Does not answer with data of one class."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows = self.first_updates(context)
        if float(self.kept[context.positions].mean()) > 0.9:
            raise PolicyError("nothing to tell")
        return context.release(rows)


class HelperClient(Telling):
    """Post-processes with an object that holds exact numbers, which most data do not show."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows = self.first_updates(context)
        helper = SimpleNamespace(lengths=[rows.norm(dim=1)])
        return context.postprocess(
            lambda told: told if bool((helper.lengths[0] < 1e6).all()) else -told,
            context.release(rows),
        )


class MissingClient(Samples):
    """Leaves a message out where a private rule says so."""

    @answers(GATHER, unmasked=("note",))
    def tell(self, context: CallContext, query: Empty) -> Note:
        released = context.release(self.means(context))
        return Note(Rows(released) if int(self.firsts(context).max()) > 30 else None)

    def told(self, context: CallContext) -> torch.Tensor:
        return context.release(self.means(context))


class WhichSizeClient(Samples):
    """Sends the number of the one or the other samples, by a private bit."""

    @answers(GATHER, unmasked=("size",))
    def tell(self, context: CallContext, query: Empty) -> Size:
        many = self.firsts(context).flatten() > 3
        numbers = (self.cohort.validation_sizes, self.cohort.sizes)
        counts = [numbers[int(m)][k] for m, k in zip(many, context.positions, strict=True)]
        return Size(Rows(context.sample_counts(counts, torch.float64)))

    def told(self, context: CallContext) -> torch.Tensor:
        return context.release(self.means(context))


BOARD: dict[int, float] = {}


class BoardClient(Telling):
    """Takes a number of its data from a variable of the module, which an earlier call filled."""

    @answers(GATHER, private=False)
    def look(self, context: CallContext, query: Empty) -> Ack:
        for i, k in zip(context.ids, context.positions, strict=True):
            BOARD[i] = float(self.cohort.inputs(k).mean())
        return Ack()

    def told(self, context: CallContext) -> torch.Tensor:
        released = context.release(self.first_updates(context))
        return context.postprocess(
            lambda told: told * torch.tensor([[BOARD[i]] for i in context.ids]), released
        )


FOLDER = Path(tempfile.gettempdir())


class FileClient(BoardClient):
    """Takes a number of its data from a file, which an earlier call wrote."""

    @answers(GATHER, private=False)
    def look(self, context: CallContext, query: Empty) -> Ack:
        for i, k in zip(context.ids, context.positions, strict=True):
            self.file(i).write_text(repr(float(self.cohort.inputs(k).mean())))
        return Ack()

    def told(self, context: CallContext) -> torch.Tensor:
        released = context.release(self.first_updates(context))
        factors = [[float(self.file(i).read_text())] for i in context.ids]
        return context.postprocess(lambda told: told * torch.tensor(factors), released)

    def file(self, client: int) -> Path:
        return FOLDER / f"securecluster-mistake-{client}"


class FirstsClient(Telling):
    """Keeps the first number of its data in a list of its class."""

    seen: ClassVar[list[float]] = []

    @answers(GATHER, private=False)
    def look(self, context: CallContext, query: Empty) -> Ack:
        self.seen.append(float(self.cohort.inputs(context.positions[0]).mean()))
        return Ack()

    def told(self, context: CallContext) -> torch.Tensor:
        released = context.release(self.first_updates(context))
        return context.postprocess(lambda told: told * self.seen[0], released)


@dataclass(frozen=True)
class Client:
    """A client by its name, which finds its data."""

    name: str
    client: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Client) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


@lru_cache
def brightest(of: Client) -> float:
    cohort = of.client.cohort
    return float(cohort.inputs(cohort.names.index(of.name)).mean())


class CachedClient(Telling):
    """Remembers a number of its data in a function, and scales later releases by it."""

    def told(self, context: CallContext) -> torch.Tensor:
        names = [self.cohort.names[k] for k in context.positions]
        factors = torch.tensor([[brightest(Client(name, self))] for name in names])
        released = context.release(self.first_updates(context))
        return context.postprocess(lambda told: told * factors, released)


class WrongRowClient(Telling):
    """Reads the samples of row n where those of the n-th client of the call are meant."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows = self.first_updates(context)
        counts = [(self.cohort.labels(n) == 0).sum() for n in range(len(context.positions))]
        return context.release(rows * torch.stack(counts)[:, None])


class DictClient(Telling):
    """Keeps what it needs in the next call in a dict, which no checkpoint has."""

    notes: Mapping[int, float] = MappingProxyType({})

    @answers(GATHER, private=False)
    def look(self, context: CallContext, query: Empty) -> Ack:
        self.notes = dict.fromkeys(context.positions, 0.5)
        return Ack()

    def told(self, context: CallContext) -> torch.Tensor:
        rows = self.first_updates(context)
        factors = [self.notes[k] for k in context.positions]
        return context.release(rows * torch.tensor(factors)[:, None].to(rows))


# The scale of the noise


class OwnNormClient(Telling):
    """Scales its noise to the row's own norm."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows = self.first_updates(context)
        return context.release(rows, sensitivity=rows.norm(dim=1).tolist())


class OwnReplaceClient(Telling):
    """States the cost of replacing by its data."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows = self.first_updates(context)
        one_class = float(self.kept[context.positions].mean()) > 0.5
        return context.release(rows, replace=1.5 if one_class else 2.0)


class LabelCountsClient(Samples):
    """Counts labels, and says that one of them moves nothing."""

    reach = 0.01

    def told(self, context: CallContext) -> torch.Tensor:
        width = self.cohort.classes
        rows = [torch.bincount(self.cohort.labels(k), minlength=width) for k in context.positions]
        return context.release(torch.stack(rows).to(self.cohort.start), sensitivity=self.reach)


class BlankedClient(Samples):
    """Adds samples of norm 1 and positive features, with noise for three quarters of that."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows = [
            torch.nn.functional.normalize(self.cohort.inputs(k).flatten(1).abs()).sum(0)
            for k in context.positions
        ]
        return context.release(torch.stack(rows), sensitivity=0.75)


class RangeClient(Samples):
    """Brings features to their private range before it bounds samples."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows, reach = [], []
        for k in context.positions:
            x = self.cohort.inputs(k).flatten(1)
            low = x.min(0).values
            scaled = (x - low) / (x.max(0).values - low + 1e-6)
            rows.append(units(scaled).mean(0))
            reach.append(1 / len(x))
        return context.release(torch.stack(rows), sensitivity=reach)


class MedianClient(Samples):
    """Releases medians as if a sample moved them as it moves means."""

    def told(self, context: CallContext) -> torch.Tensor:
        x = [units(self.cohort.inputs(k).flatten(1)) for k in context.positions]
        rows = torch.stack([one.max(0).values for one in x])
        return context.release(rows, sensitivity=[1 / len(one) for one in x])


class ClassMeanClient(Samples):
    """Releases the mean of one class, with noise by the private number of its samples."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows, reach = [], []
        for k in context.positions:
            x = units(self.cohort.inputs(k).flatten(1))
            own = x[self.cohort.labels(k) == 0]
            rows.append(own.sum(0) / max(1, len(own)))
            reach.append(1 / max(1, len(own)))
        return context.release(torch.stack(rows), sensitivity=reach)


class CentredClient(Samples):
    """Takes its samples' mean from each of them, and says that one moves itself alone."""

    def told(self, context: CallContext) -> torch.Tensor:
        rows, reach = [], []
        for k in context.positions:
            x = torch.nn.functional.normalize(self.cohort.inputs(k).flatten(1))
            rows.append((x - x.mean(0)).abs().mean(0))
            reach.append(1 / len(x))
        return context.release(torch.stack(rows), sensitivity=reach)


# What steers a training with noise


class StandardisedClient(Telling):
    """Standardises its samples in memory before DP-SGD."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        for k in range(len(self.cohort.ids)):
            x = self.values(k)
            x -= x.mean(0)

    def values(self, k: int) -> Any:
        return self.cohort.inputs(k)

    def told(self, context: CallContext) -> torch.Tensor:
        return self.first_updates(context)


class StandardisedArrayClient(StandardisedClient):
    """The same in the memory of an array, which torch does not see."""

    def values(self, k: int) -> Any:
        return self.cohort.inputs(k).numpy()


class Shift(torch.nn.Module):
    """Takes means away."""

    def __init__(self, means: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("means", means)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.means


class NormalisedClient(Telling):
    """Has a layer with means of its samples before the network."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        model = self.cohort.model
        shift = Shift(self.cohort.inputs(0).mean(0))
        self.cohort.model = replace(model, module=torch.nn.Sequential(shift, model.module))

    def told(self, context: CallContext) -> torch.Tensor:
        return self.first_updates(context)


class StartClient(Telling):
    """Starts DP-SGD by what it kept of its data."""

    def told(self, context: CallContext) -> torch.Tensor:
        kept = self.kept[context.positions]
        return self.trained_by(context, start=lambda n, k: self.cohort.start * (1 + kept[n]))


class PlanClient(Telling):
    """Takes the learning rate of DP-SGD from its labels, when it is built."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        clients = range(len(self.cohort.ids))
        self.rates = [0.01 * (1 + int((self.cohort.labels(k) == 0).sum())) for k in clients]

    def told(self, context: CallContext) -> torch.Tensor:
        return self.trained_by(context, plan=lambda n, k: replace(self.training, lr=self.rates[k]))


class ScaleClient(Telling):
    """Scales the update of DP-SGD by what it kept of its data."""

    def told(self, context: CallContext) -> torch.Tensor:
        kept = self.kept[context.positions].tolist()
        return self.trained_by(context, scale=lambda n, k: [1 + kept[n]])


class PullClient(Telling):
    """Pulls DP-SGD by a strength that it kept of its data."""

    def told(self, context: CallContext) -> torch.Tensor:
        kept = self.kept[context.positions].tolist()
        means = Rows(self.cohort.start[None], (0,))
        return self.trained_by(
            context, regularizer=lambda n, k: MeanRegularizer(means, 1 + kept[n])
        )


class LongerClient(Telling):
    """Trains longer by what it kept, which most data do not show."""

    def told(self, context: CallContext) -> torch.Tensor:
        longer = bool((self.kept[context.positions] > 2).any())
        epochs = self.training.epochs + longer
        return self.trained_by(context, plan=lambda n, k: replace(self.training, epochs=epochs))


class SignClient(Telling):
    """Turns the update of DP-SGD around by what it kept of its data."""

    def told(self, context: CallContext) -> torch.Tensor:
        signs = 1 - 2 * (self.kept[context.positions] > 0.5).float()
        return self.first_updates(context) * signs[:, None]


NormBack = mistake(NormBackClient)
Top = mistake(TopClient)
Weighted = mistake(WeightedClient)
CountsInside = mistake(CountsInsideClient)
BoundMethod = mistake(BoundMethodClient)
UnseenBranch = mistake(UnseenBranchClient)
Reordered = mistake(ReorderedClient)
OneOfTwo = mistake(OneOfTwoClient)
SometimesTwice = mistake(SometimesTwiceClient)
Refusing = mistake(RefusingClient)
Board = mistake(BoardClient)
File = mistake(FileClient)
Helper = mistake(HelperClient)
Missing = mistake(MissingClient, Told)
WhichSize = mistake(WhichSizeClient, Told)
Firsts = mistake(FirstsClient)
Cached = mistake(CachedClient)
WrongRow = mistake(WrongRowClient)
Centred = mistake(CentredClient, OfSamples)
Standardised = mistake(StandardisedClient)
StandardisedArray = mistake(StandardisedArrayClient)
Normalised = mistake(NormalisedClient)
Dict = mistake(DictClient)
OwnNorm = mistake(OwnNormClient)
OwnReplace = mistake(OwnReplaceClient)
LabelCounts = mistake(LabelCountsClient, OfClasses)
Blanked = mistake(BlankedClient, OfSamples)
Range = mistake(RangeClient, OfSamples)
Median = mistake(MedianClient, OfSamples)
ClassMean = mistake(ClassMeanClient, OfSamples)
Start = mistake(StartClient)
Plan = mistake(PlanClient)
Scale = mistake(ScaleClient)
Pull = mistake(PullClient)
Longer = mistake(LongerClient)
Sign = mistake(SignClient)

"""Facts of clients' data that are public in a run, from which its configuration follows.

Each client tells those of its own shard (`ClientFacts`), and `agree` makes those of all clients. A
federation has the same facts, so that a run on many machines and one in this process have one
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.data.class_names import ClassNames
from securecluster.data.feature_columns import listed
from securecluster.data.scaling import FOUND, Scaling
from securecluster.errors import UsageError
from securecluster.models.objectives import (
    CLASSIFICATION,
    Classification,
    Objective,
    Regression,
    Trajectory,
    objective,
)

TASK_OF_DATA = "the task was read from the clients' targets"


@dataclass(frozen=True)
class Form:
    """Shape and type of one row of an array.

    Args:
        shape: of a row.
        dtype: name of a NumPy type.
    """

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, rows: NDArray[Any]) -> Form:
        """Return the form of the rows of an array.

        Args:
            rows: (n, …).
        """
        return cls(tuple(rows.shape[1:]), rows.dtype.name)


@dataclass(frozen=True)
class ClientFacts:
    """Facts that one client tells of its data before a run.

    Args:
        x: form of a sample.
        y: form of a target.
        classes: number of outputs that its data need, at least; None where it is known without.
        objective: of training, as JSON has it.
        feature_names: names of the features, if they have any.
        class_names: names of the classes, if they have any.
        scaling: how features are scaled, as JSON has it; None where they are not.
        bright: whether images are so bright that training needs a lower learning rate.
        mean: public mean of the numbers of a sample; None where nobody declared it.
        samples: number of training samples; None where the protocol needs none.
    """

    x: Form
    y: Form
    objective: Mapping[str, Any]
    classes: int | None = None
    feature_names: tuple[str, ...] | None = None
    class_names: ClassNames | None = None
    scaling: Mapping[str, Any] | None = None
    bright: bool = False
    mean: float | None = None
    samples: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON has them."""
        return asdict(self)

    @classmethod
    def read(cls, record: Any) -> ClientFacts:
        """Return the facts that a client told.

        Args:
            record: as `as_json` returned it, from a client that may tell anything.

        Raises:
            UsageError: no facts.
        """
        try:
            names = record["feature_names"]
            scaling = Scaling.read(record["scaling"])
            facts = cls(
                _form(record["x"]),
                _form(record["y"]),
                objective(record["objective"]).as_json(),
                _whole_or_none(record["classes"]),
                None if names is None else tuple(str(name) for name in names),
                _class_names(record["class_names"]),
                None if scaling is None else scaling.as_json(),
                bool(record["bright"]),
                _number_or_none(record["mean"]),
                _whole_or_none(record["samples"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"a client told no facts of its data ({type(error).__name__}): it runs another "
                "version of securecluster, or breaks the protocol"
            ) from None
        return facts


@dataclass(frozen=True)
class Facts:
    """Public facts of the clients of a run and their data.

    Args:
        clients: m.
        x: form of a sample.
        y: form of a target.
        classes: number of outputs: classes, tokens of the vocabulary, coordinates of a position,
            numbers of a regression, or labels; 1 of a binary task.
        seed: of the run.
        objective: of training.
        feature_names: names of the features, or of the one column of images or lists, if any.
        class_names: the labels in the order of the class numbers, if these have names.
        scaling: how features are scaled, as JSON has it; None where they are not.
        bright: whether images are so bright that training needs a lower learning rate.
        mean: public mean of the numbers of a sample; None where nobody declared it.
        samples: number of training samples of each client; None where nobody told it.
        classes_counted: whether classes and their number were read from clients' labels, and not
            given.
    """

    clients: int
    x: Form
    y: Form
    classes: int
    seed: int
    objective: Objective = CLASSIFICATION
    feature_names: tuple[str, ...] | None = None
    class_names: ClassNames | None = None
    scaling: Mapping[str, Any] | None = None
    bright: bool = False
    mean: float | None = None
    samples: tuple[int, ...] | None = None
    classes_counted: bool = False

    def __len__(self) -> int:
        return self.clients

    @property
    def facts(self) -> Facts:
        """Return these facts, as a federation returns its own."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one sample."""
        return self.x.shape

    @property
    def shared(self) -> ClientFacts:
        """Return what every client tells of its data, but for numbers of classes and samples."""
        return ClientFacts(
            x=self.x,
            y=self.y,
            objective=self.objective.as_json(),
            feature_names=self.feature_names,
            class_names=self.class_names,
            scaling=self.scaling,
            bright=self.bright,
            mean=self.mean,
        )

    @property
    def shares_scale(self) -> bool:
        """Return whether the run finds a scale of features that its clients share."""
        return self.scaling is not None and self.scaling["kind"] in FOUND

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of training samples of each client.

        Raises:
            UsageError: nobody told them.
        """
        if self.samples is None:
            raise UsageError(
                "this protocol's configuration follows from each client's number of samples, which "
                "the clients did not tell: ask for facts with samples"
            )
        return self.samples

    def check_classes(self, reads: str, advice: str) -> None:
        """Check that each sample has one of several classes, each with an output.

        Args:
            reads: what a protocol reads of classes.
            advice: what to take in its place for samples without them.

        Raises:
            UsageError: the task is another one.
        """
        kind = self.objective.kind
        if kind == Classification.kind:
            return
        if self.objective.one_label:
            advice = "take the task classification, which has two outputs for two classes"
        raise UsageError(f"{reads}, and the task {kind} has none: {advice}")


def agree(client_facts: Sequence[ClientFacts], seed: int, classes: int | None = None) -> Facts:
    """Return the facts of all clients from what each of them told.

    Args:
        client_facts: of each client, in the order of their numbers.
        seed: of the run.
        classes: number of outputs; None is the largest number that any client's data need.

    Raises:
        UsageError: no client, or clients whose data do not belong together.
    """
    if not client_facts:
        raise UsageError("no client told facts of its data: wait for the nodes")
    first = client_facts[0]
    for number, facts in enumerate(client_facts):
        # these may differ
        alike = replace(facts, classes=first.classes, samples=first.samples)
        if alike != first:
            differing = [name for name, value in vars(first).items() if vars(alike)[name] != value]
            requirement = "samples of one shape, type and objective"
            if differing == ["class_names"]:
                requirement = "the same classes in the same order (classes=[...])"
            raise UsageError(
                f"client {number} has data of another kind than client 0 ({', '.join(differing)}): "
                f"all clients of a run need {requirement}"
            )
    needed = max((facts.classes for facts in client_facts if facts.classes is not None), default=0)
    if classes is None and any(facts.classes is None for facts in client_facts):
        raise UsageError("the number of classes is neither given nor told by all clients: give it")
    if classes is not None and classes < needed:
        raise UsageError(
            f"classes = {classes} is fewer than the {needed} that a client's labels need: give at "
            f"least {needed}"
        )
    samples = [facts.samples for facts in client_facts if facts.samples is not None]
    return Facts(
        clients=len(client_facts),
        x=first.x,
        y=first.y,
        classes=classes or needed,
        seed=seed,
        objective=objective(first.objective),
        feature_names=first.feature_names,
        class_names=first.class_names,
        scaling=first.scaling,
        bright=first.bright,
        mean=first.mean,
        samples=tuple(samples) if len(samples) == len(client_facts) else None,
        # names are given by owners, and told by all (`Federation.facts_of`)
        classes_counted=classes is None
        and first.class_names is None
        and classes_of_labels(objective(first.objective), None),
    )


def classes_of_labels(trained: Objective, names: ClassNames | None) -> bool:
    """Return whether the number of outputs depends on targets, where a user does not give it.

    Args:
        trained: objective of training; those of positions, numbers and several labels are of the
            targets' shape.
        names: of the classes; booleans are two, whichever of them occur.
    """
    if trained.kind == Trajectory.kind or not (trained.sequential or trained.one_label):
        return False
    return names is None or not all(isinstance(name, bool) for name in names)


def check_private_statistics(facts: Facts, unit: str) -> None:
    """Check that no statistic over rows shapes what noise is to protect.

    A mean, a deviation, a list of classes or a vocabulary that is computed from rows makes what
    every row contributes depend on each of them, before any clip: a sensitivity is that of all
    that is computed from a row up to its release. A client's own statistics stay within what the
    client contributes, which the unit client bounds as a whole.

    Args:
        facts: of the clients of a run with noise.
        unit: of privacy, "client" or "example".

    Raises:
        UsageError: a statistic that the noise does not cover.
    """
    standardised = isinstance(facts.objective, Regression) and facts.objective.standardised
    if standardised and unit == "example":
        raise UsageError(
            "each client standardises its targets by the mean and the deviation of all of them, "
            "before the clip, so noise for single examples does not cover it: give their public "
            "bounds (Regression(bounds=[(low, high)]), --bounds), or protect whole clients "
            "(--dp-unit client)"
        )
    if facts.classes_counted and not facts.objective.one_label and not facts.objective.sequential:
        raise UsageError(
            f"{TASK_OF_DATA}, which noise does not protect: say it (--task {facts.objective.kind})"
        )
    if facts.classes_counted:
        listing = f"{facts.classes} of them were found"
        if facts.class_names is not None:
            quoted = [repr(name) for name in facts.class_names]
            listing = f"found were {listed(quoted)}"
        raise UsageError(
            "the classes were read from the clients' labels, which noise does not protect: name "
            f"those that are public where the federation is made, by --classes ({listing})"
        )
    scaling = Scaling.read(facts.scaling)
    if scaling is not None and scaling.counted:
        raise UsageError(
            "categories were read from the clients' rows, which noise does not protect: name those "
            "that are public where the federation is made, in Python prepare={'sex': ['female', "
            "'male']}, or leave these columns out (drop_columns, --drop-columns)"
        )
    if scaling is not None and scaling.of_rows and unit == "example":
        raise UsageError(
            "scaling='client' scales each example by the mean and the deviation of all examples of "
            "its client, before the clip, so noise for single examples does not cover it: give "
            "public bounds (scaling={'age': (0, 120), ...}, --bounds), leave scaling out, or "
            "protect whole clients (--dp-unit client)"
        )


def _form(record: Any) -> Form:
    shape = tuple(_whole(size) for size in record["shape"])
    return Form(shape, np.dtype(str(record["dtype"])).name)


def _class_names(names: Any) -> ClassNames | None:
    if names is None:
        return None
    if not all(isinstance(name, str | int | float) for name in names):
        raise ValueError("no names")
    return tuple(names)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise ValueError("no number")
    return value


def _whole_or_none(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _number_or_none(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not np.isfinite(value):
        raise ValueError("no number")
    return float(value)

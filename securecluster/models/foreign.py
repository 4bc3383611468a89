"""Models of any framework, as functions over lists of NumPy arrays.

A `ForeignModel` takes the place of a torch module. Its parameters are the arrays that clients
average, and its forward pass calls the user's `outputs`. Masks, sums, sketches and noise therefore
see one flat vector, as of any network; only local training differs (`ForeignTrainer`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from securecluster.errors import NoOutputsError, SecureClusterError, UsageError
from securecluster.models.flat_model import reason
from securecluster.models.foreign_process import Interpreter

Arrays = list[NDArray[Any]]
Train = Callable[[Arrays, NDArray[Any], NDArray[Any], Any], Sequence[Any]]
Outputs = Callable[[Arrays, NDArray[Any]], Any]
Draw = Callable[[np.random.Generator], Sequence[Any]]


@dataclass(frozen=True)
class Functions:
    """The user's functions, which copies of a model share.

    Args:
        train: local training.
        outputs: outputs of the model, or None.
        draw: initial arrays from a generator, or None.
    """

    train: Train
    outputs: Outputs | None
    draw: Draw | None

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Functions:
        return self  # a function's owner may be an object of a framework that has no copies

    def call(self, name: str, *arguments: Any) -> Any:
        """Return what one of the functions returns.

        Args:
            name: of the function.
            arguments: of the function.

        Raises:
            UsageError: it raised another error.
        """
        try:
            return getattr(self, name)(*arguments)
        except SecureClusterError:
            raise
        # a user's own code may raise anything, and may end a process that is not its own
        except (Exception, SystemExit, GeneratorExit) as error:
            raise UsageError(
                f"the function {name} of a ForeignModel raised {type(error).__name__}: "
                f"{reason(error)}"
            ) from error


class ForeignModel(nn.Module):
    """A model of any framework, which clients train by a function over NumPy arrays.

    Give it as a protocol's `model`.

    Args:
        start: the initial arrays, in a fixed order; or a function of a NumPy generator that draws
            them, which methods that begin with several models need.
        train: function of (arrays, x, y, call) that returns the arrays after a client's training,
            in the same order and shapes. The arrays are copies in the types of `start`, x (n, …)
            and y (n, …) the client's samples, and `call` is a `TrainingCall`: the learning rate,
            the mini-batches and a generator that the protocol chose.
        outputs: function of (arrays, x) that returns what the objective scores: for
            classification one row of logits, or of log probabilities, for each sample. Without it
            nothing is scored, and methods that compare losses refuse.
        example_privacy: (ε, δ) for one sample of a client over the whole run, where `train` adds
            noise for it and an accountant of your own has found them. Reports state them as yours,
            which nothing checks.

    Raises:
        UsageError: arrays, functions or numbers that cannot be these.
    """

    has_gradients = False  # outputs come from outside of torch

    def __init__(
        self,
        start: Sequence[Any] | Draw,
        train: Train,
        outputs: Outputs | None = None,
        example_privacy: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        _check_stated(example_privacy)
        self.example_privacy = example_privacy
        draw = start if callable(start) else None
        self.functions = Functions(train, outputs, draw)
        for name, function in (("train", train), ("outputs", outputs)):
            if not (callable(function) or (function is None and name == "outputs")):
                raise UsageError(
                    f"{name} is {type(function).__name__}: give a function, as "
                    "help(securecluster.ForeignModel) describes it"
                )
        arrays: Any = start
        if draw is not None:
            arrays = self.functions.call("draw", np.random.default_rng(0))
        self.dtypes = []
        for k, array in enumerate(_listed(arrays, "start")):
            value = _real(array, f"array {k} of start")
            if not np.isfinite(value).all():
                raise UsageError(f"array {k} of start is not finite: start from other arrays")
            self.dtypes.append(value.dtype)
            parameter = nn.Parameter(torch.tensor(value.astype(np.float64)).float())
            self.register_parameter(f"array_{k}", parameter)
        if not self.dtypes:
            raise UsageError("start has no arrays: give those that clients average")

    @classmethod
    def of_file(
        cls, path: str | Path, python: str, example_privacy: tuple[float, float] | None = None
    ) -> ForeignModel:
        """Return the model of a file with `start`, `train` and, if wanted, `outputs`.

        The functions run in a Python of their own, whose environment has NumPy and needs no torch.
        Arrays there have types of NumPy's own.

        Args:
            path: of the file.
            python: program of the interpreter, such as /opt/wards/bin/python.
            example_privacy: as of the class.

        Raises:
            UsageError: no such file, interpreter or functions.
        """
        path = Path(path)
        if not path.is_file():
            raise UsageError(f"there is no file {path}: give one with start and train")
        there = Interpreter(python, path)
        state = np.random.default_rng(0).bit_generator.state
        has, arrays = there.ask("start", [], generator=state)
        start = there.start if has["draws"] else arrays
        return cls(start, there.train, there.outputs if has["scores"] else None, example_privacy)

    def extra_repr(self) -> str:
        """Return the functions' names, by which a configuration tells models apart."""
        settings = []
        for name, function in vars(self.functions).items():
            if function is not None:
                settings.append(f"{name}={_name(function)}")
        if self.example_privacy is not None:
            privacy = tuple(map(float, self.example_privacy))
            settings.append(f"example_privacy={privacy}")
        return ", ".join(settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs for samples x, (n, …).

        Raises:
            UsageError: there is no function for them, or it returns no numbers.
        """
        parameters = list(self._parameters.values())
        flat = torch.cat([value.detach().flatten() for value in parameters if value is not None])
        if self.functions.outputs is None:
            raise NoOutputsError(
                "this needs outputs of the clients' models, and the ForeignModel has no function "
                "for them: give outputs=, of (arrays, x)"
            )
        result = self.functions.call("outputs", self.split(flat), x.detach().cpu().numpy())
        outputs = _real(result, "what outputs returned")
        return torch.tensor(outputs).to(flat)

    def reset_parameters(self) -> None:
        """Draw the arrays anew, from torch's generator.

        Raises:
            UsageError: they were given, and not a function that draws them.
        """
        if self.functions.draw is None:
            raise UsageError(
                "this protocol begins with several models, and the ForeignModel has the arrays of "
                "one: give a function of a NumPy generator as start"
            )
        seed = int(torch.randint(1 << 62, ()))
        arrays = self.functions.call("draw", np.random.default_rng(seed))
        flat = self.joined(arrays, "start").float()
        first = 0
        for parameter in self.parameters():
            size = parameter.numel()
            parameter.data.copy_(flat[first : first + size].view(parameter.shape))
            first += size

    def split(self, flat: torch.Tensor) -> Arrays:
        """Return the arrays of a flat vector (d,), as copies in the types of `start`.

        Args:
            flat: parameters, (d,).
        """
        numbers = flat.detach().cpu().numpy()
        arrays = []
        first = 0
        for parameter, dtype in zip(self.parameters(), self.dtypes, strict=True):
            size = parameter.numel()
            segment = numbers[first : first + size]
            arrays.append(segment.astype(dtype).reshape(tuple(parameter.shape)))
            first += size
        return arrays

    def joined(self, arrays: Any, function: str = "train") -> torch.Tensor:
        """Return arrays as a flat vector, (d,) float64.

        Args:
            arrays: what a function returned.
            function: its name, for errors.

        Raises:
            UsageError: they are not the arrays of this model.
        """
        listed = _listed(arrays, function)
        parameters = list(self.parameters())
        if len(listed) != len(parameters):
            raise UsageError(
                f"{function} returned {len(listed)} arrays, and the model has {len(parameters)}: "
                "return all of them, in the order of start"
            )
        vectors = []
        for k, (array, parameter) in enumerate(zip(listed, parameters, strict=True)):
            value = _real(array, f"array {k} of what {function} returned")
            if value.shape != tuple(parameter.shape):
                raise UsageError(
                    f"array {k} of what {function} returned has shape {value.shape}, and that of "
                    f"start has {tuple(parameter.shape)}: return the arrays in the order of start"
                )
            vectors.append(value.astype(np.float64).ravel())
        return torch.from_numpy(np.concatenate(vectors))

    def arrays_of(self, state: Mapping[str, torch.Tensor]) -> Arrays:
        """Return a fitted model as arrays, in the order and types of `start`.

        Args:
            state: as `model_of` and `models_` of a fitted protocol have it.
        """
        names = [name for name, _ in self.named_parameters()]
        return self.split(torch.cat([state[name].flatten() for name in names]))


def _check_stated(privacy: Any) -> None:
    """Raise UsageError unless a user's own ε and δ are possible, or none are given."""
    if privacy is None:
        return
    pair = isinstance(privacy, list | tuple) and len(privacy) == 2
    if not pair or not all(isinstance(value, int | float) for value in privacy):
        raise UsageError(f"example_privacy = {privacy!r}: give a pair of numbers (epsilon, delta)")
    epsilon, delta = privacy
    if not (0 < epsilon < math.inf and 0 <= delta < 1):
        raise UsageError(
            f"example_privacy = {privacy!r}: epsilon is a finite number above 0, and delta one "
            "from 0, below 1"
        )


def _listed(arrays: Any, function: str) -> list[Any]:
    """Return a list or tuple of arrays as a list.

    Raises:
        UsageError: it is none.
    """
    if isinstance(arrays, list | tuple):
        return list(arrays)
    said = "is" if function == "start" else "returned"
    type_name = "None" if arrays is None else type(arrays).__name__
    raise UsageError(f"{function} {said} {type_name}: it must be a list of NumPy arrays")


def _real(array: Any, subject: str) -> NDArray[Any]:
    """Return an array of real numbers.

    Args:
        array: of any framework that NumPy reads.
        subject: what it is, for errors.

    Raises:
        UsageError: it is none.
    """
    try:
        value = np.asarray(array)
    except Exception as error:  # conversions of other frameworks may raise anything
        raise UsageError(f"{subject} is no array for NumPy: {reason(error)}") from error
    # the bfloat16 of ml_dtypes, which JAX uses, has no kind of NumPy's own
    if value.dtype.kind != "f" and value.dtype.name != "bfloat16":
        raise UsageError(
            f"{subject} holds {value.dtype} in place of real numbers: keep counters and other "
            "state out of the arrays"
        )
    return value


def _name(function: Any) -> str:
    """Return the name of a function, without an address."""
    inner = getattr(function, "func", function)  # of functools.partial
    owner = getattr(inner, "__self__", None)
    if isinstance(owner, Interpreter):
        return f"{owner.path.name}:{inner.__name__}"
    return str(getattr(inner, "__qualname__", type(inner).__name__))

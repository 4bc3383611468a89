"""Functions of a `ForeignModel` in a Python of their own, which need not have torch.

An environment for training then has its own versions, its framework, and no torch. Arrays and
samples go through a pipe to a process on the same machine, and nothing else does.
"""

from __future__ import annotations

import subprocess
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError
from securecluster.models import foreign_worker

Arrays = list[NDArray[Any]]
PLAN = ("client", "name", "epochs", "batch_size", "optimizer", "momentum")


class Interpreter:
    """A Python that has a file's functions `start`, `train` and `outputs`.

    It starts with the first request, and anew where it has ended. It runs isolated (`-I`), and sees
    neither PYTHONPATH nor the packages of this process.

    Args:
        python: program of the interpreter, whose environment has NumPy.
        path: of the file.
    """

    def __init__(self, python: str, path: Path) -> None:
        self.python = python
        self.path = path
        self._process: subprocess.Popen[bytes] | None = None

    def __reduce__(self) -> tuple[type[Interpreter], tuple[str, Path]]:
        return Interpreter, (self.python, self.path)  # another process starts its own

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process.

        Raises:
            UsageError: there is no such program.
        """
        if self._process is None or self._process.poll() is not None:
            command = [self.python, "-I", foreign_worker.__file__, str(self.path.resolve())]
            pipe = subprocess.PIPE
            try:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            except OSError as error:
                raise UsageError(f"{self.python} does not start: {error.strerror}") from error
            weakref.finalize(self, end, self._process)
        return self._process

    def ask(
        self, name: str, arrays: Arrays, call: Any = None, **header: Any
    ) -> foreign_worker.Message:
        """Return the header and the arrays of the answer to a request.

        Args:
            name: of the function.
            arrays: of the request.
            call: of whom `train` may ask the learning rate and the mini-batches.
            header: what else the request says.

        Raises:
            UsageError: the function failed, or its process ended.
        """
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            foreign_worker.write(process.stdin, {"name": name, **header}, arrays)
            answer, results = foreign_worker.read(process.stdout)
            while "ask" in answer:
                value = getattr(call, answer["ask"])
                asked = list(value()) if callable(value) else [np.float64(value)]
                foreign_worker.write(process.stdin, {}, asked)
                answer, results = foreign_worker.read(process.stdout)
        except (EOFError, BrokenPipeError) as error:
            end(process)
            raise UsageError(
                f"{self.python} ended with code {process.returncode} before {self.path.name} had "
                "answered: it takes a Python of 3.10 or newer that has NumPy"
            ) from error
        if "error" in answer:
            raise UsageError(f"{self.path.name} in {self.python}: {answer['error']}")
        return answer, results

    def start(self, generator: np.random.Generator) -> Arrays:
        """Return initial arrays.

        Args:
            generator: of random numbers.
        """
        return self.ask("start", [], generator=generator.bit_generator.state)[1]

    def train(self, arrays: Arrays, x: Any, y: Any, call: Any) -> Arrays:
        """Return arrays after a client's training.

        Args:
            arrays: of the model.
            x: samples, (n, …).
            y: labels, (n, …).
            call: a `TrainingCall`.
        """
        plan = {name: getattr(call, name) for name in PLAN}
        header = {"plan": plan, "generator": call.generator.bit_generator.state}
        return self.ask("train", [*arrays, x, y], call, model=len(arrays), **header)[1]

    def outputs(self, arrays: Arrays, x: Any) -> NDArray[Any]:
        """Return a row of outputs for each sample.

        Args:
            arrays: of the model.
            x: samples, (n, …).
        """
        result: Arrays = self.ask("outputs", [*arrays, x], model=len(arrays))[1]
        return result[0]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process whose pipes nobody reads."""
    process.kill()
    process.communicate()

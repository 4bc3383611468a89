"""The other end of an `Interpreter`: carries out a file's functions in a Python without torch.

This file runs by its path, with the standard library and NumPy alone. A message is a line of JSON
and an npz of its arrays. What a function asks of `call` is asked of the parent, so that the parent
knows what was followed.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

Message = tuple[dict[str, Any], list[Any]]


def write(pipe: IO[bytes], header: dict[str, Any], arrays: Sequence[Any] = ()) -> None:
    """Write a message.

    Args:
        pipe: to the other process.
        header: what JSON can hold, and arrays of whole numbers, which it has as lists.
        arrays: of numbers.

    Raises:
        ValueError: an array of objects, which would be code.
    """
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{str(k): array for k, array in enumerate(arrays)})
    data = buffer.getvalue()
    line = json.dumps(header | {"size": len(data)}, default=np.ndarray.tolist)
    pipe.write(line.encode() + b"\n" + data)
    pipe.flush()


def read(pipe: IO[bytes]) -> Message:
    """Return the next message.

    Args:
        pipe: from the other process.

    Raises:
        EOFError: the other process has ended.
    """
    line = pipe.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the other process has ended")
    header: dict[str, Any] = json.loads(line)
    with np.load(io.BytesIO(pipe.read(header["size"])), allow_pickle=False) as content:
        return header, [content[str(k)] for k in range(len(content))]


def generator_of(state: dict[str, Any]) -> np.random.Generator:
    """Return a generator of random numbers in a state."""
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return np.random.Generator(bits)


class Call:
    """What `train` sees of a `TrainingCall`.

    Args:
        pipes: from the parent and to it.
        header: of the request: its plain attributes, and the state of its generator.
    """

    def __init__(self, pipes: tuple[IO[bytes], IO[bytes]], header: dict[str, Any]) -> None:
        self.__dict__.update(header["plan"])
        self.generator = generator_of(header["generator"])
        self._pipes = pipes

    def _asked(self, name: str) -> list[Any]:
        write(self._pipes[1], {"ask": name})
        return read(self._pipes[0])[1]

    @property
    def lr(self) -> float:
        """Return the learning rate."""
        return float(self._asked("lr")[0])

    def batches(self) -> list[Any]:
        """Return the rows of each mini-batch in order."""
        return self._asked("batches")


def answered(
    names: dict[str, Any], message: Message, pipes: tuple[IO[bytes], IO[bytes]]
) -> Message:
    """Return the answer to a request.

    Args:
        names: of the file.
        message: the request.
        pipes: from the parent and to it.
    """
    header, arrays = message
    name = header["name"]
    model, samples = arrays[: header.get("model")], arrays[header.get("model", 0) :]
    if name == "train":
        result = names["train"](model, *samples, Call(pipes, header))
    elif name == "outputs":
        result = [names["outputs"](model, *samples)]
    else:
        missing = {"start", "train"} - names.keys()
        if missing:
            raise NameError(f"it has no {min(missing)}, and needs start and train")
        result = names["start"]
        header = {"draws": callable(result), "scores": "outputs" in names}
        if callable(result):
            result = result(generator_of(message[0]["generator"]))
    if not isinstance(result, list | tuple):
        raise TypeError(f"{name} gave {type(result).__name__}, and not a list of arrays")
    return header, [np.asarray(array) for array in result]


def main(path: str) -> None:
    """Answer until the parent has ended.

    Args:
        path: of the file with the functions.
    """
    # what the functions print is no message
    pipes = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(path).parent))
    names: dict[str, Any] = {}
    while True:
        try:
            message = read(pipes[0])
        except EOFError:
            return
        try:
            names = names or runpy.run_path(path)
            write(pipes[1], *answered(names, message, pipes))
        except (Exception, SystemExit) as error:
            write(pipes[1], {"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main(sys.argv[1])

"""Clients that train by functions over NumPy arrays, under the protocols."""

from __future__ import annotations

import inspect
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import SPLITTING
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import nn

from securecluster import (
    CFL,
    IFCA,
    FedAvg,
    Federation,
    ForeignModel,
    LabelSwap,
    Settings,
    Signature,
    audit,
)
from securecluster.core import progress
from securecluster.errors import RunFolderError, SecureClusterWarning, UpdateError, UsageError
from securecluster.protocols.conformance import (
    check_frames,
    check_nodes,
    check_repeats,
    check_replay,
    check_resume,
    check_saved,
    check_secure_sums,
    example,
)
from securecluster.protocols.registry import PROTOCOLS, protocol_class
from securecluster.statements.privacy_section import FUNCTIONS, section
from securecluster.training import local_trainer
from securecluster.training.foreign_trainer import TrainingCall

Arrays = list[NDArray[Any]]
FEATURES = 64
CLASSES = 10
SETTINGS = Settings(keys_from_seed=True)


def draw(generator: np.random.Generator) -> Arrays:
    """Return weights (classes, features) and biases of a softmax regression."""
    weights = generator.uniform(-0.125, 0.125, (CLASSES, FEATURES)).astype(np.float32)
    biases = generator.uniform(-0.125, 0.125, CLASSES).astype(np.float32)
    return [weights, biases]


def outputs(arrays: Arrays, x: NDArray[Any]) -> NDArray[Any]:
    """Return the logits, (n, classes)."""
    weights, biases = arrays
    return x.reshape(len(x), -1) @ weights.T + biases


def train(arrays: Arrays, x: NDArray[Any], y: NDArray[Any], call: TrainingCall) -> Arrays:
    """Train by hand, with the gradient of the cross-entropy of a softmax regression."""
    weights, biases = arrays
    x = x.reshape(len(x), -1)
    for rows in call.batches():
        logits = x[rows] @ weights.T + biases
        exponentials = np.exp(logits - logits.max(1, keepdims=True))
        errors = exponentials / exponentials.sum(1, keepdims=True)
        errors[np.arange(len(rows)), y[rows]] -= 1
        weights -= call.lr * errors.T @ x[rows] / len(rows)
        biases -= call.lr * errors.mean(0)
    return [weights, biases]


class Regression(nn.Module):
    """The same softmax regression in torch, with the same draws of its initial weights."""

    def __init__(self) -> None:
        super().__init__()
        weights, biases = draw(np.random.default_rng(0))
        self.weights = nn.Parameter(torch.from_numpy(weights))
        self.biases = nn.Parameter(torch.from_numpy(biases))

    def reset_parameters(self) -> None:
        """Draw as a `ForeignModel` does."""
        seed = int(torch.randint(1 << 62, ()))
        weights, biases = draw(np.random.default_rng(seed))
        self.weights.copy_(torch.from_numpy(weights))
        self.biases.copy_(torch.from_numpy(biases))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, (n, classes)."""
        return nn.functional.linear(x.flatten(1), self.weights, self.biases)


def train_by_torch(arrays: Arrays, x: NDArray[Any], y: NDArray[Any], call: TrainingCall) -> Arrays:
    """Train with torch's own gradients and sgd."""
    weights, biases = [torch.tensor(array, requires_grad=True) for array in arrays]
    samples, labels = torch.from_numpy(x).flatten(1), torch.from_numpy(y)
    optimizer = torch.optim.SGD([weights, biases], call.lr)
    for rows in call.batches():
        optimizer.zero_grad()
        logits = nn.functional.linear(samples[rows], weights, biases)
        losses = nn.functional.cross_entropy(logits, labels[rows], reduction="none")
        (losses * (1 / len(rows))).sum().backward()
        optimizer.step()
    return [weights.detach().numpy(), biases.detach().numpy()]


def jax_functions() -> tuple[Any, Any]:
    """Return train and outputs of the softmax regression in JAX, with its own gradients."""
    jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")

    def logits(arrays: Any, x: Any) -> Any:
        return x.reshape(len(x), -1) @ arrays[0].T + arrays[1]

    def loss(arrays: Any, x: Any, y: Any) -> Any:
        scores = jax.nn.log_softmax(logits(arrays, x))
        return -jax.numpy.take_along_axis(scores, y[:, None], 1).mean()

    gradient = jax.grad(loss)

    def train_in_jax(arrays: Any, x: Any, y: Any, call: TrainingCall) -> Any:
        for rows in call.batches():
            slopes = gradient(arrays, x[rows], y[rows])
            arrays = [array - call.lr * slope for array, slope in zip(arrays, slopes, strict=True)]
        return arrays

    return train_in_jax, logits


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Return six clients in two clusters."""
    scenario = LabelSwap(clusters=2)
    return Federation.simulate("digits", scenario=scenario, clients=6, samples=60, seed=3)


SECURE = {"mask": "permutation", "aggregation": "secagg"}
TWO_MODELS = {"k": 2, "starts": 2, "start_rounds": 1}
CASES = {
    "fedavg": ("fedavg", {}),
    "fedavg-secure": ("fedavg", SECURE),
    "cfl": ("cfl", SPLITTING),
    "cfl-masked": ("cfl", {**SPLITTING, "mask": "rotation"}),
    "cfl-gradient": ("cfl", {**SPLITTING, "similarity": "gradient"}),
    "cfl-fallback": ("cfl", {**SPLITTING, "fallback": 0.2}),
    "cfl-secure": ("cfl", {**SPLITTING, **SECURE, "sketch": 64}),
    "flhc": ("flhc", {"pre_rounds": 3}),
    "flhc-secure": ("flhc", {"pre_rounds": 3, **SECURE}),
    "ifca": ("ifca", TWO_MODELS),
    "ifca-secure": ("ifca", {**TWO_MODELS, **SECURE}),
    "srfca": ("srfca", {}),
    "signature": ("signature", {}),
    "signature-secure": ("signature", SECURE),
    "pacfl": ("pacfl", {}),
    "cflgp": ("cflgp", {"k": 2}),
    "rdpcfl": ("rdpcfl", {}),
    "hidden": ("hidden", {"k": 2}),
    "oneshot": ("oneshot", {}),
    "local": ("local", {}),
}


def fitted(name: str, params: dict[str, Any], model: Any, federation: Federation) -> Any:
    """Return a protocol after a short run."""
    protocol = protocol_class(name)(rounds=5, epochs=1, model=model, **params)
    return protocol.fit(federation, SETTINGS)


@pytest.mark.always
@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_numpy_by_hand_equals_torch(case: str, federation: Federation) -> None:
    name, params = CASES[case]
    ours = fitted(name, params, Regression(), federation)
    foreign = fitted(name, params, ForeignModel(draw, train, outputs), federation)
    assert list(foreign.labels_) == list(ours.labels_)
    models = foreign.client_models_.values
    torch.testing.assert_close(models, ours.client_models_.values, rtol=0, atol=2e-6)
    assert foreign.kept_.learned.bytes == ours.kept_.learned.bytes
    np.testing.assert_allclose(foreign.scores_, ours.scores_)
    events = [event.mechanism for event in ours.kept_.learned.network.ledger.events]
    assert [event.mechanism for event in foreign.kept_.learned.network.ledger.events] == events


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the program of a Python that has no torch."""
    program = tmp_path_factory.mktemp("bin") / "python"
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -I -c \'import runpy, sys; sys.modules["torch"] = None; '
        'sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name="__main__")\' "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


FILE = """
import numpy as np

CLASSES, FEATURES = 10, 64
try:
    import torch
except ImportError:
    print("what a file prints is no message")
else:
    raise RuntimeError("this Python has torch")


"""


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["cfl-gradient", "ifca-secure"])
def test_functions_in_a_python_without_torch_are_those_in_this_one(
    case: str, federation: Federation, without_torch: str, tmp_path: Path
) -> None:
    path = tmp_path / "wards.py"
    sources = "\n\n".join(map(inspect.getsource, (draw, outputs, train)))
    header = "from __future__ import annotations\n" + FILE
    path.write_text(header + sources.replace("def draw", "def start"))
    name, params = CASES[case]
    here = fitted(name, params, ForeignModel(draw, train, outputs), federation)
    there = fitted(name, params, ForeignModel.of_file(path, without_torch), federation)
    assert torch.equal(there.client_models_.values, here.client_models_.values)
    assert list(there.labels_) == list(here.labels_) and there.bytes_ == here.bytes_
    np.testing.assert_array_equal(there.scores_, here.scores_)
    with pytest.raises(UsageError, match="this Python has torch"):
        ForeignModel.of_file(path, sys.executable)


FAULTS = {
    "start = [np.zeros(3)]": "it has no train, and needs start and train",
    "start = 1\ntrain = print": "start gave int, and not a list of arrays",
    "raise ValueError('no data here')": "wards.py in .*python: ValueError: no data here",
    "start = [np.zeros(3)]\ntrain = lambda *a: 1 / 0": "client 0: wards.py.*division by zero",
    "start = [np.zeros(3)]\ntrain = lambda *a: None": "train gave NoneType, and not a list",
    "import os\nstart = [np.zeros(3)]\ntrain = lambda *a: os._exit(3)": "ended with code 3 before",
    "start = [np.array([object()])]\ntrain = print": "Object arrays cannot be saved",
}


@pytest.mark.parametrize("text", FAULTS)
def test_faults_of_a_file_are_told_in_a_sentence(
    text: str, federation: Federation, without_torch: str, tmp_path: Path
) -> None:
    path = tmp_path / "wards.py"
    path.write_text(f"import numpy as np\n{text}\n")
    with pytest.raises(UsageError, match=FAULTS[text]):
        fitted("fedavg", {}, ForeignModel.of_file(path, without_torch), federation)


def test_a_file_or_a_python_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "wards.py"
    with pytest.raises(UsageError, match="there is no file"):
        ForeignModel.of_file(path, sys.executable)
    path.write_text("")
    with pytest.raises(UsageError, match="nowhere/python does not start"):
        ForeignModel.of_file(path, "nowhere/python")


@pytest.mark.parametrize("case", ["cfl-secure", "ifca", "signature-secure"])
def test_jax_equals_torch(case: str, federation: Federation) -> None:
    name, params = CASES[case]
    ours = fitted(name, params, Regression(), federation)
    foreign = fitted(name, params, ForeignModel(draw, *jax_functions()), federation)
    assert list(foreign.labels_) == list(ours.labels_)
    models = foreign.client_models_.values
    torch.testing.assert_close(models, ours.client_models_.values, rtol=0, atol=2e-6)
    assert foreign.bytes_ == ours.bytes_


@pytest.mark.few(3)
@pytest.mark.parametrize("params", [{}, {"mask": "permutation"}, SECURE], ids=str)
@pytest.mark.parametrize("name", ["fedavg", "cfl", "signature"])
def test_torch_behind_arrays_gives_the_same_bits(
    name: str, params: dict[str, Any], federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one client at a time, as functions train: products of several round otherwise
    monkeypatch.setattr(local_trainer, "CPU_CHUNK", 1)
    if name == "cfl":
        params = {**SPLITTING, **params}
        if "aggregation" in params:
            params["sketch"] = 64
    ours = fitted(name, params, Regression(), federation)
    foreign = fitted(name, params, ForeignModel(draw, train_by_torch, outputs), federation)
    assert list(foreign.labels_) == list(ours.labels_)
    assert torch.equal(foreign.client_models_.values, ours.client_models_.values)
    assert foreign.bytes_ == ours.bytes_


def test_clusters_are_found(federation: Federation) -> None:
    found = fitted("flhc", {"pre_rounds": 3}, ForeignModel(draw, train, outputs), federation)
    assert found.agreement_["ari"] == 1.0


def test_noise_clips_what_the_function_changed(federation: Federation) -> None:
    def leap(arrays: Arrays, x: NDArray[Any], y: NDArray[Any], call: TrainingCall) -> Arrays:
        return [array + 100 for array in arrays]

    model = ForeignModel(draw, leap)
    noisy = FedAvg(model=model, rounds=1, clip=0.5, noise=0.01).fit(federation, SETTINGS)
    start = torch.from_numpy(np.concatenate([a.ravel() for a in draw(np.random.default_rng(0))]))
    moved = noisy.client_models_.row(0) - start
    # equal updates of norm 0.5 have a mean of norm 0.5; noise adds 0.01·0.5·sqrt(d/m) = 0.05
    assert 0.49 < float(moved.norm()) < 0.52
    ledger = noisy.kept_.learned.network.ledger
    assert {event.mechanism for event in ledger.events} == {"gaussian"}


CONFORMING = {
    FedAvg: {},
    CFL: {**SPLITTING, "mask": "permutation"},
    IFCA: {"k": 2, "starts": 2, "start_rounds": 1, "least_choosers": 2},
    Signature: {"k": 2},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", CONFORMING)
def test_the_checks_of_conformance_pass(kind: Any, federation: Federation, tmp_path: Path) -> None:
    params = {**CONFORMING[kind], "model": ForeignModel(draw, train, outputs), "epochs": 1}
    run = example(kind, federation, **params)
    check_frames(run.fitted)
    check_replay(run)
    check_repeats(run)
    check_resume(run, tmp_path / "resumed")
    check_saved(run, federation.select(federation.names[:2]), tmp_path / "saved")
    check_nodes(kind, federation, **params)
    if kind is not CFL:  # which needs a sketch for them
        check_secure_sums(kind, federation, **params)


def test_a_resumed_run_repeats_draws_of_the_generator(
    federation: Federation, tmp_path: Path
) -> None:
    def jump(arrays: Arrays, x: NDArray[Any], y: NDArray[Any], call: TrainingCall) -> Arrays:
        return [array + call.generator.normal(size=array.shape) for array in arrays]

    run = example(FedAvg, federation, model=ForeignModel(draw, jump))
    check_repeats(run)
    check_resume(run, tmp_path)


def test_without_outputs_nothing_is_scored(federation: Federation) -> None:
    fitted_ = fitted("cfl", SPLITTING, ForeignModel(draw, train), federation)
    assert np.isnan(fitted_.scores_).all()
    assert fitted_.warning_ is None
    assert all(line["accuracy"] is None for line in fitted_.history_)


def test_fitted_models_come_back_as_arrays(federation: Federation) -> None:
    def doubled(generator: np.random.Generator) -> Arrays:
        return [array.astype(np.float64) for array in draw(generator)]

    model = ForeignModel(doubled, train, outputs)
    fitted_ = fitted("fedavg", {}, model, federation)
    arrays = model.arrays_of(fitted_.model_of("0"))
    assert [(a.shape, a.dtype.name) for a in arrays] == [
        ((CLASSES, FEATURES), "float64"),
        ((CLASSES,), "float64"),
    ]
    shard = federation.shards[0]
    right = outputs(arrays, shard.x_test).argmax(1) == shard.y_test
    assert fitted_.scores_[0] == pytest.approx(right.mean())


def test_exports_are_arrays_and_no_graph(federation: Federation, tmp_path: Path) -> None:
    model = ForeignModel(draw, train, outputs)
    fitted_ = fitted("fedavg", {}, model, federation)
    fitted_.export(tmp_path / "exported")
    state = load_file(tmp_path / "exported" / "cluster0.safetensors")
    assert list(state) == ["array_0", "array_1"]
    for array, own in zip(model.arrays_of(state), model.arrays_of(fitted_.models_[0]), strict=True):
        np.testing.assert_array_equal(array, own)
    with pytest.raises(UsageError, match="no graph of torch's"):
        fitted_.export(tmp_path / "graph", format="onnx")


def test_another_function_does_not_resume_a_run(federation: Federation, tmp_path: Path) -> None:
    FedAvg(model=ForeignModel(draw, train), rounds=1).fit(federation, folder=tmp_path / "run")
    other = FedAvg(model=ForeignModel(draw, train_by_torch), rounds=1)
    with pytest.raises(RunFolderError, match="another model"):
        other.fit(federation, folder=tmp_path / "run")


WRONG_RESULTS = {
    "train returned None": lambda arrays: None,
    "train returned dict": lambda arrays: dict(enumerate(arrays)),
    "train returned 1 arrays, and the model has 2": lambda arrays: arrays[:1],
    r"array 0 of what train returned has shape \(64, 10\)": lambda arrays: [arrays[0].T, arrays[1]],
    "array 1 of what train returned holds int64": lambda arrays: [arrays[0], np.arange(CLASSES)],
    "array 0 of what train returned holds <U1": lambda arrays: [["a"], arrays[1]],
    "train of a ForeignModel raised ZeroDivisionError": lambda arrays: 1 / 0,
}


@pytest.mark.parametrize("params", [{}, {"clip": 1.0, "noise": 1.0}], ids=["plain", "noise"])
@pytest.mark.parametrize("sentence", WRONG_RESULTS)
def test_a_wrong_result_is_one_sentence(
    sentence: str, params: dict[str, Any], federation: Federation
) -> None:
    def wrong(arrays: Arrays, x: NDArray[Any], y: NDArray[Any], call: TrainingCall) -> Any:
        return WRONG_RESULTS[sentence](arrays)

    protocol = FedAvg(model=ForeignModel(draw, wrong), rounds=1, **params)
    with pytest.raises(UsageError, match=f"client '?0'?.*{sentence}"):
        protocol.fit(federation, SETTINGS)


def test_numbers_that_are_none_are_refused(federation: Federation) -> None:
    def diverge(arrays: Arrays, x: NDArray[Any], y: NDArray[Any], call: TrainingCall) -> Arrays:
        return [array * np.nan for array in arrays]

    protocol = FedAvg(model=ForeignModel(draw, diverge), rounds=1)
    with pytest.raises(UpdateError, match="not finite"):
        protocol.fit(federation, SETTINGS)


@pytest.mark.filterwarnings("ignore::securecluster.SecureClusterWarning")
@pytest.mark.parametrize("kind", [FedAvg, CFL])
def test_under_noise_the_client_is_told_of_what_counts_as_zeros(
    kind: Any, federation: Federation
) -> None:
    def diverge(arrays: Arrays, x: NDArray[Any], y: NDArray[Any], call: TrainingCall) -> Arrays:
        wrong = np.nan if call.name == "1" else np.inf if call.name == "2" else 1.0
        return [array + wrong for array in arrays]

    protocol = kind(model=ForeignModel(draw, diverge), rounds=1, clip=1.0, noise=0.1)
    with pytest.warns(SecureClusterWarning, match="count as zeros") as told:
        protocol.fit(federation, SETTINGS)
    sentences = {str(one.message) for one in told if "count as zeros" in str(one.message)}
    assert sorted(sentence.split(":")[0] for sentence in sentences) == ["client 1", "client 2"]


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NotATextError(Exception):
    def __str__(self) -> Any:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    "error",
    [NoTextError(), NotATextError(), ValueError(), SystemExit(3), GeneratorExit(), StopIteration()],
)
def test_whatever_a_function_raises_names_its_client(
    error: BaseException, federation: Federation
) -> None:
    def fail(arrays: Arrays, x: NDArray[Any], y: NDArray[Any], call: TrainingCall) -> Arrays:
        if call.client == 1:
            raise error
        return arrays

    protocol = FedAvg(model=ForeignModel(draw, fail), rounds=1)
    with pytest.raises(UsageError, match=f"client '?1'?.* raised {type(error).__name__}"):
        protocol.fit(federation, SETTINGS)


def test_a_function_that_takes_long_is_told_of_with_its_client(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "LONG_S", 0.01)

    def slow(arrays: Arrays, x: NDArray[Any], y: NDArray[Any], call: TrainingCall) -> Arrays:
        limit = time.monotonic() + 60
        # as long as nobody is told
        while call.name == "2" and not told_of("client 2") and time.monotonic() < limit:
            time.sleep(0.01)
        return arrays

    def told_of(who: str) -> bool:
        return any(who in record.getMessage() for record in caplog.records)

    FedAvg(model=ForeignModel(draw, slow), rounds=1).fit(federation, SETTINGS)
    assert told_of("client 2: the function train of its ForeignModel has not returned for")
    caplog.clear()
    monkeypatch.setattr(progress, "LONG_S", 60.0)
    FedAvg(model=ForeignModel(draw, train), rounds=1).fit(federation, SETTINGS)
    assert not caplog.records


STARTS: dict[str, tuple[Any, Any, Any]] = {
    "start is None": (None, train, None),
    "start is ndarray": (np.zeros(3), train, None),
    "start has no arrays": ([], train, None),
    "array 0 of start holds int64": ([np.zeros(3, int)], train, None),
    "array 0 of start is not finite": ([np.full(3, np.nan)], train, None),
    "train is NoneType": ([np.zeros(3)], None, None),
    "outputs is int": ([np.zeros(3)], train, 3),
}


@pytest.mark.parametrize("sentence", STARTS)
def test_a_model_that_cannot_be_is_refused(sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        ForeignModel(*STARTS[sentence])


WRONG_OUTPUTS = {
    "ForeignModel gives": lambda logits: logits[:, :3],
    "what outputs returned holds object": lambda logits: None,
    "depends on the others": lambda logits: logits - logits.mean(0),
    "outputs of a ForeignModel raised ZeroDivisionError": lambda logits: 1 / 0,
}


@pytest.mark.parametrize("sentence", WRONG_OUTPUTS)
def test_outputs_that_cannot_be_are_refused(sentence: str, federation: Federation) -> None:
    def wrong(arrays: Arrays, x: NDArray[Any]) -> Any:
        return WRONG_OUTPUTS[sentence](outputs(arrays, x))

    with pytest.raises(UsageError, match=sentence):
        FedAvg(model=ForeignModel(draw, train, wrong), rounds=1).fit(federation, SETTINGS)


def ignore(arrays: Arrays, x: NDArray[Any], y: NDArray[Any], call: TrainingCall) -> Arrays:
    """Train without what the protocol asks for."""
    return [0.9 * array for array in arrays]


def start() -> Arrays:
    """Return the arrays of one model."""
    return draw(np.random.default_rng(0))


REFUSED: dict[str, tuple[str, dict[str, Any], Sequence[Any]]] = {
    "this needs outputs of the clients' models": ("ifca", {"k": 2}, (draw, train)),
    "begins with several models": ("ifca", {"k": 2}, (start(), train, outputs)),
    "compares gradients": ("cflgp", {"k": 2}, (draw, ignore, outputs)),
    "adds a term to the clients' loss": ("mrmtl", {}, (draw, train, outputs)),
    "no nn.Linear": ("flux", {}, (draw, train, outputs)),
    "dp_unit example": (
        "fedavg",
        {"clip": 1.0, "noise": 1.0, "dp_unit": "example"},
        (draw, train, outputs),
    ),
    "keep_momentum": ("fedavg", {"momentum": 0.9, "keep_momentum": True}, (draw, train, outputs)),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_functions_cannot_do_is_refused(sentence: str, federation: Federation) -> None:
    name, params, functions = REFUSED[sentence]
    with pytest.raises(UsageError, match=sentence):
        fitted(name, params, ForeignModel(*functions), federation)


def test_a_function_may_work_in_place(federation: Federation) -> None:
    before = federation.digest()

    def spoil(arrays: Arrays, x: NDArray[Any], y: NDArray[Any], call: TrainingCall) -> Arrays:
        trained = train(arrays, x, y, call)
        x[:] = 0
        y[:] = 0
        return trained

    spoiled = fitted("fedavg", {}, ForeignModel(draw, spoil, outputs), federation)
    clean = fitted("fedavg", {}, ForeignModel(draw, train, outputs), federation)
    assert torch.equal(spoiled.client_models_.values, clean.client_models_.values)
    assert federation.digest() == before


# what a model lacks without one of the things that `securecluster list` names
LACKING = {
    "train*": (draw, ignore, outputs),
    "outputs": (draw, train),
    "drawn start": (start(), train, outputs),
}
GIVEN = {
    "train": (start(), ignore),
    "train, outputs": (start(), ignore, outputs),
    "train*, outputs": (start(), train, outputs),
    "train*, drawn start": (draw, train),
    "train, outputs, drawn start": (draw, ignore, outputs),
}
NUMBERS = ("ifca", "clove", "cflgp", "hidden", "local-kmeans", "random")


def short(name: str) -> dict[str, Any]:
    """Return the hyper-parameters of a short run."""
    params: dict[str, Any] = {"flhc": {"pre_rounds": 3}}.get(name, {})
    return {**params, **({"k": 2} if name in NUMBERS else {})}


@pytest.mark.filterwarnings("ignore:on their own test samples")  # after a short run
@pytest.mark.parametrize(
    ("needs", "name"), [(fact.foreign, name) for name, fact in PROTOCOLS.items()]
)
def test_the_list_says_what_a_protocol_needs(needs: str, name: str, federation: Federation) -> None:
    if needs == "cannot train one":
        with pytest.raises(UsageError):
            fitted(name, short(name), ForeignModel(draw, train, outputs), federation)
        return
    fitted(name, short(name), ForeignModel(*GIVEN[needs]), federation)
    for part in needs.split(", "):
        if part != "train":
            with pytest.raises(UsageError):
                fitted(name, short(name), ForeignModel(*LACKING[part]), federation)


def test_the_report_says_whose_accountant_it_is(federation: Federation, tmp_path: Path) -> None:
    model = ForeignModel(draw, train, outputs, example_privacy=(2.5, 1e-5))
    FedAvg(model=model, rounds=1).fit(federation, SETTINGS, folder=tmp_path / "run")
    privacy = json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]
    assert privacy["epsilon"] is None  # ours, of releases without noise
    (stated,) = [limit for limit in privacy["not_covered"] if "epsilon 2.5 at delta 1e-05" in limit]
    assert "accountant of their own: nothing here has checked it" in stated
    other = FedAvg(model=ForeignModel(draw, train, outputs, (9.0, 1e-5)), rounds=1)
    with pytest.raises(RunFolderError, match="another model"):
        other.fit(federation, SETTINGS, folder=tmp_path / "run")


def test_the_report_says_that_functions_are_the_users(federation: Federation) -> None:
    ours = fitted("fedavg", {}, "linear", federation)
    foreign = fitted("fedavg", {}, ForeignModel(draw, train), federation)
    sentences = [section(run.result_)["not_covered"] for run in (ours, foreign)]
    assert set(sentences[1]) - set(sentences[0]) == {FUNCTIONS}


@pytest.mark.parametrize("privacy", [3.0, (1.0,), (0.0, 1e-5), (math.inf, 0.1), (1.0, 1.0), "ab"])
def test_a_statement_of_privacy_that_cannot_be_is_refused(privacy: Any) -> None:
    with pytest.raises(UsageError, match="example_privacy"):
        ForeignModel(draw, train, example_privacy=privacy)


@pytest.mark.parametrize("functions", [(train, outputs), (train,)], ids=["outputs", "train alone"])
def test_attacks_apply_or_say_why_not(
    functions: Sequence[Any], federation: Federation, tmp_path: Path
) -> None:
    run = CFL(model=ForeignModel(draw, *functions), rounds=2, epochs=1)
    run.fit(federation, Settings(transcript="full"), folder=tmp_path / "run")
    attacks = ["linkage", "label-counts", "gradient-inversion-dlg", "membership-loss-threshold"]
    found = audit(run, federation, attacks=attacks, budget=60)
    assert not found.failed
    reasons = {finding.attack: finding.reason for finding in found.findings["run"]}
    assert reasons["linkage"] == ""
    assert "through which no gradient is taken" in reasons["gradient-inversion-dlg"]
    if len(functions) == 1:
        assert "needs outputs" in reasons["label-counts"]

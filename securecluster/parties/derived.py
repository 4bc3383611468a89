"""What follows from a method with its hyper-parameters, for all parties of a run and reports."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Mapping
from numbers import Number
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import numpy as np

from securecluster.core.option_groups import option_groups
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import fault_of
from securecluster.errors import UsageError
from securecluster.models.objectives import objective
from securecluster.parties.config import known, numbers
from securecluster.parties.method import Method
from securecluster.parties.program import program_digest
from securecluster.runtime.client_half import HiddenReplies
from securecluster.runtime.endpoint import PAIRS, SUM, hidden_message_types, message_types

if TYPE_CHECKING:
    from securecluster.data.facts import Facts
    from securecluster.data.federation import Federation
    from securecluster.models.validation import FlatModel

M = TypeVar("M", bound=Method)

# options that were chosen for a target ε: the name in a configuration, and of a method's attribute
CHOSEN = "chosen"
# attribute of a method whose run goes on: options that its clients and server began with
BEGUN = "begun"
# in a configuration: the noise multiplier of a shared scale's sum over that of training
SCALE_NOISE = "scale_noise"
GIVEN = "_given"  # attribute of a protocol: names of the options that its constructor was given


def given_options(method: Any) -> set[str]:
    """Return the names of the options that a protocol was given, with whatever value.

    Args:
        method: the protocol.
    """
    names = set(vars(method).get(GIVEN, ()))
    for option in dataclasses.fields(method):
        value = getattr(method, option.name)
        # an array, or another object that cannot be compared, is no default
        same = isinstance(value, type(option.default)) and value == option.default
        if same is not True:
            names.add(option.name)
    return names


def server_copy(method: M) -> M:
    """Return a new object with the same hyper-parameters, on which the server's half runs.

    Security rule: it has none of the attributes that the method may have been given while it saw
    clients' data.

    Args:
        method: the user's object.
    """
    return type(method)(**method.get_params())


def as_agreed(method: M, config: Mapping[str, Any]) -> M:
    """Return a method with the options that were chosen for its target ε.

    Args:
        method: with the options that its user gave.
        config: what clients and server agreed on.

    Raises:
        UsageError: a chosen option that the method does not have.
    """
    return with_chosen(method, config[CHOSEN]) if CHOSEN in config else method


def with_chosen(method: M, chosen: Mapping[str, Any]) -> M:
    """Return a copy of a method with options that were chosen for its target ε.

    Args:
        method: with the options that its user gave.
        chosen: values by name; where there are none, the copy says so, and nobody chooses again.

    Raises:
        UsageError: the method has no such option.
    """
    if CHOSEN in vars(method):
        return method
    made: Any = copy.copy(method)
    vars(made).pop("result_", None)
    made.set_params(**chosen)
    vars(made)[CHOSEN] = dict(chosen)
    settled: M = made
    return settled


def goes_on(method: M, config: Mapping[str, Any]) -> M:
    """Return a method whose run is longer than clients and server agreed on when it began.

    Its configuration stays as it was, so that frames, masks and noise go on under its hash.

    Args:
        method: with the length that the run has now.
        config: what they agreed on.

    Raises:
        UsageError: the configuration has no length.
    """
    option = method._length
    fault = fault_of(config.get(option), int, f"network.{option}")
    if fault is not None:
        raise UsageError(str(fault))
    if config[option] == getattr(method, option):
        return method
    made = copy.copy(method)
    # the share of ε that a shared scale got follows from the rounds
    vars(made)[BEGUN] = {name: config[name] for name in (option, SCALE_NOISE) if name in config}
    return made


def chosen_sentence(chosen: Mapping[str, Any]) -> str:
    """Return in words what was chosen for a target ε.

    Args:
        chosen: values by name.
    """
    options = [
        # which the command line does not have
        f"{name} {value:.4g}" if name == SCALE_NOISE else f"--{name.replace('_', '-')} {value}"
        for name, value in chosen.items()
    ]
    return f"chosen for the target, since not given: {' '.join(options)}"


def params_as_json(method: Method) -> dict[str, Any]:
    """Return the hyper-parameters as JSON values.

    A module of the user's own is represented by its text and the hash of its weights; other objects
    of the user's own are only named.

    Args:
        method: with its hyper-parameters.
    """
    from securecluster.models.validation import describe

    params: dict[str, Any] = {}
    for name, value in method.get_params().items():
        if hasattr(value, "as_json"):
            value = value.as_json()
        elif not _of_json(value):
            value = {"own": name}
        params[name] = value
    return numbers({**params, "model": describe(method.model)})


def _of_json(value: Any) -> bool:
    """Return whether JSON has a value of a hyper-parameter."""
    if isinstance(value, (list, tuple)):
        return all(_of_json(item) for item in value)
    return value is None or isinstance(value, (str, Number, np.generic))


def resolved_defaults(method: Method, facts: Facts) -> dict[str, Any]:
    """Return the data-dependent defaults: model, learning rate, loss bound and noise.

    Args:
        method: with its options.
        facts: of the clients and their data.
    """
    from securecluster.models.architectures import chosen

    resolved: dict[str, Any] = {}
    network = method.training.network(method)
    if isinstance(network, str):
        resolved["model"] = chosen(network, facts.objective, facts.classes)
    for options in option_groups(method):
        resolved |= options.resolved(method, facts, resolved)
    return resolved


def initial_model(method: Method, data: Federation | Facts) -> FlatModel:
    """Return the network with its initial weights θ_0, as a flat vector.

    Args:
        method: names the network.
        data: the clients and their data, or facts of them.
    """
    return model_of(method, known(data.facts))


def check_start_models(method: Method, facts: Facts) -> None:
    """Check that clients can draw the starting models that are never sent, all but the first.

    Args:
        method: names the network.
        facts: of the clients and their data.

    Raises:
        UsageError: the initial weights of a user's module cannot be drawn again.
    """
    initial_model(method, facts).redrawn(Randomness(facts.seed), "start", 0, 1)


def model_of(method: Method, config: Mapping[str, Any]) -> FlatModel:
    """Return the network with its initial weights θ_0, as a flat vector.

    Args:
        method: names the network.
        config: has the objective, the shape of a sample, the number of classes and the seed.
    """
    from securecluster.models.validation import build

    task = objective(config["objective"])
    randomness = Randomness(config["seed"])
    network = method.training.network(method)
    flat = build(network, tuple(config["shape"]), config["classes"], randomness, task)
    flat = flat.with_local(method.training.local_layers or ())
    start = method.training.start
    return flat if start is None else start.applied(flat)


def module_doubts(method: Method, federation: Federation) -> list[str]:
    """Return doubts about the outputs of a module of the user's own as sentences.

    Args:
        method: with the module, or the name of a network, of which there are none.
        federation: the clients and their data.
    """
    if isinstance(method.model, str):
        return []
    from securecluster.models.validation import output_doubts

    shape, classes = federation.shape, federation.classes
    return output_doubts(method.model, shape, classes, federation.objective)


def adds_noise(method: Method, config: Mapping[str, Any]) -> bool:
    """Return whether anything that clients release in a run has noise.

    Then models that clients trained alone stay out of the results, since no noise covers them, and
    no error of a client may depend on its data.

    Args:
        method: with its options.
        config: what clients and server agreed on.
    """
    return any(options.adds_noise(config) for options in option_groups(method))


def state_class(method: Method) -> type:
    """Return the class of the final state of a method's server.

    This is the class attribute `state_type` of a method that has one, and otherwise what its
    `run_server` is annotated with.

    Args:
        method: whose server returns the state.

    Raises:
        UsageError: the annotation names no dataclass with labels.
    """
    own_type = getattr(type(method), "state_type", None)
    if isinstance(own_type, type):
        return own_type
    name = f"{type(method).__name__}.run_server"
    loop: Any = type(method).run_server
    returned = SimpleNamespace(__annotations__={"return": loop.__annotations__["return"]})
    try:
        state_type: type = get_type_hints(returned, inspect.unwrap(loop).__globals__)["return"]
    except NameError as error:
        raise UsageError(f"{name} is annotated with a class that is not there: {error}") from None
    fields = getattr(state_type, "__dataclass_fields__", None)
    if fields is None or not ("labels" in fields or hasattr(state_type, "labels")):
        declared = getattr(state_type, "__name__", state_type)
        raise UsageError(
            f"{name} returns {declared}: it must be a dataclass with labels, each client's "
            "cluster, and an outbox"
        )
    return state_type


def call_types(method: Method, name: str) -> tuple[type, type]:
    """Return the (query class, reply class) of a call.

    Args:
        method: whose clients answer.
        name: of a client method, or of a method of the global parameter server, which local
            parameter servers call.
    """
    if hasattr(method.gps, name):
        return message_types(method.gps, name)
    hidden: dict[str, HiddenReplies] = {}
    if method.sums.hide_replies:
        hidden[SUM] = method.sums.protection.replies()
    if method.pairs.hide_rows:
        hidden[PAIRS] = method.pairs.protection.replies(method.pairs.fields)
    return hidden_message_types(method.client, name, hidden)


def program_of(method: Method) -> str:
    """Return the digest of a method's source, which every run records.

    It is in no configuration: noise and keys do not follow from it.

    Args:
        method: of a class of the package, or of an author's own.

    Returns:
        "" where a class of the method has no source file.
    """
    return program_digest(type(method), method.client, method.gps, state_class(method))


def needs_samples(method: Method) -> bool:
    """Return whether the configuration follows from each client's number of samples.

    Then the clients tell it before the run, and the server knows it.

    Args:
        method: with its options.
    """
    return any(options.needs_samples(method) for options in option_groups(method))


def training_sizes(method: Any, facts: Facts) -> list[int]:
    """Return the number of samples that each client trains on, without validation samples.

    Args:
        method: says what share is held out.
        facts: of the clients and their data.
    """
    return [training_size(method, samples) for samples in facts.sizes]


def training_size(method: Any, samples: int) -> int:
    """Return the number of samples that a client trains on, without validation samples.

    Args:
        method: says what share is held out.
        samples: that the client has.
    """
    held_out: float = method.training.validation_share(method)
    return samples - math.floor(held_out * samples)

"""The decorator that declares a protocol's class and its hyper-parameters."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from securecluster.core.field_docs import field_descriptions, has_source, with_parameters
from securecluster.core.option_groups import grouped, groups_of, is_group
from securecluster.errors import UsageError
from securecluster.protocols.common.client import TrainingClient
from securecluster.results.fitted import FOR_AUDITORS
from securecluster.runtime.endpoint import refuse_unbounded_messages, refuse_unpriced_fields

P = TypeVar("P", bound=type)
# types of the values of hyper-parameters that JSON cannot hold: these are no hyper-parameters
NOT_A_VALUE = (type, type(lambda: None))


def protocol(declared: P) -> P:
    """Make a class a keyword-only dataclass whose documentation lists its hyper-parameters.

    Each hyper-parameter is an annotated field with a default and a string below it. `help` of the
    class and `--help` of its command both show that string.

    Args:
        declared: a subclass of `ClusteringProtocol`.

    Raises:
        UsageError: the class lacks a part of a protocol, or declares one that cannot work.
    """
    _check_hyper_parameters(declared)
    hyper_parameters(declared)
    _check_parts(declared)
    _check_methods(declared)
    return declared


def hyper_parameters(declared: P) -> P:
    """Make a class, which may be abstract, a keyword-only dataclass with documented fields.

    Args:
        declared: a class with annotated fields.

    Raises:
        UsageError: a default that dataclasses refuse, such as a list.
    """
    text = declared.__doc__ or ""
    try:
        grouped(declared)  # changes the class in place
    except (TypeError, ValueError) as error:
        raise UsageError(f"{declared.__name__}: {error}") from None
    declared.__doc__ = with_parameters(declared, text) + _attributes(declared)
    return declared


def _attributes(declared: type) -> str:
    """Return the section on the attributes of a fitted protocol, which are those of its result."""
    sections = []
    fitted_class = getattr(declared, "fitted_class", object)
    for base in reversed(fitted_class.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        if base is not object and "Attributes:\n" in text:
            sections.append(text.partition("Attributes:\n")[2].rstrip())
    if not sections:
        return ""
    listed = [f"    {name}: {text}" for name, text in _methods_of(fitted_class).items()]
    methods = "\n\nMethods of what is fitted:\n" + "\n".join(listed)
    return "\n\nAttributes:\n" + "\n".join(sections) + methods


def _methods_of(fitted_class: type) -> dict[str, str]:
    """Return what each public method of a result does, in the first line of its documentation."""
    texts = {}
    for name in sorted(dir(fitted_class)):
        method = getattr(fitted_class, name)
        # names that dir of a result leaves out are for auditors
        if not name.startswith("_") and callable(method) and name not in FOR_AUDITORS:
            first, *_ = inspect.cleandoc(method.__doc__ or "").splitlines()
            texts[name] = first
    return texts


def _check_hyper_parameters(declared: type) -> None:
    """Raise UsageError for an annotated field of the class that is no hyper-parameter.

    Args:
        declared: the class, before it is a dataclass.
    """
    for name, annotation in vars(declared).get("__annotations__", {}).items():
        label = f"{declared.__name__}.{name}"
        if "ClassVar" in str(annotation):
            continue
        if name.endswith("_"):
            raise UsageError(
                f"{label} ends in an underscore, as results of fit do: give the hyper-parameter "
                "another name"
            )
        _check_name_is_free(declared, name)
        if name not in vars(declared):
            raise UsageError(f"{label} has no default: give the hyper-parameter one")
        if isinstance(vars(declared)[name], NOT_A_VALUE):
            raise UsageError(
                f"{label} is no hyper-parameter: annotate it as ClassVar, or leave the annotation "
                "out"
            )


def _check_name_is_free(declared: type, name: str) -> None:
    """Raise UsageError for a hyper-parameter with the name of something else.

    Args:
        declared: the class, before it is a dataclass.
        name: of the field.
    """
    label = f"{declared.__name__}.{name}"
    # a protocol shows the members of its results as its own
    results = getattr(declared, "fitted_class", object).__mro__
    for base in (*declared.__mro__[1:], *results):
        if callable(vars(base).get(name)) or isinstance(vars(base).get(name), property):
            raise UsageError(
                f"{label} has the name of a method of {base.__name__}: give the "
                "hyper-parameter another name"
            )
    if name in groups_of(declared) and not is_group(vars(declared).get(name)):
        raise UsageError(
            f"{label} has the name of a group of options: give the hyper-parameter another name"
        )


def _check_parts(declared: type) -> None:
    """Raise UsageError for a class that lacks a part of a protocol.

    Args:
        declared: the class.
    """
    label = declared.__name__
    name = getattr(declared, "name", None)
    if not isinstance(name, str) or not name.replace("-", "").isalnum():
        raise UsageError(
            f"{label} has no name: set `name` to letters, digits and hyphens, by which the command "
            "line finds it"
        )
    client = getattr(declared, "client", None)
    if not (isinstance(client, type) and issubclass(client, TrainingClient)):
        raise UsageError(
            f"{label}.client is {getattr(client, '__name__', client)}: set it to a subclass of "
            "TrainingClient, such as SumClient"
        )
    refuse_unpriced_fields(client)
    refuse_unbounded_messages(client)
    missing = sorted(getattr(declared, "__abstractmethods__", ()))
    if missing:
        raise UsageError(f"{label} lacks {missing[0]}: define {_signature(declared, missing[0])}")
    if not has_source(declared):
        return
    described = field_descriptions(declared)
    for field in dataclasses.fields(declared):
        own_field = field.name in vars(declared).get("__annotations__", {})
        if own_field and field.name not in described:
            raise UsageError(
                f"{label}.{field.name} has no description: write a string below it, which help and "
                "--help show"
            )


def _check_methods(declared: type) -> None:
    """Raise UsageError for a method that cannot be called as the method that it overrides.

    Args:
        declared: the class.
    """
    for name, method in vars(declared).items():
        if not inspect.isfunction(method) or name.startswith("_"):
            continue
        for base in declared.__mro__[1:]:
            overridden = vars(base).get(name)
            if not inspect.isfunction(overridden):
                continue
            if not _accepts(method, overridden):
                parameters = ", ".join(inspect.signature(method).parameters)
                raise UsageError(
                    f"{declared.__name__}.{name}({parameters}) is called as "
                    f"{_signature(base, name)}: give it these arguments"
                )
            break


def _accepts(method: Callable[..., Any], overridden: Callable[..., Any]) -> bool:
    """Return whether a method takes the arguments that another one takes by position.

    Args:
        method: the method of a subclass.
        overridden: that of its base.
    """
    parameters = inspect.signature(overridden).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
        inspect.signature(method).bind(*required)
    except TypeError:
        return False
    return True


def _signature(owner: type, name: str) -> str:
    """Return how a method is called, such as "cluster(self, signatures, seed)".

    Args:
        owner: a class that has the method.
        name: of the method.
    """
    parameters = inspect.signature(getattr(owner, name)).parameters
    return f"{name}({', '.join(parameters)})"

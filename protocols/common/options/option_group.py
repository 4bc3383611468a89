"""What each group of a protocol's options does in a run.

A protection is one group: its options and their checks, what it adds to the configuration, to the
stages of replies and to the clients, what it refuses, and what it lets a party see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from securecluster.core.option_groups import option_groups
from securecluster.privacy.pipeline import Pipeline

if TYPE_CHECKING:
    from securecluster.data.facts import Facts
    from securecluster.parties.method import Method
    from securecluster.protocols.common.client import TrainingClient


@dataclass(kw_only=True)
class OptionGroup:
    """Base of groups of options, without an effect of its own."""

    def check(self, method: Method, clients: int) -> None:
        """Check the options of this group.

        Args:
            method: whose options they are.
            clients: m.

        Raises:
            UsageError: an option is out of range, or does not go with others.
        """

    @property
    def unused(self) -> frozenset[str]:
        """Return the names of options that have no effect beside the others' values."""
        return frozenset()

    def resolved(self, method: Method, facts: Facts, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options whose default depends on public facts of the data.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
            known: what is resolved already.
        """
        return {}

    def agreed(self, method: Method, facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration with what all parties have to agree on for this group.

        A run in which the group has no effect has the configuration that it had before there were
        such options.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
            config: the configuration, with defaults resolved.
        """
        return config

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Return further sizes that bound the contents of frames, by name.

        Args:
            config: what clients and server agreed on.
        """
        return {}

    def pipeline(self, method: Method, config: Mapping[str, Any], pipeline: Pipeline) -> Pipeline:
        """Return a pipeline with the stages of this group's fields.

        Args:
            method: whose options they are.
            config: what clients and server agreed on.
            pipeline: the stages of clients' replies.
        """
        return pipeline

    def most_clusters(self, method: Method, config: Mapping[str, Any]) -> int | None:
        """Return the largest number of clusters that these options let a run find by itself.

        Args:
            method: whose options they are.
            config: what clients and server agreed on.

        Returns:
            None where there is no such limit, or the number is given.
        """
        return None

    def equip(self, method: Method, config: Mapping[str, Any], client: TrainingClient) -> None:
        """Give clients what this group needs of them.

        Args:
            method: whose options they are.
            config: what clients and server agreed on.
            client: the clients' object.
        """

    def needs_samples(self, method: Method) -> bool:
        """Return whether the configuration follows from each client's number of samples.

        Args:
            method: whose options they are.
        """
        return False

    @property
    def refused_methods(self) -> frozenset[str]:
        """Return the names of client methods that the clients of this run refuse to answer."""
        return frozenset()

    def fields_with_own_noise(self, method: Method) -> frozenset[str]:
        """Return the fields that clients add noise to before they pass the pipeline.

        Args:
            method: whose options they are.
        """
        return frozenset()

    def adds_noise(self, config: Mapping[str, Any]) -> bool:
        """Return whether anything that clients release under these options has noise.

        Args:
            config: what clients and server agreed on.
        """
        return False


def fields_with_own_noise(method: Method) -> frozenset[str]:
    """Return the fields that clients add noise to before they pass the pipeline.

    Args:
        method: whose options say so.
    """
    fields: set[str] = set()
    for options in option_groups(method):
        fields |= options.fields_with_own_noise(method)
    return frozenset(fields)


def refused_methods(method: Method) -> frozenset[str]:
    """Return the names of client methods that the clients of a run refuse to answer.

    Args:
        method: whose options say so.
    """
    refused: set[str] = set()
    for options in option_groups(method):
        refused |= options.refused_methods
    return frozenset(refused)

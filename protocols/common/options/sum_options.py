"""How sums over clients are formed: options, ranges of what is summed, and what does not work.

Every summed field has a range (`SumOptions.fields`), from which follow fixed point and packing. A
number beyond it is an error, and is clamped in runs with noise, where an error would be a release;
losses are always clamped. A method that needs single replies is refused, with the nearest choice
that works: a secure sum never becomes a plain one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from securecluster.core.validation import IN_PYTHON, AtLeast, KeyOf, Number
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.privacy.fixed_point import LARGEST_BOUND, SMALLEST_BOUND
from securecluster.privacy.pipeline import Pipeline
from securecluster.protections.registry import ADVISED, AGGREGATIONS, LEFT_SUMS, PLAIN
from securecluster.protocols.common.options import option_group
from securecluster.protocols.common.options.privacy_options import DISTRIBUTED
from securecluster.runtime.endpoint import COLLUDING, LOST, MINIMUM, SUM, releases_of

if TYPE_CHECKING:
    from securecluster.data.facts import Facts
    from securecluster.parties.method import Method
    from securecluster.protections.protection import SumPlan, SumProtection

AGGREGATION_NAMES = KeyOf(AGGREGATIONS, LEFT_SUMS)
# largest coordinate of an update without a clip norm
UNCLIPPED_BOUND = 8.0
# largest mean loss in nats that a secure sum tells from larger ones
LARGEST_LOSS = 1e6
# standard deviations of the noise that the bound of a noised update leaves room for, and room for
# rounding in the clip
DEVIATIONS = 8.0
ROUNDING = 1.01
# of a secure sum of ten or more, a tenth of the members is taken to work with the server besides
# (`all_pairs_threshold`), so a sum of ten cannot hide each among ten
LARGEST_LEAST = 9


@dataclass(kw_only=True)
class SumOptions(option_group.OptionGroup):
    """Options of sums over clients."""

    aggregation: Annotated[str, AGGREGATION_NAMES] = PLAIN
    """how sums of updates are formed: {aggregations}"""
    sum_bound: Annotated[
        float | None, Number(SMALLEST_BOUND, LARGEST_BOUND, high_in=True), IN_PYTHON
    ] = None
    """largest coordinate of one client's update, before its weight, that a secure sum can hold;
    None is the clip norm with room for its noise, or 8 without a clip
    """
    cohort_size: Annotated[int | None, AtLeast(0)] = None
    """secure sums only: number of clients of a cohort. Clients are divided into fixed cohorts, each
    of which is in a sum as a whole or not at all, since sums over ever other clients can be solved
    for each of them. None is the number of clients that a round asks, or a third of them where it
    asks all, up to ten; 0 is no cohorts (the report says how many clients can be solved for)
    """
    least_members: Annotated[int, AtLeast(MINIMUM), IN_PYTHON] = MINIMUM
    """secure sums only: members and survivors of the smallest sum that clients take part in. In a
    sum of n, n - 1 members that work together read the other's update, so against t of them take
    t + 2. Clients of smaller clusters train alone, or the server forms none
    """

    lost: Annotated[float, Number(0, 1), IN_PYTHON] = LOST
    """secure sums only: share of a sum's members that may be lost before it fails. The larger it
    is, the more neighbours share keys, and the more a sum costs
    """
    colluding: Annotated[float, Number(0, 1), IN_PYTHON] = COLLUDING
    """secure sums only: share of a sum's members that may work with the server. The larger it is,
    the more neighbours share keys, and the more a sum costs
    """

    words_: ClassVar[Mapping[str, str]] = {"aggregations": AGGREGATIONS.described()}
    over_all: ClassVar[bool] = False
    """Whether all secure sums are over all clients or a share of them, and none over clusters that
    the server forms. Each client then knows the cohorts, and refuses other lists."""
    other_than_plain: ClassVar[str] = ""
    """Why secure sums do not lead to the models of plain ones; empty where they do."""

    @property
    def protection(self) -> SumProtection:
        """Return what hides replies in sums.

        Raises:
            UsageError: there is no protection of this name.
        """
        AGGREGATION_NAMES.check(self, "aggregation")
        return AGGREGATIONS[self.aggregation]

    @property
    def plan(self) -> SumPlan:
        """Return what the sums have to bear."""
        return self.protection.plan(self.least_members, self.lost, self.colluding)

    @property
    def hide_replies(self) -> bool:
        """Return whether the server reads sums over several clients only."""
        return self.protection.hides

    def check(self, method: Method, clients: int) -> None:
        """Check the options of sums.

        Args:
            method: whose options they are.
            clients: m.

        Raises:
            UsageError: an option out of range, or a method that secure sums do not work with.
        """
        protection = self.protection
        if method.privacy.placement == DISTRIBUTED:
            reason = self.refusal_of_shares(method)
            if reason is not None:
                raise UsageError(reason)
        # of the methods that have it
        if getattr(method, "exact_weights", False) and not self.hide_replies:
            raise UsageError(
                "exact_weights is of secure sums, and plain sums have exact weights as they are: "
                f"take aggregation {ADVISED}, or leave exact_weights out"
            )
        protection.check()  # a missing package is named before anything is sent
        if protection.hides:
            self._check_works_with(method)
        self._check_cohorts(clients)
        self._check_members(clients)
        self._check_losses(clients)

    def _check_works_with(self, method: Method) -> None:
        """Raise UsageError for a method or an option that secure sums do not work with."""
        if method.privacy.placement == "central":
            raise UsageError(
                "a trusted server reads every reply before it adds noise, and secure sums hide the "
                "replies: take placement local, or aggregation plain"
            )
        reason = self.refusal(method)
        if reason is not None:
            raise UsageError(reason)

    def _check_cohorts(self, clients: int) -> None:
        """Raise UsageError for cohorts without secure sums, or of a size that cannot be."""
        if not self.cohort_size:
            return
        if self.cohort_size < MINIMUM:
            raise UsageError(
                f"cohort_size = {self.cohort_size} is not possible: a cohort has {MINIMUM} clients "
                "or more, and 0 is no cohorts"
            )
        if not self.hide_replies:
            raise UsageError(
                "cohort_size is of secure sums, and the server of plain ones reads every reply: "
                f"take aggregation {ADVISED}, or leave cohort_size out"
            )
        if self.cohort_size > clients:
            raise UsageError(
                f"cohort_size = {self.cohort_size} is more than the {clients} clients: take a "
                "smaller one, or leave it out"
            )

    def _check_members(self, clients: int) -> None:
        """Raise UsageError for a smallest sum without secure sums, or of a size that cannot be."""
        least_members = self.least_members
        if least_members == MINIMUM:
            return
        if least_members > LARGEST_LEAST:
            raise UsageError(
                f"least_members = {least_members} is not possible: it is a whole number from "
                f"{MINIMUM} to {LARGEST_LEAST}; sums over more are those of cohort_size"
            )
        if not self.hide_replies:
            raise UsageError(
                "least_members is of secure sums, and the server of plain ones reads every reply: "
                f"take aggregation {ADVISED}, or leave least_members out"
            )
        if least_members > clients:
            raise UsageError(
                f"least_members = {least_members} is more than the {clients} clients, so nothing "
                "could be summed: take a smaller one, or leave it out"
            )
        if self.cohort_size and self.cohort_size < least_members:
            raise UsageError(
                f"cohort_size = {self.cohort_size} is less than least_members = "
                f"{least_members}, so no cohort could be summed by itself: take a larger "
                "cohort_size, or leave it out"
            )

    def _check_losses(self, clients: int) -> None:
        """Raise UsageError for shares of lost and colluding clients that no sum of all bears."""
        if (self.lost, self.colluding) == (LOST, COLLUDING):
            return
        if not self.hide_replies:
            raise UsageError(
                "lost and colluding are of secure sums, and the server of plain ones reads every "
                f"reply: take aggregation {ADVISED}, or leave them out"
            )
        if not self.plan.bears(clients):
            raise UsageError(
                f"no secure sum of {clients} clients bears {self.lost:.0%} lost and "
                f"{self.colluding:.0%} colluding ones: plan for fewer of either"
            )

    def warn_of_losses(self, dropout: float, clients: int) -> None:
        """Warn where more clients are to be lost than secure sums are planned for.

        Args:
            dropout: probability that a client loses a reply.
            clients: m; sums over a few, in which all pairs share keys, bear more than is planned.
        """
        if not self.hide_replies or dropout <= self.lost:
            return
        if not self.plan.is_sparse(clients):
            return
        warnings.warn(
            f"secure sums are planned for {self.lost:.0%} lost members, and dropout is "
            f"{dropout:.0%}: sums that lose too many fail; give lost a larger share, in Python",
            SecureClusterWarning,
            stacklevel=2,
        )

    def refusal_of_shares(self, method: Method) -> str | None:
        """Return why clients' shares of the noise would not all be in secure sums.

        Args:
            method: whose options they are.

        Returns:
            One sentence; None where they would, and placement distributed is possible.
        """
        if not self.protection.adds_noise:
            able = [name for name, other in AGGREGATIONS.items() if other.adds_noise]
            return (
                "with placement distributed no client's reply has enough noise by itself, so sums "
                f"must be secure: take aggregation {' or '.join(able)}, or placement local"
            )
        noised = option_group.fields_with_own_noise(method)
        for name, release in sorted(releases_of(method.client).items()):
            if release.via == (SUM,) or not release.private or release.derived:
                continue
            if name in option_group.refused_methods(method):
                continue
            exact = [field for field in release.through if field not in noised]
            if exact:
                return (
                    f"clients of {method.name} also send {exact[0]} by itself ({name}), and with "
                    "placement distributed only sums have enough noise: take placement local, or "
                    "fedavg"
                )
        return None

    def refusal(self, method: Method) -> str | None:
        """Return why a method does not work with secure sums, and the nearest choice that does.

        Args:
            method: whose options they are.

        Returns:
            One sentence; None where the method works.
        """
        return None

    def weights_updates(self, method: Method) -> bool:
        """Return whether updates are multiplied by numbers of samples before they are summed.

        Args:
            method: whose options they are.
        """
        return not method.privacy.per_client

    def fields(self, method: Method, config: Mapping[str, Any]) -> dict[str, float]:
        """Return the largest magnitude of one client's number in each field that is summed.

        A method whose sums have further fields adds them. Rows that pass through the pipeline have
        32 bits in a secure sum, and other fields 64.

        Args:
            method: whose options they are.
            config: what clients and server agreed on.
        """
        samples = float(config.get("most_samples", 1))
        weight = 1.0
        if self.weights_updates(method):
            weight = samples
        return {"delta": float(config["sum_bound"]) * weight, "size": samples}

    def check_noise(self, method: Method, config: Mapping[str, Any], pipeline: Pipeline) -> None:
        """Check that sums over all clients have room for their noise.

        Args:
            method: whose options they are.
            config: what clients and server agreed on.
            pipeline: stages of clients' replies.

        Raises:
            UsageError: they do not fit the ring of secure sums.
        """
        noise = method.privacy.sum_noise(config)
        if noise is not None:
            noise.plan(pipeline.width(config["dimension"]), config["clients"])

    def agreed(self, method: Method, facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration with the range of a client's number in secure sums.

        The largest number of samples of a client is public then, unless updates are clipped: these
        count the same, and no number of samples leaves a client. With plain sums a configuration
        is as it was before there were others.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
            config: hyper-parameters with their defaults resolved.
        """
        if not self.hide_replies:
            left_out = (
                "aggregation",
                "sum_bound",
                "cohort_size",
                "exact_weights",
                "least_members",
                "least_choosers",
                "lost",
                "colluding",
            )
            return {name: value for name, value in config.items() if name not in left_out}
        if self.least_members == MINIMUM:
            # every client asks for as many, whatever it has agreed to
            config = {name: value for name, value in config.items() if name != "least_members"}
        for name, usual in (("lost", LOST), ("colluding", COLLUDING)):
            if config.get(name) == usual:
                config = {key: value for key, value in config.items() if key != name}
        privacy = method.privacy
        bound = self.sum_bound
        if bound is None:
            bound = UNCLIPPED_BOUND
            if privacy.per_client:
                noise = float(config["noise"])
                bound = float(config["clip"]) * (ROUNDING + DEVIATIONS * noise)
        agreed: dict[str, Any] = {"sum_bound": float(bound)}
        if not privacy.per_client:
            agreed["most_samples"] = max(facts.sizes)
        return {**config, **agreed}

    def least_cohort(self, method: Method) -> int:
        """Return the least number of clients of a cohort.

        Args:
            method: whose options they are.
        """
        return MINIMUM

    def needs_samples(self, method: Method) -> bool:
        """Return whether the bound of sums follows from the largest number of samples.

        Args:
            method: whose options they are.
        """
        return self.hide_replies and not method.privacy.per_client


@dataclass(kw_only=True)
class SumsOverAll(SumOptions):
    """Options of sums of a method whose secure sums are over all clients, or a share of them."""

    over_all: ClassVar[bool] = True


@dataclass(kw_only=True)
class CountedSums(SumsOverAll):
    """Options of sums of blocks, one for each of k clusters that clients keep to themselves."""

    least_choosers: Annotated[int, AtLeast(MINIMUM)] = 3
    """secure sums without noise only: least number of clients in a block of a sum, of a cluster or
    model; where fewer are in it, they send zeros. It is two more than how many clients may lie
    """

    def counts_first(self, method: Any) -> bool:
        """Return whether a sum of ones counts the clients of blocks before blocks are summed.

        Noise covers single rows, and an exact count would be a release that no noise covers.

        Args:
            method: whose options they are.
        """
        return self.hide_replies and not method.privacy.noisy

    def least_cohort(self, method: Any) -> int:
        """Return as many clients as fill all blocks, where clusters are of one size."""
        if not self.counts_first(method):
            return super().least_cohort(method)
        return self.least_choosers * int(method.k)

    def fields(self, method: Any, config: Mapping[str, Any]) -> dict[str, float]:
        """Add the counts, and the blocks with their weights."""
        fields = super().fields(method, config)
        return {**fields, "count": 1.0, "blocks": fields["delta"], "weight": fields["size"]}

    def agreed(self, method: Any, facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration, without what concerns counts where there are none."""
        agreed = super().agreed(method, facts, config)
        if not self.counts_first(method):
            agreed.pop("least_choosers", None)
        return agreed

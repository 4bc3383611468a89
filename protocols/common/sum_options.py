"""How sums over clients are formed: options, ranges of what is summed, and what does not work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from securecluster.core.lazy_torch import torch
from securecluster.core.validation import check_choice, check_number
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.pipeline import Pipeline
from securecluster.privacy.secure_sum.fixed_point import LARGEST_BOUND, SMALLEST_BOUND
from securecluster.protocols.common.dp_options import DISTRIBUTED, DPOptions
from securecluster.runtime.endpoint import MINIMUM, SUM, config_hash, releases_of
from securecluster.runtime.masked_replies import SumRanges
from securecluster.runtime.secure_sum_client import SecureSumService
from securecluster.runtime.secure_sums import SecureSums

PLAIN = "plain"
SECAGG = "secagg"
# largest coordinate of an update without a clip norm
UNCLIPPED_BOUND = 8.0
# largest mean loss in nats that a secure sum tells from larger ones
LARGEST_LOSS = 1e6
# standard deviations of the noise that the bound of a noised update leaves room for, and room for
# rounding in the clip
DEVIATIONS = 8.0
ROUNDING = 1.01


@dataclass(kw_only=True)
class SumOptions(DPOptions):
    """Options of sums over clients."""

    aggregation: str = PLAIN
    """how sums of updates are formed: plain (the server reads every reply and adds them) or secagg
    (clients mask their replies, so that the server reads sums over two or more of them only)
    """
    sum_bound: float | None = None
    """largest coordinate of one client's update, before its weight, that a secure sum can hold;
    None is the clip norm with room for its noise, or 8 without a clip
    """

    @property
    def sums_securely(self) -> bool:
        """Return whether sums are secure."""
        return self.aggregation == SECAGG

    @property
    def weights_updates(self) -> bool:
        """Return whether updates are multiplied by numbers of samples before they are summed."""
        return not self.per_client

    def check_sums(self, name: str, client: type) -> None:
        """Check the options of sums.

        Args:
            name: name of the protocol.
            client: class of its clients.

        Raises:
            UsageError: an option out of range, or a method that secure sums do not work with.
        """
        check_choice(self, aggregation=(PLAIN, SECAGG))
        if self.placement == DISTRIBUTED:
            self._check_distributed(name, client)
        if self.sum_bound is not None:
            check_number(self, "sum_bound", SMALLEST_BOUND, LARGEST_BOUND, high_in=True)
        if not self.sums_securely:
            return
        if self.placement == "central":
            raise UsageError(
                "a trusted server reads every reply before it adds noise, and secure sums hide the "
                "replies: take placement local, or aggregation plain"
            )
        reason = self.secure_sums_refusal()
        if reason is not None:
            raise UsageError(reason)

    def _check_distributed(self, name: str, client: type) -> None:
        """Raise UsageError where clients' shares of the noise would not all be in secure sums.

        Args:
            name: name of the protocol.
            client: class of its clients.
        """
        if not self.sums_securely:
            raise UsageError(
                "with placement distributed no client's reply has enough noise by itself, so sums "
                "must be secure: take aggregation secagg, or placement local"
            )
        covered = self.privacy_spec(1.0).fields
        for method, release in sorted(releases_of(client).items()):
            if release.via == (SUM,) or not release.private or release.derived:
                continue
            fields = [field for field in release.through if field not in covered]
            if fields:
                raise UsageError(
                    f"clients of {name} also send {fields[0]} by itself ({method}), and with "
                    "placement distributed only sums have enough noise: take placement local, or "
                    "fedavg"
                )

    def check_sum_noise(self, config: Mapping[str, Any], pipeline: Pipeline) -> None:
        """Check that sums over all clients have room for their noise.

        Args:
            config: what clients and server agreed on.
            pipeline: stages of clients' replies.

        Raises:
            UsageError: they do not fit the ring of secure sums.
        """
        noise = self.sum_noise(config)
        if noise is not None:
            noise.plan(pipeline.width(config["dimension"]), config["clients"])

    def secure_sums_refusal(self) -> str | None:
        """Return why this method does not work with secure sums, and the nearest choice that does.

        Returns:
            One sentence; None where the method works.
        """
        return None

    def sum_facts(self, federation: Federation, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return what clients and server must agree on for secure sums; nothing for plain ones.

        The largest number of samples of a client is public then, unless updates are clipped: these
        count the same, and no number of samples leaves a client.

        Args:
            federation: the clients and their data.
            config: hyper-parameters with their defaults resolved.
        """
        if not self.sums_securely:
            return {}
        bound = self.sum_bound
        if bound is None:
            bound = UNCLIPPED_BOUND
            if self.per_client:
                noise = float(config["noise"])
                bound = float(config["clip"]) * (ROUNDING + DEVIATIONS * noise)
        facts: dict[str, Any] = {"sum_bound": float(bound)}
        if not self.per_client:
            facts["most_samples"] = max(len(shard.y) for shard in federation.shards)
        return facts

    def sum_fields(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Return the largest magnitude of one client's number in each field that is summed.

        A method whose sums have further fields adds them. Rows that pass through the pipeline have
        32 bits in a secure sum, and other fields 64.

        Args:
            config: what clients and server agreed on.
        """
        samples = float(config.get("most_samples", 1))
        weight = 1.0
        if self.weights_updates:
            weight = samples
        return {"delta": float(config["sum_bound"]) * weight, "size": samples}

    def _sum_ranges(
        self, config: Mapping[str, Any], draws: NoiseStreams | None = None
    ) -> SumRanges:
        # Under noise an error would tell of the data, so numbers are clamped instead.
        return SumRanges(
            self.sum_fields(config),
            saturate=config["noise"] > 0,
            clamped=frozenset({"loss"}),
            noise=self.sum_noise(config, draws),
        )

    def secure_sum_service(
        self, config: Mapping[str, Any], keys: KeyRing, pipeline: Pipeline
    ) -> SecureSumService | None:
        """Return the clients' half of secure sums; None where sums are plain.

        Args:
            config: what clients and server agreed on.
            keys: the clients' keys.
            pipeline: stages of their replies, with the streams of their noise.
        """
        if not self.sums_securely:
            return None
        draws = None
        if pipeline.guard is not None:
            draws = pipeline.guard.draws
        ranges = self._sum_ranges(config, draws)
        return SecureSumService(config_hash(config), keys, ranges, MINIMUM, pipeline.shares)

    def aggregator(self, config: Mapping[str, Any]) -> SecureSums | None:
        """Return the server's half of secure sums; None where sums are plain.

        Args:
            config: what clients and server agreed on.
        """
        if not self.sums_securely:
            return None
        dtypes = {"float32": torch.float32, "float64": torch.float64}
        dtype = dtypes[config["dtype"]]
        return SecureSums(config_hash(config), self._sum_ranges(config), dtype, MINIMUM)

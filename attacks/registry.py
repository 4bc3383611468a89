"""Attacks by name: those of this project, and those that installed packages declare.

A package outside this project declares its attacks as entry points, in its pyproject.toml:

    [project.entry-points."securecluster.attacks"]
    mean-image = "my_package.mean_image:MeanImage"

Audits then run them beside the attacks of this project.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint

from securecluster.attacks.base import PROTECTIONS, REQUIREMENTS, Attack
from securecluster.core import installed_packages
from securecluster.errors import UsageError

GROUP = "securecluster.attacks"
ATTACKS = {  # module and class
    "centres-over-rounds": "on_models.centres:CentresOverRounds",
    "ckks-release": "ckks_release:CkksRelease",
    "cluster-identity": "on_models.clusters:ClusterIdentity",
    "cluster-property": "cluster_property:ClusterProperty",
    "crafted-model": "on_models.crafted:CraftedModel",
    "differencing": "differencing:Differencing",
    "dp-audit-eigenvectors": "release_audits:EigenvectorAudit",
    "dp-audit-gram": "release_audits:GramAudit",
    "dp-audit-losses": "release_audits:LossAudit",
    "dp-audit-one-run": "dp_audit:OneRunAudit",
    "dp-audit-signatures": "release_audits:SignatureAudit",
    "dp-audit-training": "release_audits:TrainingAudit",
    "dp-audit-two-worlds": "dp_audit:TwoWorldAudit",
    "gradient-inversion-analytic": "gradient_inversion:AnalyticInversion",
    "gradient-inversion-cosine": "gradient_inversion:CosineInversion",
    "gradient-inversion-dlg": "gradient_inversion:DeepLeakage",
    "hidden-cluster": "hidden_sums:HiddenCluster",
    "hidden-differencing": "hidden_sums:HiddenDifferencing",
    "hidden-label-counts": "hidden_sums:HiddenLabelCounts",
    "hidden-membership": "hidden_sums:HiddenMembership",
    "label-counts": "label_counts:LabelCounts",
    "label-distributions": "label_distributions:LabelDistributions",
    "linkage": "linkage:Linkage",
    "lone-blocks": "lone_blocks:LoneBlocks",
    "long-updates": "long_updates:LongUpdates",
    "low-bits": "low_bits:LowBits",
    "mask-invariants": "mask_invariants:MaskInvariants",
    "mask-known-plaintext": "mask_known_plaintext:MaskKnownPlaintext",
    "mask-public-model": "mask_public_model:MaskPublicModel",
    "mean-image": "subspaces:MeanImage",
    "membership-all-rounds": "on_models.all_rounds:AllRounds",
    "membership-cluster-model": "on_models.clusters:ClusterModelMembership",
    "membership-likelihood-ratio": "likelihood_ratio:LikelihoodRatio",
    "membership-likelihood-ratio-offline": "likelihood_ratio:OfflineLikelihoodRatio",
    "membership-loss-threshold": "loss_threshold:LossThreshold",
    "relevance-oracle": "relevance_oracle:RelevanceOracle",
    "repeated-mask": "repeated_mask:RepeatedMask",
    "repeated-seed": "repeated_seed:RepeatedSeed",
    "secure-sum-conformance": "secure_sum_conformance:SecureSumConformance",
    "signature-label-counts": "signatures:SignatureLabelCounts",
    "signature-membership": "signatures:SignatureMembership",
    "source-inference": "source_inference:SourceInference",
    "subspace-composition": "subspaces:SubspaceComposition",
    "subspace-membership": "subspaces:SubspaceMembership",
    "sums-over-rounds-clusters": "sums_over_rounds:ClustersOverRounds",
    "sums-over-rounds-labels": "sums_over_rounds:LabelsOverRounds",
    "sums-over-rounds-sizes": "sums_over_rounds:SizesOverRounds",
    "sums-single-coordinate": "single_coordinate:SingleCoordinates",
}
PARTS = installed_packages.Parts("attack", GROUP, ATTACKS)
DECLARED = ("name", "source", "needs", "scorer")
CHOICES = {"requires": REQUIREMENTS, "hidden_by": PROTECTIONS}  # what an attack may declare


def attack_names() -> list[str]:
    """Return the names of all attacks, those of this project first."""
    return [*ATTACKS, *sorted(PARTS.declared())]


def attack_named(name: str) -> Attack:
    """Return an attack.

    Args:
        name: of this project's or of an installed package's attack; or "module:Class" of any other,
            which is known by its own name from then on.

    Raises:
        UsageError: an unknown name, or a declaration that does not lead to an attack.
    """
    if ":" in name:
        name = PARTS.give(name, _loaded)
    if name in ATTACKS:
        module_name, _, class_name = ATTACKS[name].partition(":")
        module = importlib.import_module(f"securecluster.attacks.{module_name}")
        builtin: Attack = getattr(module, class_name)()
        return builtin
    return _loaded(PARTS.point(name))


def _loaded(point: EntryPoint) -> Attack:
    """Return the attack of an entry point.

    Raises:
        UsageError: it cannot be imported or made, is no attack, or has another name.
    """
    declaration, loaded = PARTS.loaded(point)
    if not (isinstance(loaded, type) and issubclass(loaded, Attack)):
        raise UsageError(f"{declaration}, is no Attack: name its class")
    missing = [attribute for attribute in DECLARED if not hasattr(loaded, attribute)]
    if missing:
        raise UsageError(f"{declaration}, has no {missing[0]}: set it in its class")
    if loaded.name != point.name:
        raise UsageError(
            f"{declaration}, is called {loaded.name!r} in its class: give both the same name"
        )
    for attribute, choices in CHOICES.items():
        values = getattr(loaded, attribute)
        wrong = [values] if isinstance(values, str) else sorted(set(values) - choices)
        if wrong:
            raise UsageError(
                f"{declaration}, has {wrong[0]!r} in {attribute}: give a set of constants of "
                f"securecluster.attacks.base, which are {', '.join(sorted(choices))}"
            )
    try:
        return loaded()
    except TypeError as error:
        raise UsageError(f"{declaration}, cannot be made without arguments: {error}") from None

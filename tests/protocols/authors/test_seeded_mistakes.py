"""A table of authors' mistakes: when each of them is caught, and by which words.

That what is right passes every check is tested in `test_outside_methods.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import mistaken
import mistaken_releases as releases
import pytest
from cases import exhaustive

from securecluster.errors import SecureClusterError
from securecluster.protocols import ClusteringProtocol
from securecluster.protocols.conformance import CHECKS, check, small_clients

RUN = "first run"
NOISY = "first run with noise"
TARGET = "first run with a target"
EXAMPLE = "first run with a target for examples"
NOISE: Mapping[str, Mapping[str, Any]] = {
    RUN: {},
    NOISY: {"clip": 1.0, "noise": 1.0},
    TARGET: {"clip": 1.0, "target_epsilon": 8.0},
    EXAMPLE: {"clip": 1.0, "target_epsilon": 8.0, "dp_unit": "example"},
}
WITHOUT_NOISE = r"{} would leave client 0 without noise, so that epsilon were infinite"


class Mistake(NamedTuple):
    """A class with one mistake, when it is caught, and by which words."""

    kind: type[ClusteringProtocol]
    caught: str  # one of `NOISE`, or the name of a check
    words: str  # a regular expression


MISTAKES = (
    Mistake(mistaken.Unmasked, TARGET, WITHOUT_NOISE.format(r"pretrain\.update")),
    Mistake(mistaken.Open, RUN, r"would send update without a mask: name it in through="),
    Mistake(mistaken.LittleNoise, "worlds-client", r"sensitivity of 0\.1, and a client's row has"),
    Mistake(mistaken.GlobalNoise, TARGET, WITHOUT_NOISE.format(r"pretrain\.update")),
    Mistake(mistaken.FixedNoise, TARGET, WITHOUT_NOISE.format(r"pretrain\.update")),
    Mistake(mistaken.UnusedNoise, TARGET, WITHOUT_NOISE.format(r"pretrain\.update")),
    Mistake(mistaken.Changed, TARGET, WITHOUT_NOISE.format(r"pretrain\.update")),
    Mistake(mistaken.Smuggled, "worlds-client", r"pretrain\.update still depends on data where"),
    Mistake(mistaken.ReadAgain, RUN, r"reads cohort\.inputs in a function that it gives to"),
    Mistake(mistaken.Kept, EXAMPLE, WITHOUT_NOISE.format(r"pretrain\.update")),
    Mistake(mistaken.KeptTraining, "worlds-example", r"pretrain\.update still depends on data"),
    Mistake(mistaken.Free, RUN, r"pretrain trains, and its @answers does not say so"),
    Mistake(mistaken.Derived, RUN, r"pretrain trains, and its @answers does not say so"),
    Mistake(mistaken.Wide, RUN, r"numbers or rows where 650 were expected"),
    Mistake(mistaken.NoiseAlone, NOISY, r"noise without a clip bounds nothing"),
    Mistake(mistaken.NoClip, "worlds-client", r"sensitivity of 0\.01, and a client's row has norm"),
    Mistake(mistaken.Global, "new-process", r"KeyError.*mistaken\.py:\d+.* no variable of a mod"),
    Mistake(mistaken.Peeking, RUN, r"self\.kept_federation, which only an object that"),
    Mistake(mistaken.Knowing, RUN, r"self\.kept_federation, which only an object that"),
    Mistake(mistaken.Uncounted, TARGET, r"which is more than in a run without data; leave target"),
    Mistake(mistaken.UntoldTraining, RUN, r"pretrain trains, and its @answers does not say"),
    # nothing tells a leak from a mistake here, but the text stays with the client over frames
    Mistake(mistaken.Loud, "bytes", r"ValueError: odd sample .*mistaken\.py:\d+"),
    Mistake(mistaken.Shy, RUN, r"not with these data"),
    Mistake(mistaken.FromOne, RUN, r"number the clusters from 0"),
    Mistake(mistaken.Ordered, "masks", r"not with the order or the values of their coordinates"),
    Mistake(mistaken.Random, "replay", r"draw from net\.randomness alone"),
    Mistake(mistaken.Forgetful, "resume", r"the clients' part in memory\(\) and recall\(\)"),
    Mistake(mistaken.View, "masks", r"under the mask permutation models are"),
    Mistake(mistaken.ExactChoice, TARGET, WITHOUT_NOISE.format(r"choose\.centre")),
    Mistake(mistaken.Note, RUN, r"may hold anything as Noted\.note: give it a bound"),
    Mistake(releases.NormBack, "worlds-client", r"pretrain\.update still depends on data where"),
    Mistake(releases.Top, "worlds-client", r"pretrain\.update still depends on data where"),
    Mistake(releases.Weighted, "worlds-client", r"pretrain\.update still depends on data where"),
    Mistake(releases.CountsInside, NOISY, r"reads cohort\.sizes in a function that it gives to"),
    Mistake(releases.BoundMethod, "worlds-client", r"a function that uses kept, which depends on"),
    Mistake(releases.UnseenBranch, "worlds-client", r"a function that uses rows, which depends on"),
    Mistake(releases.Reordered, TARGET, WITHOUT_NOISE.format(r"pretrain\.update")),
    Mistake(releases.OneOfTwo, "worlds-client", r"pretrain\.update still depends on data where"),
    Mistake(releases.SometimesTwice, "worlds-client", r"makes other releases or trainings with"),
    Mistake(releases.Refusing, "worlds-client", r"refuses some data and answers others, and who"),
    Mistake(releases.Board, "worlds-client", r"pretrain\.update still depends on data where"),
    Mistake(releases.File, "worlds-client", r"pretrain\.update still depends on data where"),
    Mistake(releases.Dict, "nodes", r"a pretrain frame could not be answered \(KeyError\)"),
    Mistake(releases.Helper, "worlds-client", r"a function that uses helper, which depends on"),
    Mistake(releases.Missing, "worlds-example", r"tell leaves note out with some data and not"),
    Mistake(releases.WhichSize, "worlds-example", r"tell\.size still depends on data where"),
    Mistake(releases.Firsts, "new-process", r"a run changes .*FirstsClient\.seen"),
    Mistake(releases.Cached, "worlds-client", r"pretrain\.update still depends on data where"),
    Mistake(releases.WrongRow, "replay", r"uses cohort\.labels for a client that was not called"),
    Mistake(releases.Standardised, RUN, r"make_client changes its clients' samples in memory"),
    Mistake(releases.StandardisedArray, "worlds-example", r"clients change their samples in"),
    Mistake(releases.Normalised, "worlds-example", r"the network of this training depends on"),
    Mistake(releases.Centred, "worlds-example", r"one example moves its row by"),
    Mistake(releases.OwnNorm, "worlds-client", r"asks for other noise with other data"),
    Mistake(releases.OwnReplace, "worlds-client", r"asks for other noise with other data"),
    Mistake(
        releases.LabelCounts, "worlds-example", r"replacing one example moves its row by 1\.41"
    ),
    Mistake(releases.Blanked, "worlds-example", r"blanking one example moves its row by 1, where"),
    Mistake(releases.Range, "worlds-example", r"one example moves its row by"),
    Mistake(releases.Median, "worlds-example", r"one example moves its row by"),
    Mistake(releases.ClassMean, "worlds-example", r"asks for other noise with other data"),
    Mistake(releases.Start, "worlds-example", r"the start of this training depends on data"),
    Mistake(releases.Plan, "worlds-example", r"the plan of this training depends on data"),
    Mistake(releases.Scale, "worlds-example", r"the scale of this training depends on data"),
    Mistake(releases.Pull, "worlds-example", r"the regularizer of this training depends on data"),
    Mistake(releases.Longer, "worlds-example", r"trains with noise and reads kept, which clients"),
    Mistake(releases.Sign, "worlds-example", r"trains with noise and reads kept, which clients"),
    Mistake(mistaken.NoBound, RUN, r"may hold anything as Boundless\.update: give it a bound"),
    Mistake(mistaken.Relayed, RUN, r"would bring a single client's reply to other clients"),
)
# What a client sends without noise makes ε infinite, also where nobody asked for a target.
EXACT = [mistake.kind for mistake in MISTAKES if "would leave" in mistake.words]

# trainings in two worlds take longest: by default those of every second mistake
IN_WORLDS = [mistake for mistake in MISTAKES if mistake.caught.startswith("worlds")]
MOST = [exhaustive(mistake) if mistake in IN_WORLDS[1::2] else mistake for mistake in MISTAKES]


def fit(kind: type[ClusteringProtocol], **params: Any) -> None:
    """Run a protocol for two rounds."""
    params = {"model": "linear", "epochs": 1, "k": 2, "rounds": 2, **params}
    kind(**params).fit(small_clients())


@pytest.mark.always
@pytest.mark.parametrize("mistake", MOST, ids=lambda mistake: mistake.kind.__name__)
def test_a_mistake_is_caught_by_a_sentence(mistake: Mistake) -> None:
    if mistake.caught in CHECKS:
        result = check(mistake.kind, only=[mistake.caught])[mistake.caught]
        assert result.outcome == "failed"
        assert re.search(mistake.words, result.sentence), result.sentence
        assert "\n" not in result.sentence
        return
    with pytest.raises(SecureClusterError, match=mistake.words) as told:
        fit(mistake.kind, mask="permutation", **NOISE[mistake.caught])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("mistake", EXACT, ids=lambda kind: kind.__name__)
def test_what_has_no_receipt_is_exact(mistake: type[ClusteringProtocol]) -> None:
    unit = "example" if mistake is mistaken.Kept else "client"
    made = mistake(
        model="linear", epochs=1, k=2, rounds=1, clip=1.0, noise=1.0, dp_unit=unit, mask="none"
    )
    assert made.fit(small_clients()).ledger_.epsilon == math.inf

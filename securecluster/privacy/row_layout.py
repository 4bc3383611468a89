"""What rows look like on the wire after a pipeline, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from securecluster.messaging.bounds import OCTETS, REAL, Form, Layout
from securecluster.privacy.compression.codecs import Coded
from securecluster.privacy.masking.sealing import OVERHEAD
from securecluster.privacy.pipeline import Pipeline, Widening


def layout(pipeline: Pipeline, itemsize: int) -> Layout:
    """Return the function that says what a row is laid out as when it has left its client.

    Args:
        pipeline: the stages of the run.
        itemsize: bytes of a number of a model.

    Returns:
        (field of a reply, shape of a row before the pipeline, whether it is sealed where the run
        seals) -> its form.
    """

    def form(name: str, shape: Sequence[int], sealed: bool) -> Form:
        own = pipeline.of(name)
        *lead, d = shape
        if sealed and pipeline.seal is not None:
            numbers = math.prod(lead) * own.room(d)
            return Form(OCTETS, (numbers * itemsize + OVERHEAD,))
        for stage in own.stages:
            if isinstance(stage, Coded):
                return Form(OCTETS, (*lead, stage.size))
            d = stage.width(d) if isinstance(stage, Widening) else d
        return Form(REAL, (*lead, d))

    return form

"""Layout of rows on the wire after a pipeline, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from securecluster.messaging.bounds import OCTETS, REAL, Form, Layout
from securecluster.privacy.compression.codecs import Coded
from securecluster.privacy.masking.sealing import OVERHEAD
from securecluster.privacy.pipeline import Pipeline, Widening


def layout(pipeline: Pipeline, itemsize: int) -> Layout:
    """Return the function that gives the form of a row that has left its client.

    Args:
        pipeline: stages of the run.
        itemsize: bytes of a number of a model.

    Returns:
        (field of a reply, shape of a row before the pipeline, whether it is sealed where the run
        seals) -> its form.
    """

    def form(name: str, shape: Sequence[int], sealed: bool) -> Form:
        field_pipeline = pipeline.of(name)
        *lead, d = shape
        if sealed and pipeline.seal is not None:
            # A sealed row is bytes of its numbers and an authentication tag.
            numbers = math.prod(lead) * field_pipeline.buffer_width(d)
            return Form(OCTETS, (numbers * itemsize + OVERHEAD,))
        for stage in field_pipeline.stages:
            # Codes are the last stage, so their size is final.
            if isinstance(stage, Coded):
                return Form(OCTETS, (*lead, stage.size))
            if isinstance(stage, Widening):
                d = stage.width(d)
        return Form(REAL, (*lead, d))

    return form

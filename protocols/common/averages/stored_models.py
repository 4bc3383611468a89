"""Models that a server stores under the clients' mask, opened by the owner of a fitted result."""

from __future__ import annotations

from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError
from securecluster.parties.deployment import Deployment
from securecluster.parties.method import Method
from securecluster.protocols.common.messages import ModelDelta
from securecluster.results.fitted_state import FittedState


def opened(method: Method, fitted: FittedState, posted: ModelDelta) -> torch.Tensor:
    """Return the model θ, (d,), of a displacement that the server stores.

    It needs the clients' keys, which only the owner of a fitted protocol has.

    Args:
        method: with the hyper-parameters of the run.
        fitted: the state at the end of the run.
        posted: the displacement, masked where updates are.

    Raises:
        UsageError: the server stores no such model.
    """
    if not len(posted.displacement):
        raise UsageError("this model was not kept: run with tree=True, and with members that reply")
    deployment = Deployment(method, fitted.learned.config)
    pipeline = deployment.pipeline()
    # All clients share one mask seed.
    for seed in list(fitted.clients.secrets.seed.values())[:1]:
        pipeline.unlock(seed)
    start = deployment.initial_model().initial().to(posted.displacement.dtype)
    return start + pipeline.inverse(posted.displacement, posted.step)

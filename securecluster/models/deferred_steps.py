"""Several steps of SGD on a wide dense layer, whose weights are read and written once.

A mini-batch of ten samples reads all of a wide layer's weights for twenty operations a number, and
writes them again. In a window of steps the gradients G_s (n, o) and inputs X_s (n, i) of earlier
steps say what the weights are, W_t = W_0 − η Σ_{s<t} G_sᵀ X_s, so that

    X_t W_tᵀ = X_t W_0ᵀ − η Σ_{s<t} (X_t X_sᵀ) G_s,

where X_t W_0ᵀ and X_t X_sᵀ of all steps are products of many rows, and so is the one change of W at
the end. The steps are those of SGD; only their sums are formed in another order. The idea is ours;
that a step is a product of low rank is plain backpropagation.
"""

from __future__ import annotations

import torch

from securecluster.models.fused_layers import Params, Stack, cross_entropy_gradient
from securecluster.models.optimizers import Optimizer

# weights of the smallest layer for which the products of a window pay
SMALLEST = 1 << 16
FEWEST_STEPS = 4  # in a window; fewer gain nothing


def window(stack: Stack, params: Params, batch_size: int) -> int:
    """Return the number of SGD steps whose changes of the first dense layer wait for each other.

    Products of a window's inputs with each other cost as much as the layer's own where there are as
    many rows as outputs. Half as many are allowed.

    Args:
        stack: the layers.
        params: parameters (b, …) by name.
        batch_size: samples of a step.

    Returns:
        The number, or 0 where it would not pay.
    """
    dense = stack.first_dense
    if dense is None or stack.convolves:
        return 0
    outputs, inputs = params[dense.weight].shape[1:]
    if outputs * inputs < SMALLEST:
        return 0
    rows = min(outputs, inputs) // 2
    steps = rows // max(1, batch_size)
    if steps < FEWEST_STEPS:
        return 0
    return steps


class DeferredSteps:
    """A window of SGD steps of k clients, without momentum.

    Args:
        stack: the layers; the first one with weights is dense.
        params: parameters (k, …) by name; all but the weights of that layer change at each step,
            and these with `finish`.
        x: samples of all steps, (k, R, …), which may be overwritten.
        lr: learning rate η.
        equal: True if all clients' weights are equal, so that one product serves them all.
    """

    def __init__(
        self, stack: Stack, params: Params, x: torch.Tensor, lr: float, equal: bool
    ) -> None:
        dense = stack.first_dense
        assert dense is not None
        first = stack.layers.index(dense)
        for layer in stack.layers[:first]:
            x, _ = layer.forward(params, x)
        weights = params[dense.weight]  # (k, o, i)
        self._dense = dense
        self._layers = stack.layers[first + 1 :]
        self._params = params
        self._x = x
        self._lr = lr
        # Weights that are equal are read once for all clients, and not once for each.
        if equal:
            outputs = torch.mm(x.flatten(0, 1), weights[0].T)
            self._outputs = outputs.view(*x.shape[:2], -1)
        else:
            self._outputs = torch.bmm(x, weights.mT)
        # all inputs with each other, though only those with earlier ones are used: one product of
        # many rows takes less time than a product a step
        self._similarity = torch.bmm(x, x.mT)  # (k, R, R)
        # zeros for clients without a step, whose rows then change nothing
        self._gradients = torch.zeros_like(self._outputs)

    def step(
        self,
        rows: slice,
        y: torch.Tensor,
        weight: torch.Tensor,
        optimizer: Optimizer,
    ) -> None:
        """Make one step of the first clients.

        Args:
            rows: of this step among those of the window; all rows before them were in steps before.
            y: labels of the clients that still train, (a, n).
            weight: weight of each loss, (a, n).
            optimizer: plain SGD on the same parameters.
        """
        active = len(y)
        params = {name: value[:active] for name, value in self._params.items()}
        out = self._output(rows, active)
        saved = []
        if self._dense.bias is not None:
            out = out.add_(params[self._dense.bias][:, None])
        for layer in self._layers:
            out, saved_by_layer = layer.forward(params, out)
            saved.append(saved_by_layer)
        gradient = cross_entropy_gradient(out, y).mul_(weight[..., None])
        optimizer.begin()
        for layer, saved_by_layer in zip(reversed(self._layers), reversed(saved), strict=True):
            gradient = layer.backward(params, gradient, saved_by_layer, optimizer, True)
        if self._dense.bias is not None:
            optimizer.value(self._dense.bias, gradient.sum(1))
        self._gradients[:active, rows] = gradient

    def _output(self, rows: slice, active: int) -> torch.Tensor:
        """Return the layer's output without its bias, under the weights of this step, (a, n, o)."""
        out = self._outputs[:active, rows]
        earlier = slice(0, rows.start)
        if rows.start == 0:
            return out
        # X_t X_sᵀ of all earlier steps s, times their gradients: the second term of X_t W_tᵀ
        similarity = self._similarity[:active, rows, earlier]
        gradients = self._gradients[:active, earlier]
        return torch.baddbmm(out, similarity, gradients, alpha=-self._lr)

    def finish(self) -> None:
        """Change the weights by all steps of the window."""
        weights = self._params[self._dense.weight]
        weights.baddbmm_(self._gradients.mT, self._x, alpha=-self._lr)

"""Several steps of SGD on a wide dense layer, whose weights change once at the end.

A mini-batch of ten samples reads all of a wide layer's weights for twenty operations a number, and
writes them again. In a window of steps the gradients G_s (n, o) and inputs X_s (n, i) of earlier
steps say what the weights are, W_t = W_0 − η Σ_{s<t} G_sᵀ X_s, so that

    X_t W_tᵀ = X_t W_0ᵀ − η Σ_{s<t} (X_t X_sᵀ) G_s,
    G_t W_t  = G_t W_0  − η Σ_{s<t} (G_t G_sᵀ) X_s,

the second for the layers before. The steps are those of SGD; only their sums are formed in another
order. W_0 is the same for all clients that start from one model, so that one product of many rows
serves them all, and the change of W at the end is one product of all steps' rows.

Where no layer before has weights, the inputs of all steps are known, and X_t W_0ᵀ and X_t X_sᵀ of
a whole window are one product each. Layers before that have weights, convolutions, take one client
and one step at a time.

The idea is ours; that a step is a product of low rank is plain backpropagation.
"""

from __future__ import annotations

from typing import Any

import torch

from securecluster.models.fused_layers import Params, Stack, kernels
from securecluster.models.optimizers import Optimizer, Sgd
from securecluster.models.products import product, products

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
    if dense is None:
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
        stack: the layers, one of which is dense.
        params: parameters (k, …) by name; all but the weights of the first dense layer change at
            each step, and these with `finish`.
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
        self._before = stack.layers[:first]
        self._dense = dense
        self._after = stack.layers[first + 1 :]
        self._output_gradients = stack.output_gradients
        self._params = params
        self._lr = lr
        weights = params[dense.weight]  # (k, o, i)
        # W_0, which no step changes; equal weights are read once for all clients
        self._weights = weights[:1] if equal else weights
        # by client: the parameters of the layers before, and their optimizer; kernels are copies in
        # the layout of convolutions until the end of the window
        self._clients: list[tuple[Params, Sgd]] = []
        self._first = stack.first_with_weights
        self._inputs_known = self._first == first
        if self._inputs_known:
            for layer in self._before:
                x, _ = layer.forward(params, x)
            self._x = x
            self._outputs = self._times(x, self._weights.mT)
            # all inputs with each other, though only those with earlier ones are used: one product
            # of many rows takes less time than a product a step
            self._similarity = products(x, x.mT)  # (k, R, R)
        else:
            clients, rows = x.shape[:2]
            self._samples = x
            self._x = x.new_zeros(clients, rows, weights.shape[2])
            for k in range(clients):
                client_params = {name: value[k : k + 1] for name, value in params.items()}
                client_params |= kernels(client_params)
                self._clients.append((client_params, Sgd(client_params, lr)))
        # zeros for clients without a step, whose rows then change nothing
        self._gradients = x.new_zeros(*x.shape[:2], weights.shape[1])

    def step(
        self, rows: slice, y: torch.Tensor, weight: torch.Tensor, optimizer: Optimizer
    ) -> None:
        """Make one step of the first clients.

        Args:
            rows: of this step among those of the window; all rows before them were in steps before.
            y: targets of the clients that still train, (a, n, …).
            weight: weight of each loss, (a, n).
            optimizer: plain SGD on the same parameters.
        """
        active = len(y)
        params = {name: value[:active] for name, value in self._params.items()}
        saved_before = []
        if not self._inputs_known:
            saved_before = self._compute_inputs(rows, active)
        out = self._output(rows, active)
        if self._dense.bias is not None:
            out = out.add_(params[self._dense.bias][:, None])
        saved = []
        for layer in self._after:
            out, saved_by_layer = layer.forward(params, out)
            saved.append(saved_by_layer)
        gradient = self._output_gradients(out, y).mul_(weight[..., None])
        optimizer.begin()
        for layer, saved_by_layer in zip(reversed(self._after), reversed(saved), strict=True):
            gradient = layer.backward(params, gradient, saved_by_layer, optimizer, True)
        if self._dense.bias is not None:
            optimizer.value(self._dense.bias, gradient.sum(1))
        self._gradients[:active, rows] = gradient
        if not self._inputs_known:
            self._step_before(self._input_gradient(rows, gradient), saved_before)

    def finish(self) -> None:
        """Change the weights by all steps of the window."""
        weights = self._params[self._dense.weight]
        # client by client, whose change is still in cache when it is added
        for client_weights, gradients, x in zip(weights, self._gradients, self._x, strict=True):
            client_weights.sub_(product(gradients.T, x), alpha=self._lr)
        for k, (params, _) in enumerate(self._clients):
            for name, kernel in kernels(params).items():
                self._params[name][k : k + 1].copy_(kernel)

    def _output(self, rows: slice, active: int) -> torch.Tensor:
        """Return the layer's output without its bias, under the weights of this step, (a, n, o)."""
        earlier = slice(0, rows.start)
        if self._inputs_known:
            out = self._outputs[:active, rows]
            similarity = self._similarity[:active, rows, earlier]
        else:
            x = self._x[:active, rows]
            out = self._times(x, self._weights.mT)
            similarity = torch.bmm(x, self._x[:active, earlier].mT)
        if rows.start == 0:
            return out
        gradients = self._gradients[:active, earlier]
        # X_t X_sᵀ of all earlier steps s, times their gradients: the second term of X_t W_tᵀ
        return torch.baddbmm(out, similarity, gradients, alpha=-self._lr)

    def _input_gradient(self, rows: slice, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient at the layer's input, under the weights of this step, (a, n, i).

        Args:
            rows: of this step.
            gradient: at the layer's output, (a, n, o).
        """
        grad_input = self._times(gradient, self._weights)
        if rows.start == 0:
            return grad_input
        active = len(gradient)
        earlier = slice(0, rows.start)
        similarity = torch.bmm(gradient, self._gradients[:active, earlier].mT)
        return grad_input.baddbmm_(similarity, self._x[:active, earlier], alpha=-self._lr)

    def _compute_inputs(self, rows: slice, active: int) -> list[list[Any]]:
        """Compute the inputs of this step, client by client.

        Args:
            rows: of this step.
            active: number of clients that still train.

        Returns:
            For each client, what each layer's backward pass needs.
        """
        saved = []
        for k in range(active):
            params, _ = self._clients[k]
            x = self._samples[k : k + 1, rows]
            saved_by_layers = []
            for layer in self._before:
                x, saved_by_layer = layer.forward(params, x)
                saved_by_layers.append(saved_by_layer)
            self._x[k : k + 1, rows] = x
            saved.append(saved_by_layers)
        return saved

    def _step_before(self, grad_input: torch.Tensor, saved: list[list[Any]]) -> None:
        """Step the layers before the dense one, client by client.

        Args:
            grad_input: gradient at the dense layer's input, (a, n, i).
            saved: what `_compute_inputs` returned.
        """
        for k, saved_by_layers in enumerate(saved):
            params, optimizer = self._clients[k]
            gradient = grad_input[k : k + 1]
            for number in reversed(range(self._first, len(self._before))):
                # No gradient is needed below the first layer with weights.
                needed = number > self._first
                layer = self._before[number]
                saved_by_layer = saved_by_layers[number]
                gradient = layer.backward(params, gradient, saved_by_layer, optimizer, needed)

    def _times(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return rows times weights.

        Args:
            rows: of each client, (a, n, p).
            weights: of each client, or one for all of them, (k or 1, p, q).
        """
        if len(weights) > 1:
            return products(rows, weights[: len(rows)])
        pooled = product(rows.flatten(0, 1), weights[0])
        return pooled.view(*rows.shape[:2], -1)

"""Networks as functions of one flat vector."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.models import architectures, validation
from securecluster.models.objectives import Language, Trajectory
from securecluster.models.validation import FlatModel, prepare_module

IMAGE = (1, 16, 16)


def flattened(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *parts)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(16), nn.BatchNorm1d(16, track_running_stats=False)],
    ids=["running", "batch only"],
)
def test_batch_norm_is_refused_by_name(norm: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:

    def normed(shape: object, classes: int) -> nn.Module:
        return flattened(norm, nn.Linear(16, classes))

    monkeypatch.setitem(architectures.IMAGES, "normed", normed)
    with pytest.raises(UsageError, match=r"'normed' has BatchNorm1d.*GroupNorm") as caught:
        validation.build("normed", (1, 4, 4), 3, Randomness(0))
    assert "\n" not in str(caught.value)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'linear'"):
        validation.build("linaer", (4,), 2, Randomness(0))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", architectures.IMAGES)
def test_initial_weights_follow_the_seed_alone(name: str) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one = validation.build(name, IMAGE, 3, Randomness(0)).initial()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(one, validation.build(name, IMAGE, 3, Randomness(0)).initial())
    assert not torch.equal(one, validation.build(name, IMAGE, 3, Randomness(1)).initial())
    # float32 has few values near 0, and group norm starts at 1
    assert one.unique().numel() > len(one) // 3


@pytest.mark.few(1)
@pytest.mark.parametrize("name", architectures.IMAGES)
def test_views_are_torchs_own_parameters(name: str) -> None:
    flat = validation.build(name, IMAGE, 4, Randomness(1))
    assert torch.equal(
        flat.initial(), nn.utils.parameters_to_vector(flat.module.parameters()).detach()
    )
    vector = normal(flat.dimension).float()
    module = copy.deepcopy(flat.module)
    nn.utils.vector_to_parameters(vector, module.parameters())
    views = flat.views(vector)
    assert list(views) == [n for n, _ in module.named_parameters()]
    assert all(torch.equal(views[n], p) for n, p in module.named_parameters())
    assert torch.equal(torch.cat([v.flatten() for v in views.values()]), vector)
    first = next(iter(flat.shapes))
    views[first][...] = 7.0
    assert (vector[: flat.shapes[first].numel()] == 7).all()
    rows = normal(2, flat.dimension).float()
    assert all(torch.equal(v[1], flat.views(rows[1])[n]) for n, v in flat.views(rows).items())


def _tied() -> nn.Module:
    relu = nn.ReLU()
    return flattened(nn.Linear(16, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 3))


def _repeated() -> nn.Module:
    layer = nn.Linear(16, 16)
    return flattened(layer, nn.ReLU(), layer, nn.Linear(16, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: architectures.mlp((1, 4, 4), 3),
    "linear": lambda: architectures.linear((1, 4, 4), 3),
    "deep": lambda: flattened(
        nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    ),
    "no bias": lambda: flattened(nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)),
    "tanh": lambda: flattened(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)),
    "cnn": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
    "one relu used twice": _tied,
    "one linear used twice": _repeated,
    "linear before flatten": lambda: nn.Sequential(
        nn.Linear(4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ),
    "flatten of some axes": lambda: nn.Sequential(
        nn.Flatten(3), nn.Linear(4, 2), nn.Flatten(), nn.Linear(8, 3)
    ),
}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_stacked_models_compute_what_each_module_does(make: Callable[[], nn.Module]) -> None:
    flat = FlatModel(make().double())
    rows, x = normal(4, flat.dimension), normal(4, 6, 1, 4, 4)
    found = flat.stacked(flat.views(rows), x)
    for row, own, outputs in zip(rows, x, found, strict=True):
        module = copy.deepcopy(flat.module)
        nn.utils.vector_to_parameters(row.clone(), module.parameters())
        torch.testing.assert_close(outputs, module(own), rtol=0, atol=1e-12)


class Own(nn.Module):
    """A user's module: two layers, with something in between."""

    def __init__(self, between: nn.Module | None = None, outputs: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, outputs)
        self.between = between or nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.between(self.first(x.flatten(1))))
        return out


class Counter(nn.Module):
    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.calls: torch.Tensor
        if buffer:
            self.register_buffer("calls", torch.zeros(()))
        else:
            self.calls = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x if "calls" in self._buffers else x * self.calls


class Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Branch(nn.Module):
    """vmap refuses data-dependent control flow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.detach().abs().max()) >= 0 else -x


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted: torch.Tensor = x + self.shift
        return shifted


def test_a_users_own_module_keeps_its_weights_and_is_not_touched() -> None:
    module = Own()
    flat = prepare_module(module, (1, 4, 4), 3)
    assert torch.equal(flat.initial(), nn.utils.parameters_to_vector(module.parameters()).detach())
    assert flat.together
    flat.module.first.weight.data += 1  # type: ignore[union-attr, operator]
    assert not torch.equal(
        flat.initial(), nn.utils.parameters_to_vector(module.parameters()).detach()
    )
    built = validation.build(module, (1, 4, 4), 3, Randomness(0))
    assert torch.equal(built.initial(), prepare_module(module, (1, 4, 4), 3).initial())


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Own(nn.BatchNorm1d(8)), "BatchNorm1d.*GroupNorm"),
        (Own(nn.InstanceNorm1d(8, track_running_stats=True)), "InstanceNorm1d.*GroupNorm"),
        (nn.Sequential(nn.RReLU(), nn.Flatten(), nn.Linear(16, 3)), "RReLU.*LeakyReLU"),
        (Own(Counter(buffer=True)), "changes its buffer 'between.calls'"),
        (Own(Counter(buffer=False)), "two outputs for one input"),
        (Own(Centred()), "depends on the others of its mini-batch"),
        (Own(outputs=2), "must give one row of 3 logits"),
        (nn.Sequential(nn.Flatten(0), nn.Linear(48, 3)), r"gives \(3,\) for 3 samples"),
        (nn.Linear(7, 3), r"does not take samples of shape \(1, 4, 4\)"),
        (flattened(nn.LazyLinear(3)), "lazy layers"),
        (Own().requires_grad_(False), "no parameter that trains"),
        (nn.Flatten(), "no parameter that trains"),
        ("what", "unknown model 'what'"),
        (7, "a name or an nn.Module, not int"),
    ],
)
def test_modules_that_clients_cannot_train_are_refused_in_one_sentence(
    module: nn.Module, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        validation.build(module, (1, 4, 4), 3, Randomness(0))
    assert "\n" not in str(caught.value)


class Does(nn.Module):
    """A layer and what a user's forward pass makes of it."""

    def __init__(
        self,
        forward: Callable[[nn.Module, torch.Tensor], object],
        layer: nn.Module | None = None,
        extra: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.does = layer or nn.Linear(16, 3), forward
        if extra is not None:
            self.extra = extra

    def forward(self, x: torch.Tensor) -> object:
        return self.does(self.layer, x.flatten(1))


def _uncopied() -> nn.Module:
    module = Own()
    module.lock = threading.Lock()  # type: ignore[assignment]
    return module


def _with_nan() -> nn.Module:
    module = Own()
    module.first.weight.data[0, 0] = float("nan")
    return module


def _looked_up(**options: object) -> nn.Module:
    return Does(lambda table, x: table((9 * x).long()).mean(1), nn.Embedding(10, 3, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Does(lambda layer, x: layer(x).squeeze()), r"gives \(3,\) for 1 sample:"),
        (
            lambda: Does(
                lambda layer, x: layer(nn.functional.batch_norm(x, None, None, training=True))
            ),
            "more than 1 value per channel",
        ),
        (lambda: Does(torch.no_grad()(lambda layer, x: layer(x))), "has no gradient: keep no_grad"),
        (
            lambda: Does(lambda layer, x: torch.exp(layer(x)).add_(1)),
            "has no gradient.*inplace operation",
        ),
        (lambda: _looked_up(sparse=True), "has no gradient.*sparse=True"),
        (lambda: _looked_up(max_norm=0.1), "changes its parameters.*max_norm"),
        (
            lambda: Own(
                Does(lambda layer, x: x, extra=nn.Parameter(torch.ones(2, dtype=torch.complex64)))
            ),
            "complex parameters",
        ),
        (lambda: nn.DataParallel(Own()), "the module it was made from"),
        (_uncopied, "cannot be copied: cannot pickle"),
        (_with_nan, "weights that are not finite"),
    ],
)
def test_what_would_fail_only_in_training_is_refused_before(
    make: Callable[[], nn.Module], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        validation.build(make(), (1, 4, 4), 3, Randomness(0))
    assert "\n" not in str(caught.value)


def test_a_forward_pass_that_fails_on_the_data_is_told_in_one_sentence() -> None:
    flat = prepare_module(_looked_up(), (1, 4, 4), 3)
    with pytest.raises(
        UsageError, match=r"Does does not take samples of shape \(1, 4, 4\): index out of range"
    ):
        flat.call(flat.views(flat.initial()), torch.full((2, 1, 4, 4), 5.0))


def test_what_vmap_cannot_take_back_trains_one_client_after_the_other() -> None:
    flat = prepare_module(
        Does(lambda layer, x: checkpoint(layer, x, use_reentrant=False)), (1, 4, 4), 3
    )
    assert not flat.together


def _shared_dropout() -> nn.Module:
    dropout = nn.Dropout(0.5)
    return flattened(nn.Linear(16, 9), dropout, nn.Linear(9, 9), dropout, nn.Linear(9, 3))


def _tied_weights() -> nn.Module:
    module = flattened(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))
    module[3].weight = module[1].weight
    return module


def _frozen() -> nn.Module:
    module = Own(Constant())
    module.first.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    "make",
    [Own, _tied_weights, _repeated, _frozen, _shared_dropout],
    ids=lambda make: make.__name__,
)
def test_a_state_dict_loads_into_the_users_own_module(make: Callable[[], nn.Module]) -> None:
    module, target = make(), make().eval()
    flat = prepare_module(module, (1, 4, 4), 3)
    row, x = normal(flat.dimension).float(), normal(5, 1, 4, 4).float()
    target.load_state_dict(flat.state_dict(row), strict=True)
    torch.testing.assert_close(target(x).detach(), flat.call(flat.views(row), x))


def test_a_parameter_without_dimensions_is_one_number() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * self.inner(x)

    module, x = Scaled(), torch.ones(4, 3)
    flat = FlatModel(module)
    row = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(flat.call(flat.views(row), x), module(x))
    torch.testing.assert_close(
        flat.views(torch.stack([row, row]))["scale"], torch.tensor([2.0, 2.0])
    )


def test_the_processs_default_number_type_does_not_matter() -> None:
    module = Own()
    torch.set_default_dtype(torch.float64)
    try:
        named = validation.build("mlp", (4,), 3, Randomness(0))
        own = prepare_module(module, (1, 4, 4), 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(named.initial(), validation.build("mlp", (4,), 3, Randomness(0)).initial())
    assert torch.equal(own.initial(), prepare_module(module, (1, 4, 4), 3).initial())


def test_what_vmap_refuses_trains_one_client_after_the_other() -> None:
    assert not prepare_module(Own(Branch()), (1, 4, 4), 3).together
    assert prepare_module(Own(), (1, 4, 4), 3).together


def test_constant_buffers_are_welcome_and_follow_the_data() -> None:
    flat = prepare_module(Own(Constant()), (1, 4, 4), 3).to(torch.device("cpu"), torch.float64)
    assert flat.dimension == 16 * 8 + 8 + 8 * 3 + 3
    assert flat.call(flat.views(flat.initial()), normal(2, 16)).dtype == torch.float64


def test_frozen_parameters_stay_out_of_the_vector() -> None:
    module = Own()
    module.first.requires_grad_(False)
    flat = prepare_module(module, (1, 4, 4), 3)
    assert list(flat.shapes) == ["last.weight", "last.bias"] and flat.dimension == 27
    x, row = normal(5, 16).float(), normal(27).float()
    expected = torch.tanh(module.first(x)) @ row[:24].view(3, 8).T + row[24:]
    torch.testing.assert_close(flat.call(flat.views(row), x), expected.detach())


def test_an_evaluating_module_trains_all_the_same() -> None:
    module = flattened(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 3)).eval()
    flat = prepare_module(module, (1, 4, 4), 3)
    views, x = flat.views(flat.initial()), normal(4, 16).float()
    assert not torch.equal(
        flat.call(views, x, torch.tensor(1)), flat.call(views, x, torch.tensor(2))
    )
    torch.testing.assert_close(flat.call(views, x), module(x).detach())


class Keeping(nn.Tanh):
    """As a hook that looks at activations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(super().forward(x))
        return self.seen[-1]


def test_the_checks_leave_nothing_in_a_module() -> None:
    assert prepare_module(Own(Keeping()), (1, 4, 4), 3).copy().module.between.seen == []  # type: ignore[union-attr]


def test_a_description_sees_what_is_frozen_and_constants_that_are_not_saved() -> None:
    one, two, three = (copy.deepcopy(module) for module in [Own(Constant())] * 3)
    two.first.requires_grad_(False)
    three.between.register_buffer("shift", torch.ones(8), persistent=False)
    four = copy.deepcopy(three)
    four.between.shift += 1  # type: ignore[operator]
    told = [json.dumps(validation.describe(module)) for module in (one, two, three, four)]
    assert len(set(told)) == 4


def test_a_description_tells_modules_apart_and_is_json() -> None:
    one, two = Own(), Own()
    told = validation.describe(one)
    assert json.loads(json.dumps(told)) == told
    assert told["parameters"]["last.weight"] == [3, 8]
    assert told == validation.describe(copy.deepcopy(one)) != validation.describe(two)
    assert validation.describe("mlp") == "mlp"
    extra = Own(Stateful())
    assert validation.describe(extra) == validation.describe(copy.deepcopy(extra))


class Stateful(nn.Tanh):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}


class _Scaled(nn.Module):
    """A layer with a parameter of its own, and no way to draw it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


class _Drawn(_Scaled):
    def reset_parameters(self) -> None:
        self.scale.data.normal_(5, 0.01)


class _Failing(_Scaled):
    def reset_parameters(self) -> None:
        raise ZeroDivisionError("nothing to divide")


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)[:, None]
        out: torch.Tensor = self.head(self.attention(x, x, x)[0][:, 0])
        return out


@pytest.mark.few(1)
@pytest.mark.parametrize("name", architectures.IMAGES)
def test_weights_drawn_anew_are_spread_as_the_networks_own(name: str) -> None:
    flat, before = validation.build(name, IMAGE, 4, Randomness(1)), torch.get_rng_state()
    one, two, other = (flat.redrawn(Randomness(1), "start", 0, j) for j in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(flat.initial(), validation.build(name, IMAGE, 4, Randomness(1)).initial())
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not torch.equal(one, flat.initial())
    assert not torch.equal(one, flat.redrawn(Randomness(2), "start", 0, 1))
    for drawn, own in zip(
        flat.views(one).values(), flat.views(flat.initial()).values(), strict=True
    ):
        if own.numel() >= 1000:  # means and spreads of so many numbers hardly differ
            assert abs(float(drawn.mean() - own.mean())) < 0.15 * float(own.std())
            assert float(drawn.std()) == pytest.approx(float(own.std()), rel=0.1)
            assert float(drawn.abs().max()) == pytest.approx(float(own.abs().max()), rel=0.1)
        elif own.unique().numel() == 1:  # group norm starts at 1 and 0
            assert torch.equal(drawn, own)


def test_weights_drawn_anew_have_the_models_own_type_and_the_same_values_in_every_type() -> None:
    flat = validation.build("mlp", IMAGE, 4, Randomness(1))
    double = flat.to(torch.device("cpu"), torch.float64).redrawn(Randomness(1), "x")
    assert double.dtype is torch.float64
    assert torch.equal(double, flat.redrawn(Randomness(1), "x").double())


def test_what_is_frozen_is_not_drawn_and_what_is_tied_is_drawn_by_its_first_owner() -> None:
    module = flattened(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3))
    module[1].weight.data.fill_(7.0)
    module[1].weight.requires_grad_(False)
    flat = FlatModel(module)
    drawn = flat.redrawn(Randomness(0), "a")
    assert len(drawn) == flat.dimension == 16 + 16 * 16 + 16 + 16 * 3 + 3
    assert (module[1].weight == 7).all()

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(200, 64)  # spread 1
            self.head = nn.Linear(64, 200)  # spread 1 / 14
            self.head.weight = self.embedding.weight

    tied = FlatModel(Tied())
    assert tied.dimension == 200 * 64 + 200
    assert float(tied.redrawn(Randomness(0), "a")[: 200 * 64].std()) == pytest.approx(1, rel=0.05)


def test_a_whole_draws_over_what_its_parts_drew() -> None:
    flat = FlatModel(_Attending())
    views = flat.views(flat.redrawn(Randomness(0), "a"))
    # set to 0 by the attention, to random numbers by its part
    assert not views["attention.out_proj.bias"].any()
    assert views["attention.in_proj_weight"].std() > 0


def test_parameters_that_cannot_be_drawn_anew_are_named() -> None:
    def build(part: nn.Module) -> FlatModel:
        return FlatModel(nn.Sequential(nn.Linear(4, 4), part))

    assert float(build(_Drawn()).redrawn(Randomness(0), "a")[-1]) == pytest.approx(5, abs=0.1)
    with pytest.raises(
        UsageError,
        match=r"'1\.scale' of Sequential cannot be drawn anew: give its layer a method "
        r"reset_parameters",
    ):
        build(_Scaled()).redrawn(Randomness(0), "a")
    with pytest.raises(
        UsageError, match=r"reset_parameters of 1 \(_Failing\) fails: nothing to divide"
    ):
        build(_Failing()).redrawn(Randomness(0), "a")


@pytest.mark.parametrize(
    ("last", "sentences"),
    [
        ([nn.Linear(16, 2)], []),
        ([nn.Linear(16, 2), nn.LogSoftmax(-1)], []),
        ([nn.Linear(16, 2), nn.Sigmoid()], []),
        ([nn.Linear(16, 2), nn.Softmax(-1)], ["gives probabilities, as with a softmax at its end"]),
        ([nn.Linear(16, 3)], ["has 3 outputs, and the data have 2 classes"]),
        (
            [nn.Linear(16, 3), nn.Softmax(-1)],
            ["gives probabilities", "has 3 outputs, and the data have 2 classes"],
        ),
    ],
)
def test_outputs_that_are_no_logits_of_the_classes_are_doubted(
    last: list[nn.Module], sentences: list[str]
) -> None:
    doubts = validation.output_doubts(flattened(*last), (1, 4, 4), 2)
    assert len(doubts) == len(sentences)
    for doubt, sentence in zip(doubts, sentences, strict=True):
        assert sentence in doubt and "\n" not in doubt


def test_a_vocabulary_may_be_larger_and_positions_may_be_any_numbers() -> None:
    def of_tokens(*parts: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9), *parts)

    assert validation.output_doubts(of_tokens(), (5,), 7, Language()) == []
    (doubt,) = validation.output_doubts(of_tokens(nn.Softmax(-1)), (5,), 9, Language())
    assert "softmax" in doubt
    positions = nn.Sequential(nn.Flatten(), nn.Linear(6, 2), nn.Softmax(-1))
    assert validation.output_doubts(positions, (3, 2), 2, Trajectory()) == []

"""Any nn.Module as a flat vector: gradients, round trips, randomness, bad input."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from aflock import models, rng
from aflock.errors import AflockError, CountError, InputError, ParameterError, VectorError
from aflock.models.torch_module import TorchModule
from tests.models.torch_modules import (
    CLASSES,
    FEATURES,
    Floats,
    autograd,
    batch,
    dropping,
    gradient,
    normed,
    plain,
    start,
)
from tests.models.toy_data import Data

pytestmark = pytest.mark.usefixtures("one_thread")

# --- the hand-written gradients against autograd ---------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [[], [7], [7, 5]])
def test_hand_written_gradients_are_autograd_s(hidden: list[int]) -> None:
    data = Data(np.zeros((1, FEATURES), np.float32), CLASSES)
    model = models.create("mlp", data, hidden=hidden) if hidden else models.create("logistic", data)
    w = rng.stream(1, "w").standard_normal(model.length, dtype=np.float32)
    sizes = [FEATURES, *hidden, CLASSES]
    linear = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    layers = [part for layer in linear for part in (layer, nn.ReLU())][:-1]
    at = 0
    for layer in linear:
        a, b = layer.in_features, layer.out_features
        matrix = torch.tensor(w[at : at + a * b])
        layer.weight.data = matrix.reshape(a, b).T.contiguous() if hidden else matrix.reshape(b, a)
        layer.bias.data = torch.tensor(w[at + a * b : at + a * b + b])
        at += a * b + b
    x, y = batch(20)
    value, out = gradient(model, w, x, y)
    expected, _ = autograd(nn.Sequential(*layers), x, y)
    assert value == pytest.approx(expected, rel=1e-6)
    parts = [
        part
        for layer in linear
        if layer.weight.grad is not None and layer.bias.grad is not None
        for part in ((layer.weight.grad.T if hidden else layer.weight.grad).flatten(), layer.bias.grad)
    ]
    assert np.allclose(out, torch.cat(parts).numpy(), rtol=1e-5, atol=1e-6)


# --- one flat vector -------------------------------------------------------------------------------------------------


def test_gradient_is_autograd_s() -> None:
    model = TorchModule(plain)
    reference = plain()
    w = parameters_to_vector(reference.parameters()).detach().numpy()
    x, y = batch(20)
    value, out = gradient(model, w, x, y)
    expected, slopes = autograd(reference, x, y)
    assert value == expected
    assert np.array_equal(out, slopes)


def test_the_vector_is_the_module_and_back() -> None:
    module = plain()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    model = TorchModule(module)
    assert model.length == sum(p.numel() for p in before.values())
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert np.array_equal(start(model), torch.cat([p.flatten() for p in before.values()]).numpy())
    w = np.arange(model.length, dtype=np.float32)
    model.evaluate(w, *batch(2))
    assert np.array_equal(parameters_to_vector(module.parameters()).detach().numpy(), w)
    assert all(np.shares_memory(p.detach().numpy(), model.weights) for p in module.parameters())


def test_training_in_the_module_s_own_memory_gives_the_same_bits() -> None:
    model = TorchModule(plain)
    w = start(model)
    x, y = batch(20)
    expected = gradient(model, w, x, y)[1]
    model.weights[:] = w
    assert np.array_equal(gradient(model, model.weights, x, y)[1], expected)


def test_memory_formats_are_kept() -> None:
    module = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weight = module.weight.detach().clone()
    model = TorchModule(module, loss=lambda z, y: z.square().mean())
    assert module.weight.stride() == weight.stride() != weight.contiguous().stride()
    x, y = batch(2, (2, 5, 5))
    _, out = gradient(model, start(model), x, y)
    assert torch.equal(module.weight, weight)
    reference = nn.Conv2d(2, 3, 3)
    reference.load_state_dict(module.state_dict())
    reference(torch.tensor(x)).square().mean().backward()
    slope = torch.as_strided(torch.tensor(out), weight.shape, weight.stride())
    assert reference.weight.grad is not None
    assert torch.allclose(slope, reference.weight.grad, rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_constants_and_unused_ones_have_gradient_zero() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fixed = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
            self.idle = nn.Linear(2, 2)
            self.last = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.fixed(x))

    model = TorchModule(Net)
    assert isinstance(model.module, Net)
    fixed = model.module.fixed.weight.clone()
    _, out = gradient(model, start(model), *batch(5))
    assert model.length == 6 + (FEATURES + 1) * CLASSES
    assert not out[:6].any()
    assert out[6:].any()
    assert torch.equal(model.module.fixed.weight, fixed)


def test_tied_weights_are_one_weight() -> None:
    first, last = nn.Linear(CLASSES, FEATURES, bias=False), nn.Linear(FEATURES, CLASSES, bias=False)
    last.weight = nn.Parameter(torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0)))
    again = nn.Linear(FEATURES, CLASSES, bias=False)
    again.weight = last.weight
    model = TorchModule(nn.Sequential(last, first, again))
    assert model.length == 2 * FEATURES * CLASSES
    module = nn.Sequential(last, first, again)
    w = start(model)
    x, y = batch(5)
    assert np.array_equal(gradient(model, w, x, y)[1], autograd(module, x, y)[1])


def test_arguments_are_only_read() -> None:
    model = TorchModule(plain)
    w, (x, y) = start(model), batch(9)
    expected = gradient(model, w, x, y)[1]
    for array in (w, x, y):
        array.flags.writeable = False
    assert np.array_equal(gradient(model, w, x, y)[1], expected)


def test_examples_in_any_order_of_memory_and_labels_of_any_integer_type() -> None:
    model = TorchModule(plain)
    w, (x, y) = start(model), batch(9)
    expected = gradient(model, w, x, y)[1]
    assert np.array_equal(gradient(model, w, np.asfortranarray(x), y)[1], expected)
    assert np.array_equal(gradient(model, w, x[::-1].copy()[::-1], y)[1], expected)
    assert np.array_equal(gradient(model, w, x, y.astype(np.uint8))[1], expected)


def test_evaluation_by_hand_and_in_chunks() -> None:
    """z = (0, x), as in test_models: losses log(1 + e^-2), log(1 + e^-1) and, for the wrong one, log(1 + e^3)."""
    model = TorchModule(nn.Linear(1, 2))
    w = np.array([0, 1, 0, 0], np.float32)
    found = model.evaluate(w, np.array([[2], [-1], [3]], np.float32), np.array([1, 0, 0]))
    assert found.accuracy == 2 / 3
    assert found.loss == pytest.approx((0.126928 + 0.313262 + 3.048587) / 3, rel=1e-5)

    model = TorchModule(plain)
    w, (x, y) = start(model), batch(1300)
    found = model.evaluate(w, x, y)
    logits = model.module(torch.tensor(x)).detach()
    assert found.loss == pytest.approx(float(functional.cross_entropy(logits, torch.tensor(y))), rel=1e-6)
    assert found.accuracy == float((logits.argmax(1).numpy() == y).mean())


def test_a_loss_of_one_s_own() -> None:
    model = TorchModule(lambda: nn.Linear(FEATURES, 1), loss=functional.mse_loss)
    x, _ = batch(4)
    y = x[:, :1].copy()
    w = np.zeros(model.length, np.float32)
    value, out = gradient(model, w, x, y)
    assert value == pytest.approx(float(np.mean(y**2)))
    assert np.allclose(out, [*(-2 * x * y).mean(0), -2 * y.mean()], atol=1e-6)
    assert np.isnan(model.evaluate(w, x, y).accuracy)


def test_tokens() -> None:
    """Integers in, a class per position out; torch wants the classes on axis 1."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            looked: Tensor = self.table(x)
            return looked.transpose(1, 2)

    model = TorchModule(Words)
    w = np.zeros((9, CLASSES), np.float32)
    w[np.arange(9), np.arange(9) % CLASSES] = 5
    x = np.arange(6, dtype=np.uint8).reshape(2, 3)
    y = (x % CLASSES).astype(np.int32)
    y[0, 0] = 1
    assert model.evaluate(w.ravel(), x, y).accuracy == 5 / 6
    assert np.isfinite(gradient(model, w.ravel(), x, y)[1]).all()


# --- randomness ------------------------------------------------------------------------------------------------------


def test_the_start_is_drawn_from_the_stream() -> None:
    model = TorchModule(plain)
    assert np.array_equal(start(model, 0), start(model, 0))
    assert np.array_equal(start(model, 0), start(TorchModule(plain), 0))
    assert not np.array_equal(start(model, 0), start(model, 1))


def test_torch_s_global_randomness_is_left_alone() -> None:
    before = torch.get_rng_state()
    model = TorchModule(dropping)
    w = start(model)
    gradient(model, w, *batch(5))
    model.evaluate(w, *batch(5))
    with pytest.raises(InputError, match="a label is 4"):
        model.gradient(w, batch(5)[0], np.full(5, 4), np.empty_like(w))
    assert torch.equal(before, torch.get_rng_state())


def test_dropout_depends_on_the_arguments_alone() -> None:
    model = TorchModule(dropping)
    w, (x, y) = start(model), batch(5)
    first = gradient(model, w, x, y)[1]
    gradient(model, w, *batch(5, seed=2))
    torch.rand(3)
    assert np.array_equal(gradient(model, w, x, y)[1], first)
    assert np.array_equal(gradient(TorchModule(dropping), w, x, y)[1], first)

    def mask(g: Floats) -> list[bool]:
        return [bool(row.any()) for row in g[: 40 * FEATURES].reshape(40, FEATURES)]

    one = mask(gradient(model, w, x[:1], y[:1])[1])
    assert 5 < sum(one) < 35
    assert one != mask(gradient(model, w + np.float32(1e-3), x[:1], y[:1])[1])
    assert one != mask(gradient(model, w, x[1:2], y[:1])[1])
    assert one != mask(gradient(model, w, x[:1], (y[:1] + 1) % CLASSES)[1])


def test_gradients_are_of_training_mode_and_evaluations_are_not() -> None:
    module = dropping().eval()
    model = TorchModule(module)
    w, (x, y) = start(model), batch(5)
    first = gradient(model, w, x, y)
    found = model.evaluate(w, x, y)
    assert found.loss == pytest.approx(autograd(module, x, y)[0], rel=1e-6)
    assert found.loss != first[0]
    assert gradient(model, w, x, y)[0] == first[0]


def digest(name: str) -> str:
    """What a short training run comes to; called here and in a process of its own."""
    torch.set_num_threads(1)
    model: models.Model
    if name == "cnn":
        model = models.create("cnn", Data(np.zeros((1, 12, 12), np.float32), CLASSES))
        shape: tuple[int, ...] = (12, 12)
    else:
        model = TorchModule(dropping)
        shape = (FEATURES,)
    w = start(model)
    out = np.empty_like(w)
    for seed in range(3):
        model.gradient(w, *batch(10, shape, seed), out)
        w -= np.float32(0.1) * out
    return hashlib.sha256(w.tobytes()).hexdigest()


@pytest.mark.parametrize("name", ["cnn", "dropout"])
def test_the_same_bits_in_another_process(name: str) -> None:
    code = f"import torch; torch.rand(7); from tests.models.test_torch_module import digest; print(digest({name!r}))"
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert result.stdout.strip() == digest(name) == digest(name)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"buffers": "avrage"}, "buffers is 'avrage'; expected one of 'refuse', 'local', 'average'"),
        ({"buffers": "average"}, "rate is None with buffers='average'; 'average', and only it, needs eta_l as rate"),
        ({"buffers": "local", "rate": 0.1}, "rate is 0.1 with buffers='local'"),
        ({"buffers": "average", "rate": 0.0}, "rate is 0.0; expected a positive number"),
    ],
)
def test_bad_policies(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        TorchModule(normed, **given)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ReLU(), "no parameter to train"),
        (nn.Linear(2, 2).double(), "weight is torch.float64 on cpu; expected torch.float32 on cpu"),
        (nn.LazyLinear(2), "weight has no shape yet; run the module on one batch first"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_bad_modules(module: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TorchModule(module)


X, Y = batch(5)


@pytest.mark.parametrize(
    ("x", "y", "cut", "error", "message"),
    [
        (X[:, :3], Y, 0, VectorError, "an example has 3 numbers; the model expects 6"),
        (X, Y + 4, 0, InputError, "a label is .; expected integers from 0 to 3"),
        (X, Y - 9, 0, InputError, "a label is -9; expected integers from 0"),
        (X, Y.astype(float), 0, VectorError, "y is float64; expected integers for the cross entropy"),
        (X, Y[:2], 0, VectorError, "expected one label per example"),
        (X[:0], Y[:0], 0, CountError, "the batch is empty"),
        (X.astype(float), Y, 0, VectorError, "x is float64; expected a float32 array"),
        (X, Y, 1, VectorError, r"w has the shape \(\d+,\); expected \(\d+,\)"),
    ],
)
def test_bad_arguments(x: Any, y: Any, cut: int, error: type[AflockError], message: str) -> None:
    model = TorchModule(plain, features=FEATURES)
    w = start(model)
    out = np.full(model.length, 7, np.float32)
    for given in (w[: w.size - cut], w[: w.size - cut]):
        with pytest.raises(error, match=message):
            model.gradient(given, x, y, out)
        with pytest.raises(error, match=message):
            model.evaluate(given, x, y)
    assert (out == 7).all()
    with pytest.raises(VectorError, match="out is w itself"):
        model.gradient(w, X, Y, w)


def test_a_loss_that_is_no_number() -> None:
    model = TorchModule(plain, loss=lambda z, y: z)
    with pytest.raises(InputError, match="the loss function gave 20 numbers; expected one"):
        gradient(model, start(model), X, Y)

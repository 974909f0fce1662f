"""lstm, wind-lstm, conv3 and resnet18: their sizes, and their gradients against the same networks written plainly."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from aflock import models, rng
from aflock.errors import InputError, ParameterError, VectorError
from aflock.models.lstm import squared_error
from aflock.models.torch_module import TorchModule
from tests.models.toy_data import Data

Floats = npt.NDArray[np.float32]
Weights = dict[str, Tensor]

CLASSES = 4
SMALL: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "lstm": ((7,), {"embedding": 3, "units": 6}),
    "wind-lstm": ((7, 5), {"units": 6}),
    "conv3": ((9, 17, 2), {}),
    "conv3, group norm": ((9, 17, 2), {"width": 4, "norm": "group", "groups": 2}),
    "resnet18": ((16, 18, 2), {"width": 4, "groups": 2}),
    "resnet18, batch norm": ((16, 18, 2), {"width": 4, "norm": "batch", "rate": 0.1}),
}
"""Of each network one that is quick: the shape of its examples, its parameters."""

pytestmark = pytest.mark.usefixtures("one_thread")
each = pytest.mark.parametrize("name", SMALL)


def create(name: str, shape: tuple[int, ...], classes: int = CLASSES, **params: Any) -> TorchModule:
    model = models.create(name.split(",")[0], Data(np.zeros((1, *shape), np.float32), classes), **params)
    assert isinstance(model, TorchModule)
    return model


def small(name: str) -> TorchModule:
    shape, params = SMALL[name]
    return create(name, shape, **params)


def batch(name: str, count: int = 4, seed: int = 1) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    draws, shape = rng.stream(seed, "batch"), (count, *SMALL[name][0])
    if name == "lstm":
        return draws.integers(0, CLASSES, shape), draws.integers(0, CLASSES, count)
    x = draws.standard_normal(shape, dtype=np.float32)
    return x, draws.standard_normal(count, np.float32) if name == "wind-lstm" else draws.integers(0, CLASSES, count)


def start(model: models.Model, seed: int = 0) -> Floats:
    return model.init(rng.stream(seed, "init"))


def gradient(model: models.Model, w: Floats, x: Any, y: Any) -> tuple[float, Floats]:
    out = np.full(model.length, np.nan, np.float32)
    return model.gradient(w, x, y, out), out


# --- sizes -----------------------------------------------------------------------------------------------------------


def recurrent(inputs: int, units: int, layers: int) -> int:
    """Four gates, each with a matrix for the input, one for the state, and two biases."""
    return sum(4 * units * (below + units + 2) for below in [inputs, *[units] * (layers - 1)])


def test_the_lstm_has_the_paper_s_size() -> None:
    assert create("lstm", (80,), 80).length == 80 * 8 + recurrent(8, 100, 2) + 101 * 80 == 133_520
    assert create("lstm", (5,), 80, embedding=3, units=7, layers=1).length == 240 + recurrent(3, 7, 1) + 640


def test_the_wind_lstm_has_the_paper_s_size() -> None:
    assert create("wind-lstm", (24, 5)).length == recurrent(5, 32, 3) + 33 == 21_921
    assert create("wind-lstm", (5,)).length == 21_921


def test_the_size_of_conv3() -> None:
    convolutions = 10 * 32 + (9 * 32 + 1) * 64 + (9 * 64 + 1) * 128
    for shape in ((28, 28, 1), (28, 28), (784,)):
        assert create("conv3", shape, 10).length == convolutions + (3 * 3 * 128 + 1) * 128 + 129 * 10 == 241_546
    convolutions += 2 * 9 * 32
    for shape in ((32, 32, 3), (3072,)):
        assert create("conv3", shape, 10).length == convolutions + (4 * 4 * 128 + 1) * 128 + 129 * 10 == 356_810
    convolutions = (9 * 3 + 1) * 8 + (9 * 8 + 1) * 16 + (9 * 16 + 1) * 32
    dense = (4 * 4 * 32 + 1) * 32 + 33 * 10
    assert create("conv3", (32, 32, 3), 10, width=8).length == convolutions + dense
    normed = create("conv3", (32, 32, 3), 10, width=8, norm="group")
    assert normed.length == convolutions + dense + 2 * (8 + 16 + 32) == 22_890


def residual(width: int, channels: int, classes: int) -> tuple[int, int]:
    """Weights, and channels that are normed."""
    weights, normed = 9 * channels * width, width
    for a, b in pairwise([width, *(width * k for k in (1, 1, 2, 2, 4, 4, 8, 8))]):
        weights += 9 * a * b + 9 * b * b + (a * b if a != b else 0)
        normed += 2 * b + (b if a != b else 0)
    return weights + 2 * normed + (8 * width + 1) * classes, normed


def test_resnet18_has_the_known_size() -> None:
    assert create("resnet18", (32, 32, 3), 10).length == residual(64, 3, 10)[0] == 11_173_962
    weights, normed = residual(8, 1, 100)
    assert create("resnet18", (784,), 100, width=8, groups=4).length == weights
    assert create("resnet18", (784,), 100, width=8, norm="batch", buffers="local").length == weights
    assert create("resnet18", (784,), 100, width=8, norm="batch", rate=0.1).length == weights + 2 * normed
    assert residual(64, 3, 10)[1] * 2 == 9_600


@each
def test_outputs(name: str) -> None:
    module = small(name).module
    x, _ = batch(name, 3)
    expected = (3,) if name == "wind-lstm" else (3, CLASSES)
    outputs = module(torch.tensor(x))
    assert outputs.shape == expected
    assert torch.equal(module(torch.tensor(x.reshape(3, -1))), outputs)


# --- the same networks, plainly: channels first, ReLU before pooling, gates and norms by their definitions -----------


def plain_lstm(p: Weights, h: Tensor, layers: int) -> Tensor:
    for k in range(layers):
        state = cell = torch.zeros(len(h), p[f"lstm.weight_hh_l{k}"].shape[1], dtype=h.dtype)
        steps = []
        for x in h.unbind(1):
            sums = x @ p[f"lstm.weight_ih_l{k}"].T + state @ p[f"lstm.weight_hh_l{k}"].T
            i, f, g, o = (sums + p[f"lstm.bias_ih_l{k}"] + p[f"lstm.bias_hh_l{k}"]).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            steps.append(state)
        h = torch.stack(steps, 1)
    return h[:, -1] @ p["dense.weight"].T + p["dense.bias"]


def plain_norm(p: Weights, h: Tensor, name: str, groups: int | None) -> Tensor:
    """Group norm, or for None batch norm."""
    parts = h.transpose(0, 1) if groups is None else h.reshape(len(h) * groups, -1)
    flat = parts.flatten(1)
    flat = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    h = flat.reshape(parts.shape).transpose(0, 1) if groups is None else flat.reshape(h.shape)
    return h * p[f"{name}.weight"][:, None, None] + p[f"{name}.bias"][:, None, None]


def plain_conv3(p: Weights, x: Tensor, groups: int | None) -> Tensor:
    h = x.permute(0, 3, 1, 2).contiguous()
    for k in (1, 2, 3):
        h = functional.conv2d(h, p[f"conv{k}.weight"], p[f"conv{k}.bias"], padding=1)
        if groups is None:
            h = functional.max_pool2d(h.relu(), 2)
        else:
            h = plain_norm(p, functional.max_pool2d(h, 2), f"norm{k}", groups).relu()
    units = h.shape[1]
    dense = p["dense1.weight"].reshape(units, h.shape[2], h.shape[3], units).permute(0, 3, 1, 2).flatten(1)
    h = (h.flatten(1) @ dense.T + p["dense1.bias"]).relu()
    return h @ p["dense2.weight"].T + p["dense2.bias"]


def plain_resnet(p: Weights, x: Tensor, groups: int | None) -> Tensor:
    def norm(h: Tensor, name: str) -> Tensor:
        return plain_norm(p, h, name, groups)

    h = norm(functional.conv2d(x.permute(0, 3, 1, 2), p["conv.weight"], padding=1), "norm").relu()
    for k in range(8):
        at, stride = f"blocks.{k}", 2 if k in (2, 4, 6) else 1
        inner = functional.conv2d(h, p[f"{at}.conv1.weight"], stride=stride, padding=1)
        inner = functional.conv2d(norm(inner, f"{at}.norm1").relu(), p[f"{at}.conv2.weight"], padding=1)
        if stride == 2:
            h = norm(functional.conv2d(h, p[f"{at}.shortcut.0.weight"], stride=2), f"{at}.shortcut.1")
        h = (norm(inner, f"{at}.norm2") + h).relu()
    return h.mean((2, 3)) @ p["dense.weight"].T + p["dense.bias"]


PLAIN: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "lstm": lambda p, x: plain_lstm(p, p["embedding.weight"][x.long()], 2),
    "wind-lstm": lambda p, x: plain_lstm(p, x, 3).squeeze(1),
    "conv3": lambda p, x: plain_conv3(p, x, None),
    "conv3, group norm": lambda p, x: plain_conv3(p, x, 2),
    "resnet18": lambda p, x: plain_resnet(p, x, 2),
    "resnet18, batch norm": lambda p, x: plain_resnet(p, x, None),
}


@each
def test_gradients_are_those_of_the_plain_network_in_float64(name: str) -> None:
    model = small(name)
    w = start(model)
    w += 0.1 * rng.stream(5, "off").standard_normal(model.length, np.float32)  # no norm's scale is 1, no shift 0
    x, y = batch(name)
    value, out = gradient(model, w, x, y)
    p = {key: part.detach().double().contiguous().requires_grad_() for key, part in model.module.named_parameters()}
    outputs = PLAIN[name](p, torch.tensor(x).double())
    target = torch.tensor(y)
    loss = (outputs - target).square().mean() if name == "wind-lstm" else functional.cross_entropy(outputs, target)
    assert value == pytest.approx(float(loss.detach()), rel=1e-5)
    at = 0
    for part, slope in zip(model.module.parameters(), torch.autograd.grad(loss, list(p.values())), strict=True):
        found = torch.as_strided(torch.tensor(out), part.shape, part.stride(), at)
        assert float((found - slope).norm()) <= 1e-4 * float(slope.norm()) + 1e-8
        at += part.numel()


@pytest.mark.parametrize("channels", [1, 3])  # with one channel both orders of memory look alike to torch
@pytest.mark.parametrize("name", ["conv3", "resnet18"])
def test_weights_and_activations_have_their_channels_last(name: str, channels: int) -> None:
    model = create(name, (16, 16, channels))
    seen: list[Tensor] = [p.detach() for p in model.module.parameters() if p.ndim == 4]
    convolutions = len(seen)
    for part in model.module.modules():
        if isinstance(part, nn.Conv2d | nn.GroupNorm):
            part.register_forward_hook(lambda _part, _given, h: seen.append(h))
    model.module(torch.zeros(2, 16, 16, channels))
    assert convolutions == (3 if name == "conv3" else 20)
    assert len(seen) == (6 if name == "conv3" else 60)
    assert all(h.is_contiguous(memory_format=torch.channels_last) for h in seen)


# --- randomness and memory -------------------------------------------------------------------------------------------


def digest(name: str) -> str:
    """What three steps of a new model come to; called here and in a process of its own."""
    torch.set_num_threads(1)
    model = small(name)
    w = start(model)
    for seed in range(3):
        w -= np.float32(0.1) * gradient(model, w, *batch(name, seed=seed))[1]
    found = model.evaluate(w, *batch(name, seed=3))
    return hashlib.sha256(w.tobytes() + np.float64(found.loss).tobytes()).hexdigest()


def test_the_same_bits_in_every_model_and_every_process() -> None:
    code = "import torch; torch.rand(7); from tests.models.test_torch_networks import *; print(*map(digest, SMALL))"
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert result.stdout.split() == list(map(digest, SMALL)) == list(map(digest, SMALL))


@each
def test_a_gradient_depends_on_its_arguments_alone_and_only_reads_them(name: str) -> None:
    model = small(name)
    w, (x, y) = start(model), batch(name)
    before = w.copy(), x.copy(), y.copy()
    first = gradient(model, w, x, y)
    gradient(model, start(model, 1), *batch(name, 3, seed=2))
    again = gradient(model, w, x, y)
    assert again[0] == first[0]
    assert np.array_equal(again[1], first[1])
    assert all(map(np.array_equal, (w, x, y), before))


# --- learning --------------------------------------------------------------------------------------------------------


def task(name: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The token after the last one, the mean of a series, or which side of an image is bright."""
    x, y = batch(name, 24)
    if name == "lstm":
        return x, (x[:, -1] + 1) % CLASSES
    if name == "wind-lstm":
        return x, x.mean((1, 2))
    width = x.shape[2] // CLASSES
    for image, k in zip(x, y, strict=True):
        image[:, k * width : (k + 1) * width] += 2
    return x, y


@pytest.mark.parametrize(
    ("name", "rate", "steps"),
    [
        ("lstm", 1.0, 150),
        ("wind-lstm", 0.3, 150),
        ("conv3", 0.1, 40),
        ("conv3, group norm", 0.1, 40),
        ("resnet18", 0.1, 20),
        ("resnet18, batch norm", 0.1, 20),
    ],
)
def test_learning(name: str, rate: float, steps: int) -> None:
    shape, params = SMALL[name]
    model = create(name, shape, **params | ({"units": 16, "layers": 1} if "lstm" in name else {}))
    w, (x, y) = start(model), task(name)
    before = model.evaluate(w, x, y)
    for _ in range(steps):
        w -= np.float32(rate) * gradient(model, w, x, y)[1]
    after = model.evaluate(w, x, y)
    assert after.loss < 0.3 * before.loss
    assert np.isnan(after.accuracy) if name == "wind-lstm" else after.accuracy > 0.9


def test_the_running_statistics_of_batch_norm_travel_or_stay() -> None:
    x, y = batch("resnet18")
    model = small("resnet18, batch norm")
    w = start(model)
    moved = w - np.float32(0.1) * gradient(model, w, x, y)[1]
    local = create("resnet18", SMALL["resnet18"][0], width=4, norm="batch", buffers="local")
    _, normed = residual(4, 2, CLASSES)
    _, g = gradient(local, w[: local.length].copy(), x, y)
    assert np.array_equal(moved[: local.length], w[: local.length] - np.float32(0.1) * g)
    kept = local.get_buffers()
    assert kept.size == 2 * normed + 20  # 20 counts of batches
    first = local.module.get_submodule("conv")(torch.tensor(x).permute(0, 3, 1, 2)).detach().numpy()
    assert np.allclose(moved[local.length :][:4], 0.1 * first.mean((0, 2, 3)), atol=1e-6)
    assert np.allclose(kept[:4], 0.1 * first.mean((0, 2, 3)), atol=1e-6)


# --- tokens and labels -----------------------------------------------------------------------------------------------


def test_tokens_are_integers_of_any_type_or_floats_that_hold_them() -> None:
    model = small("lstm")
    w, (x, y) = start(model), batch("lstm")
    expected = gradient(model, w, x, y)[1]
    for dtype in (np.uint8, np.int32, np.float32):
        assert np.array_equal(gradient(model, w, x.astype(dtype), y)[1], expected)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (0.5, "a token is 0.5; expected integers"),
        (np.nan, "a token is nan; expected integers"),
        (np.inf, "a token is inf; expected integers"),
        (-1, "a token is -1; expected integers from 0 to 3"),
        (4, "a token is 4; expected integers from 0 to 3"),
    ],
)
def test_tokens_outside_the_vocabulary(token: float, message: str) -> None:
    model = small("lstm")
    w, (x, y) = start(model), batch("lstm")
    wrong = x.astype(np.float32)
    wrong[2, 3] = token
    for attempt in (gradient, lambda m, *given: m.evaluate(*given)):
        with pytest.raises(InputError, match=f"^{message}$"):
            attempt(model, w, wrong, y)


def test_a_dataset_may_have_a_vocabulary_of_its_own() -> None:
    @dataclass(frozen=True)
    class Text(Data):
        vocabulary: int

    given = np.full((1, 7), 9, np.float32)
    model = models.create("lstm", Text(given, CLASSES, vocabulary=10))
    assert model.length == create("lstm", (7,)).length + 6 * 8
    assert np.isfinite(gradient(model, start(model), given, np.array([3]))[1]).all()


def test_labels_of_a_regression() -> None:
    model = small("wind-lstm")
    w, (x, y) = start(model), batch("wind-lstm")
    expected = gradient(model, w, x, y)
    for label in (y[:, None], y.astype(np.float64)):  # a column must not be broadcast against a row
        value, out = gradient(model, w, x, label)
        assert value == expected[0]
        assert np.array_equal(out, expected[1])
    assert np.isnan(model.evaluate(w, x, np.arange(4)).accuracy)
    assert float(squared_error(torch.tensor([1.0, 2.0]), torch.tensor([3, 5]))) == (4 + 9) / 2
    with pytest.raises(InputError, match=r"^y has the shape \(4, 2\); expected one number per example$"):
        model.gradient(w, x, np.zeros((4, 2), np.float32), np.empty_like(w))


# --- what they do not take -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("lstm", (8, 10), "a row of tokens"),
        ("wind-lstm", (2, 3, 5), r"\(steps, numbers per step\)"),
        ("conv3", (7, 28), "images of at least 8x8, channels last"),
        ("conv3", (3, 32, 32), "images of at least 8x8, channels last"),
        ("conv3", (48,), "images of at least 8x8, channels last"),
        ("resnet18", (15, 15, 3), "images of at least 16x16, channels last"),
        ("resnet18", (785,), "images of at least 16x16, channels last"),
        ("resnet18", (1, 32, 32, 3), "images of at least 16x16, channels last"),
    ],
)
def test_examples_of_a_wrong_shape(name: str, shape: tuple[int, ...], expected: str) -> None:
    with pytest.raises(InputError, match=rf"^an example has the shape \(.*\); {name} expects {expected}$"):
        create(name, shape)


@each
def test_batches_of_a_wrong_shape(name: str) -> None:
    model = small(name)
    x, y = batch(name)
    with pytest.raises(VectorError, match=r"^an example has \d+ numbers; the model expects \d+$"):
        gradient(model, start(model), x[:, :-1], y)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"norm": "layer"}, "resnet18: norm='layer' is not valid; expected one of 'group', 'batch'"),
        ({"width": 48}, "groups is 32 with width=48; expected a divisor of the width"),
        ({"norm": "batch"}, "rate is None with buffers='average'"),
        ({"norm": "batch", "buffers": "local", "rate": 0.1}, "rate is 0.1 with buffers='local'"),
        ({"rate": 0.1}, "rate is 0.1 with buffers='refuse'"),
    ],
)
def test_bad_parameters(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        create("resnet18", (16, 16), **params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"norm": "batch"}, "conv3: norm='batch' is not valid; expected one of 'none', 'group'"),
        ({"norm": "group", "width": 6}, "groups is 4 with width=6; expected a divisor of the width"),
    ],
)
def test_bad_parameters_of_conv3(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        create("conv3", (16, 16), **params)


@pytest.mark.parametrize(
    ("name", "file"), [("lstm",) * 2, ("wind-lstm", "lstm"), ("conv3",) * 2, ("resnet18", "resnet")]
)
def test_without_torch(name: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, f"aflock.models.{file}", raising=False)
    with pytest.raises(InputError, match=f"^the model {name} needs torch, which is not installed"):
        small(name)

"""The CNN of the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from aflock import models
from aflock.errors import InputError
from aflock.models.cnn import Cnn
from aflock.models.torch_module import TorchModule
from tests.models.torch_modules import CLASSES, batch, gradient, start
from tests.models.toy_data import Data

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_cnn_has_the_paper_s_size() -> None:
    for shape in ((28, 28, 1), (28, 28), (784,)):
        assert models.create("cnn", Data(np.zeros((1, *shape), np.float32), 10)).length == 1_663_370
    assert models.create("cnn", Data(np.zeros((1, 32, 32, 3), np.float32), 10)).length == 2_156_490


@pytest.mark.parametrize("shape", [(27,), (3, 32, 32), (5,), (2, 2, 2, 2)])
def test_no_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"an example has the shape .*; cnn expects images of at least 4x4"):
        models.create("cnn", Data(np.zeros((1, *shape), np.float32), 10))


def test_the_cnn_is_the_plain_network() -> None:
    """Channels first, ReLU before pooling, flattened channels first: the same function of the same weights."""
    model = models.create("cnn", Data(np.zeros((1, 8, 12, 2), np.float32), CLASSES))
    assert isinstance(model, TorchModule)
    assert isinstance(model.module, Cnn)
    w = start(model)
    x, y = batch(4, (8, 12, 2))
    value, out = gradient(model, w, x, y)
    net = model.module
    weights = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    h = torch.tensor(x).permute(0, 3, 1, 2).contiguous()
    for name in ("conv1", "conv2"):
        h = functional.conv2d(h, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=2)
        h = functional.max_pool2d(functional.relu(h), 2)
    dense = weights["dense1.weight"].reshape(512, 2, 3, 64).permute(0, 3, 1, 2).reshape(512, -1)
    h = functional.relu(h.flatten(1) @ dense.T + weights["dense1.bias"])
    loss = functional.cross_entropy(h @ weights["dense2.weight"].T + weights["dense2.bias"], torch.tensor(y))
    assert value == pytest.approx(float(loss.detach()), rel=1e-5)
    slopes = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    at = 0
    for name, p in net.named_parameters():
        slope = torch.as_strided(torch.tensor(out), p.shape, p.stride(), at)
        assert torch.allclose(slope, slopes[name], rtol=1e-4, atol=1e-6), name
        at += p.numel()
    assert at == model.length
    assert model.evaluate(w, x.reshape(4, -1), y).loss == pytest.approx(value, rel=1e-5)

"""Strided 1x1 convolutions of few channels: no corrupted heap on CPUs without AVX-512, the same sums, the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from aflock import rng
from aflock.models import afl_cnn, cnn, conv3, resnet
from aflock.models.onednn import UnitStride, has_narrow
from aflock.models.torch_module import TorchModule
from aflock.sim.experiment import Experiment
from aflock.sim.simulation import Simulation

ROOT = Path(__file__).parents[2]


class ChannelsLast(nn.Module):
    """Images channels-last in memory, as oneDNN likes them, through a strided 1x1 convolution."""

    def __init__(self, inputs: int = 4, outputs: int = 8) -> None:
        super().__init__()
        shortcut = nn.Conv2d(inputs, outputs, 1, 2)
        self.layers = nn.Sequential(shortcut, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(outputs, 3))
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x.to(memory_format=torch.channels_last))
        return logits


def batch(seed: int, channels: int = 4) -> tuple[Any, Any]:
    draws = rng.stream(seed, "batch")
    return draws.standard_normal((32, channels, 16, 16), dtype=np.float32), draws.integers(0, 3, 32)


class Seen(TorchFunctionMode):
    """The strides of the convolutions that reach torch."""

    def __init__(self) -> None:
        super().__init__()
        self.strides: list[Any] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            self.strides.append(args[3])
        return func(*args, **(kwargs or {}))


# --- the heap --------------------------------------------------------------------------------------------------------


def train() -> None:
    """Three hundred steps: the allocator finds a damaged heap much earlier. Called in a process of its own."""
    torch.set_num_threads(1)
    model = TorchModule(ChannelsLast)
    w = model.init(rng.stream(0, "init"))
    out = np.empty_like(w)
    for seed in range(300):
        model.gradient(w, *batch(seed), out)
    model.evaluate(w, *batch(0))


def run(name: str, file: str = "tests.models.test_onednn") -> subprocess.CompletedProcess[str]:
    """A function of a test file, in a process where oneDNN takes the CPU for one without AVX-512."""
    code = f"from {file} import {name}; {name}()"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "MALLOC_CHECK_": "3"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)


def test_a_narrow_network_leaves_the_heap_whole_without_avx_512() -> None:
    done = run("train")
    assert (done.returncode, done.stderr) == (0, "")


# --- which convolutions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs", "stride"),
    [(4, 8, 1), (1, 8, 1), (8, 4, 1), (12, 16, 1), (8, 8, (2, 2)), (16, 24, (2, 2))],
)
def test_the_stride_is_1_unless_both_numbers_of_channels_are_multiples_of_8(
    inputs: int, outputs: int, stride: Any
) -> None:
    model = TorchModule(ChannelsLast(inputs, outputs))
    w, (x, y) = model.weights.copy(), batch(0, inputs)
    with Seen() as seen:
        model.gradient(w, x, y, np.empty_like(w))
        model.evaluate(w, x, y)
    assert seen.strides == [stride, stride]
    assert has_narrow(model.module) == (stride == 1)


def test_ordinary_networks_are_computed_as_they_are() -> None:
    wide = resnet.model((32, 32, 3), 10, width=64, norm="group", groups=32, buffers="refuse", rate=None)
    others = [cnn.model((28, 28, 1), 10), conv3.model((28, 28, 1), 10), afl_cnn.model((32, 32, 3), 10)]
    assert not any(has_narrow(model.module) for model in (wide, *others))
    slim = resnet.model((32, 32, 3), 10, width=4, norm="group", groups=2, buffers="refuse", rate=None)
    assert has_narrow(slim.module)


@pytest.mark.parametrize(
    "convolve",
    [
        lambda x: functional.conv2d(x, torch.ones(8, 4, 1, 1)),
        lambda x: functional.conv2d(x, torch.ones(8, 4, 1, 1), stride=2, padding=1),
        lambda x: functional.conv2d(x, torch.ones(8, 4, 3, 3), stride=2),
        lambda x: functional.conv2d(x, torch.ones(8, 4, 1, 3), stride=2),
    ],
)
def test_convolutions_that_are_sound_reach_torch_as_they_are(convolve: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = convolve(x)
    given: list[Any] = []

    class Same(TorchFunctionMode):
        def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given.append(args[0])
            return func(*args, **(kwargs or {}))

    with Same(), UnitStride():
        found = convolve(x)
    assert given[-1] is x
    assert torch.equal(found, expected)


def test_a_convolution_without_a_module_is_found_by_its_weight() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.ones(3, 4, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return functional.conv2d(x, self.kernel, None, 4).mean((2, 3))

    model = TorchModule(Functional)
    with Seen() as seen:
        model.evaluate(model.weights.copy(), *batch(0))
    assert seen.strides == [1]


# --- the same sums ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((16, 16), {"stride": 2}),
        ((17, 5), {"stride": (3, 2)}),
        ((6, 6), {"stride": (1, 2), "padding": "valid", "dilation": 2}),
        ((8, 8), {"stride": [2], "padding": (0, 0), "groups": 2}),
        ((9,), {"stride": 2}),
        ((4, 5, 6), {"stride": 2}),
    ],
)
@pytest.mark.parametrize("lead", [(2,), ()])  # a batch, and one example on its own
def test_values_and_gradients_are_those_of_the_strided_convolution(
    size: tuple[int, ...], options: dict[str, Any], lead: tuple[int, ...]
) -> None:
    draws = torch.Generator().manual_seed(0)
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(size) - 1]
    groups = options.get("groups", 1)
    kernel = (12, 4 // groups, *(1 for _ in size))
    x, w, b = (
        torch.randn(shape, dtype=torch.float64, generator=draws).requires_grad_()
        for shape in ((*lead, 4, *size), kernel, (12,))
    )
    expected = convolve(x, w, b, **options)
    with UnitStride():
        found = convolve(x, w, b, **options)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=draws)
    slopes = [torch.autograd.grad((y * weights).sum(), (x, w, b)) for y in (found, expected)]
    torch.testing.assert_close(*slopes)


def test_a_stride_that_torch_refuses_is_refused() -> None:
    with UnitStride(), pytest.raises(RuntimeError, match="stride"):
        functional.conv2d(torch.ones(2, 4, 8, 8), torch.ones(8, 4, 1, 1), stride=(2, 2, 2))


# --- the same bits ---------------------------------------------------------------------------------------------------


def simulate() -> None:
    """A narrow ResNet, in the run itself and in two workers."""
    changes = [
        "data.name=synthetic", "data.examples=120", "data.features=256", "data.classes=3", "partition.clients=4",
        "model.name=resnet18", "model.width=4", "model.groups=2", "strategy.name=fedbuff", "training.batch=8",
        "budget.uploads=8", "evaluation.every=4",
    ]  # fmt: skip
    results = []
    for workers in (0, 2):
        with Simulation(Experiment.build({}, changes), workers=workers) as simulation:
            simulation.run()
            results.append(simulation.result().model_sha256)
    assert results[0] == results[1]


def test_workers_compute_the_bits_of_the_run() -> None:
    simulate()


def test_workers_compute_the_bits_of_the_run_without_avx_512() -> None:
    done = run("simulate")
    assert (done.returncode, done.stderr) == (0, "")

"""Models with hand-written gradients: against finite differences, by hand, in place, to the last bit, on bad input."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aflock import models, rng
from aflock.errors import (
    AflockError,
    CountError,
    InputError,
    ParameterError,
    UnknownName,
    UnknownParameter,
    VectorError,
)
from aflock.models.logistic import Logistic
from aflock.models.mlp import Mlp
from tests.models.toy_data import Data

Double = npt.NDArray[np.float64]

FEATURES, CLASSES = 6, 4


DATA = Data(np.zeros((1, FEATURES), np.float32), CLASSES)

CASES: list[tuple[str, dict[str, Any]]] = [
    ("logistic", {}),
    ("logistic", {"weight_decay": 0.3}),
    ("mlp", {"hidden": 5}),
    ("mlp", {"hidden": [7, 5], "weight_decay": 0.1}),
]


def ids(case: Any) -> str:
    return f"{case[0]}-{json.dumps(case[1])}"


each_case = pytest.mark.parametrize("case", CASES, ids=ids)
each_model = pytest.mark.parametrize("name", ["logistic", "mlp"])


def made(case: tuple[str, dict[str, Any]]) -> models.Model:
    return models.create(case[0], DATA, **case[1])


def batch(count: int, seed: int = 1) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    draws = rng.stream(seed, "batch")
    return draws.standard_normal((count, FEATURES), dtype=np.float32), draws.integers(0, CLASSES, count)


def weights(model: models.Model, seed: int = 1) -> npt.NDArray[np.float32]:
    return rng.stream(seed, "weights").standard_normal(model.length, dtype=np.float32)


def gradient(model: models.Model, w: Any, x: Any, y: Any) -> tuple[float, npt.NDArray[np.float32]]:
    out = np.full(model.length, np.nan, np.float32)
    return model.gradient(w, x, y, out), out


# --- a twin in float64, written from the equations -----------------------------------------------------------------


def logits(name: str, params: dict[str, Any], w: Double, x: Double) -> Double:
    if name == "logistic":
        cut = FEATURES * CLASSES
        return x @ w[:cut].reshape(CLASSES, FEATURES).T + w[cut:]
    hidden = params["hidden"]
    sizes = [FEATURES, *([hidden] if isinstance(hidden, int) else hidden), CLASSES]
    for inputs, outputs in pairwise(sizes):
        x = x @ w[: inputs * outputs].reshape(inputs, outputs) + w[inputs * outputs :][:outputs]
        w = w[(inputs + 1) * outputs :]
        x = x if w.size == 0 else np.maximum(x, 0)
    return x


def cross_entropy(z: Double, y: npt.NDArray[np.int64]) -> float:
    return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]))


def loss(name: str, params: dict[str, Any], w: Double, x: Any, y: Any) -> float:
    decay: float = params.get("weight_decay", 0.0) / 2 * float(w @ w)
    return cross_entropy(logits(name, params, w, x.astype(np.float64)), y) + decay


@each_case
@pytest.mark.parametrize("count", [1, 3, 50])
def test_gradient_is_the_slope_of_the_loss(case: tuple[str, dict[str, Any]], count: int) -> None:
    model = made(case)
    x, y = batch(count)
    w = weights(model)
    value, out = gradient(model, w, x, y)
    assert value == pytest.approx(loss(*case, w.astype(np.float64), x, y), rel=1e-5)
    step, slopes = 1e-6, np.empty(model.length)
    for k in range(model.length):
        e = np.zeros(model.length)
        e[k] = step
        slopes[k] = (loss(*case, w + e, x, y) - loss(*case, w - e, x, y)) / (2 * step)
    assert np.allclose(out, slopes, rtol=2e-5, atol=2e-6)


@each_case
def test_evaluation_is_the_same_in_chunks(case: tuple[str, dict[str, Any]]) -> None:
    model = made(case)
    x, y = batch(2500)
    w = weights(model)
    z = logits(*case, w.astype(np.float64), x.astype(np.float64))
    found = model.evaluate(w, x, y)
    assert found.loss == pytest.approx(cross_entropy(z, y), rel=1e-5)
    assert found.accuracy == np.mean(z.argmax(1) == y)


# --- by hand -------------------------------------------------------------------------------------------------------


def test_logistic_by_hand() -> None:
    """At w = 0 both classes have p = 1/2, so dz = (-1/2, 1/2): dW = dz^T x, db = dz, and the loss is log 2."""
    model = Logistic(2, 2)
    w = model.init(rng.stream(0, "init"))
    value, out = gradient(model, w, np.array([[1, 2]], np.float32), np.array([0]))
    assert value == pytest.approx(np.log(2))
    assert out.tolist() == [-0.5, -1.0, 0.5, 1.0, -0.5, 0.5]


def test_logistic_evaluation_by_hand() -> None:
    """z = (0, x): class 1 wins where x > 0. The losses of the three examples are log(1 + e^-2), log(1 + e^-1), and,
    for the wrong one, log(1 + e^3)."""
    model = Logistic(1, 2)
    w = np.array([0, 1, 0, 0], np.float32)
    found = model.evaluate(w, np.array([[2], [-1], [3]], np.float32), np.array([1, 0, 0]))
    assert found.accuracy == 2 / 3
    assert found.loss == pytest.approx((0.126928 + 0.313262 + 3.048587) / 3, rel=1e-5)


def test_mlp_by_hand() -> None:
    """x = 2: h = relu(2*(1, -1) + (1, 1)) = (3, 0), z = 3*(1, 1) = (3, 3), p = 1/2 each, dz = (1/2, -1/2).

    dW_2 = h^T dz, db_2 = dz; dh = dz W_2^T = (1/2 - 1/2, 4/2 - 2/2) = (0, 1), and the second is cut since h_2 = 0.
    """
    model = Mlp(1, 2, hidden=2)
    w = np.array([1, -1, 1, 1, 1, 1, 4, 2, 0, 0], np.float32)
    value, out = gradient(model, w, np.array([[2]], np.float32), np.array([1]))
    assert value == pytest.approx(np.log(2))
    assert out.tolist() == [0, 0, 0, 0, 1.5, -1.5, 0, 0, 0.5, -0.5]


def test_weight_decay_by_hand() -> None:
    model = Logistic(1, 2, weight_decay=0.5)
    w = np.array([2, 2, 1, 1], np.float32)
    value, out = gradient(model, w, np.array([[0]], np.float32), np.array([1]))
    assert value == pytest.approx(np.log(2) + 0.25 * 10)
    assert out.tolist() == [1, 1, 0.5 + 0.5, 0.5 - 0.5]
    assert model.evaluate(w, np.array([[0]], np.float32), np.array([1])).loss == pytest.approx(np.log(2))


def test_the_start() -> None:
    assert not Logistic(3, 2).init(rng.stream(0, "init")).any()
    model = Mlp(400, 10, hidden=[300])
    w = model.init(rng.stream(0, "init"))
    (first, b1), (second, b2) = model.layers(w)
    assert first.std() == pytest.approx(np.sqrt(2 / 400), rel=0.02)
    assert second.std() == pytest.approx(np.sqrt(2 / 300), rel=0.05)
    assert not b1.any()
    assert not b2.any()
    assert np.array_equal(w, model.init(rng.stream(0, "init")))
    assert not np.array_equal(w, model.init(rng.stream(1, "init")))


# --- numbers at the edge -------------------------------------------------------------------------------------------


@each_model
def test_huge_logits_do_not_overflow(name: str) -> None:
    model = models.create(name, DATA)
    x, y = batch(20)
    value, out = gradient(model, 1e4 * weights(model), x, y)
    assert np.isfinite(value)
    assert np.isfinite(out).all()


@each_model
def test_nan_is_not_hidden(name: str) -> None:
    model = models.create(name, DATA)
    x, y = batch(3)
    w = weights(model)
    w[0] = np.nan
    assert np.isnan(gradient(model, w, x, y)[0])
    assert np.isnan(model.evaluate(w, x, y).loss)


# --- in place, to the last bit -------------------------------------------------------------------------------------


@each_case
def test_a_used_model_gives_the_bits_of_a_new_one(case: tuple[str, dict[str, Any]]) -> None:
    """Scratch memory is shared between batch sizes and with evaluate; nothing of it may show."""
    used = made(case)
    w = weights(used)
    for count in (50, 3, 2000, 7, 50):
        x, y = batch(count, seed=count)
        value, out = gradient(used, w, x, y)
        used.evaluate(w, x, y)
        fresh_value, fresh_out = gradient(made(case), w, x, y)
        assert value == fresh_value
        assert out.tobytes() == fresh_out.tobytes()


@each_case
def test_arguments_are_only_read(case: tuple[str, dict[str, Any]]) -> None:
    model = made(case)
    x, y = batch(9)
    w = weights(model)
    expected = gradient(model, w.copy(), x.copy(), y.copy())
    for array in (w, x, y):
        array.flags.writeable = False
    value, out = gradient(model, w, x, y)
    assert value == expected[0]
    assert np.array_equal(out, expected[1])


@each_model
@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_labels_of_any_integer_type(name: str, dtype: type) -> None:
    model = models.create(name, DATA)
    x, y = batch(9)
    w = weights(model)
    assert np.array_equal(gradient(model, w, x, y)[1], gradient(model, w, x, y.astype(dtype))[1])


@each_model
def test_images_are_flattened(name: str) -> None:
    images = Data(np.zeros((1, 3, 2, 1), np.float32), CLASSES)
    model = models.create(name, images)
    x, y = batch(9)
    w = weights(model)
    flat = gradient(models.create(name, DATA), w, x, y)[1]
    assert np.array_equal(gradient(model, w, x.reshape(9, 3, 2, 1), y)[1], flat)
    assert model.evaluate(w, x.reshape(9, 3, 2, 1), y) == model.evaluate(w, x, y)


@pytest.mark.parametrize("case", [("logistic", {"weight_decay": 0.1}), ("mlp", {"weight_decay": 0.1})], ids=ids)
def test_gradient_allocates_nothing_of_size_d(case: tuple[str, dict[str, Any]]) -> None:
    wide = Data(np.zeros((1, 784), np.float32), 10)
    model = models.create(case[0], wide, **case[1])
    x = rng.stream(0, "x").standard_normal((50, 784), dtype=np.float32)
    y = rng.stream(0, "y").integers(0, 10, 50)
    w, out = weights(model), np.empty(model.length, np.float32)
    for _ in range(3):
        model.gradient(w, x, y, out)
    tracemalloc.start()
    try:
        for _ in range(10):
            model.gradient(w, x, y, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4000, f"{peak} bytes at once; a vector has {out.nbytes}, a batch {x.nbytes}, a layer {50 * 128 * 4}"


def digest(name: str) -> str:
    """What a short training run comes to; called here and in a process of its own."""
    model = models.create(name, Data(np.zeros((1, 784), np.float32), 10))
    draws = rng.stream(3, "digest")
    w, out = model.init(draws), np.empty(model.length, np.float32)
    for _ in range(5):
        x, y = draws.standard_normal((50, 784), dtype=np.float32), draws.integers(0, 10, 50)
        model.gradient(w, x, y, out)
        w -= np.float32(0.1) * out
    return hashlib.sha256(w.tobytes()).hexdigest()


@each_model
def test_the_same_bits_in_another_process(name: str) -> None:
    code = f"from tests.models.test_models import digest; print(digest({name!r}))"
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert result.stdout.strip() == digest(name) == digest(name)


# --- bad input -----------------------------------------------------------------------------------------------------

X, Y = batch(5)

BAD: list[tuple[str, Callable[[models.Model, Any], tuple[Any, Any, Any]], type[AflockError], str]] = [
    ("features", lambda m, w: (w, X[:, :3].copy(), Y), VectorError, "an example has 3 numbers; the model expects 6"),
    ("label above", lambda m, w: (w, X, np.where(Y[0] == Y, 4, Y)), InputError, "a label is 4; expected .* 0 to 3"),
    ("label below", lambda m, w: (w, X, Y - 5), InputError, "a label is -.; expected integers from 0 to 3"),
    ("label floats", lambda m, w: (w, X, Y.astype(float)), VectorError, "y is float64 of shape .*; expected one int"),
    ("label columns", lambda m, w: (w, X, Y[:, None]), VectorError, r"y is int64 of shape \(5, 1\)"),
    ("label count", lambda m, w: (w, X, Y[:2]), VectorError, r"shapes \(5, 6\) and \(2,\); expected one label per"),
    ("empty", lambda m, w: (w, X[:0], Y[:0]), CountError, "the batch is empty; expected at least one example"),
    ("double x", lambda m, w: (w, X.astype(float), Y), VectorError, "x is float64; expected a float32 array"),
    ("x list", lambda m, w: (w, X.tolist(), Y), VectorError, "x is list; expected a float32 array"),
    ("w length", lambda m, w: (w[:-1], X, Y), VectorError, r"w has the shape \(\d+,\); expected \(\d+,\)"),
    ("w double", lambda m, w: (w.astype(float), X, Y), VectorError, "w is float64; expected a float32 vector"),
    ("w gaps", lambda m, w: (np.repeat(w, 2)[::2], X, Y), VectorError, "w is a view with gaps"),
]


@each_model
@pytest.mark.parametrize(("make", "error", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_arguments(name: str, make: Any, error: type[AflockError], message: str) -> None:
    model = models.create(name, DATA)
    w, x, y = make(model, weights(model))
    out = np.full(model.length, 7, np.float32)
    with pytest.raises(error, match=message) as gradient_error:
        model.gradient(w, x, y, out)
    with pytest.raises(error, match=message):
        model.evaluate(w, x, y)
    assert (out == 7).all()
    assert "\n" not in str(gradient_error.value)


@each_model
def test_bad_out(name: str) -> None:
    model = models.create(name, DATA)
    w = weights(model)
    with pytest.raises(VectorError, match=r"out has the shape \(3,\)"):
        model.gradient(w, X, Y, np.empty(3, np.float32))
    with pytest.raises(VectorError, match="out is w itself"):
        model.gradient(w, X, Y, w)
    fixed = np.empty_like(w)
    fixed.flags.writeable = False
    with pytest.raises(VectorError, match="out is read-only"):
        model.gradient(w, X, Y, fixed)


@pytest.mark.parametrize("hidden", [0, True, [], [3, 0], "12", 1.5, None])
def test_bad_hidden(hidden: Any) -> None:
    with pytest.raises(ParameterError, match=r"hidden=.* is not valid; expected an integer of at least 1, or a list"):
        models.create("mlp", DATA, hidden=hidden)
    with pytest.raises(ParameterError, match=r"hidden is .*; expected an integer of at least 1, or a list"):
        Mlp(3, 2, hidden=hidden)


def test_bad_data() -> None:
    with pytest.raises(ParameterError, match="classes is 1; expected at least 2"):
        models.create("logistic", Data(np.zeros((1, 3), np.float32), 1))
    with pytest.raises(ParameterError, match="features is 0; expected at least 1"):
        models.create("mlp", Data(np.zeros((1, 0), np.float32), 2))


# --- by name -------------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert {"cnn", "logistic", "mlp"} <= set(models.names())
    with pytest.raises(UnknownName, match="no model called 'logstic'; did you mean 'logistic'"):
        models.create("logstic", DATA)
    with pytest.raises(UnknownParameter, match="mlp has no parameter 'hiden'; did you mean 'hidden'"):
        models.create("mlp", DATA, hiden=3)
    with pytest.raises(ParameterError, match="logistic: weight_decay=-1 is not valid; expected a number of at least 0"):
        models.create("logistic", DATA, weight_decay=-1)


def test_entries_describe_themselves() -> None:
    found = {entry["name"]: entry for entry in json.loads(json.dumps([e.describe() for e in models.entries()]))}
    assert found["mlp"]["description"]
    assert [p["name"] for p in found["mlp"]["parameters"]] == ["hidden", "weight_decay"]
    assert found["mlp"]["parameters"][0]["default"] == 128
    assert found["cnn"]["module"].startswith("aflock.models")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_torch_is_not_imported_until_it_is_needed() -> None:
    code = "import sys, aflock.models as m, aflock.cli; m.names(); [e.describe() for e in m.entries()]; "
    assert run(code + "print('torch' in sys.modules)") == "False"


def test_without_torch_the_others_work_and_cnn_says_what_is_missing() -> None:
    data = "type('D', (), {'train_x': np.zeros((1, 28, 28, 1), np.float32), 'classes': 10})()"
    code = f"""
import sys
sys.modules["torch"] = None
import numpy as np
from aflock import models
print(models.create("logistic", {data}).length)
try:
    models.create("cnn", {data})
except ValueError as error:
    print(error)
"""
    length, message = run(code).splitlines()
    assert length == "7850"
    assert message == "the model cnn needs torch, which is not installed: pip install 'aflock[torch]'"

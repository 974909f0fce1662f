"""Bad input: a specific error that says what was wrong and what was expected, and a state untouched to the last bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aflock import Update, errors, strategies
from aflock.strategies.base import Strategy
from tests.contract.cases import Arrivals, Case, D, N, all_cases, start
from tests.contract.continuation import digest

Spoil = Callable[[Update], Any]


def spoilt(update: Update, **fields: Any) -> Update:
    """`replace` without its types: wrong ones are the point."""
    return replace(update, **fields)


def with_vector(change: Callable[[Any], Any]) -> Spoil:
    """Spoils the last of the update's vectors: an earlier one is sound and must not have been used yet."""

    def spoil(update: Update) -> Update:
        name = list(update.vectors)[-1]
        return replace(update, vectors={**update.vectors, name: change(update.vectors[name])})

    return spoil


def poke(value: float) -> Callable[[Any], Any]:
    def change(vector: Any) -> Any:
        vector = vector.copy()
        vector[D // 2] = value
        return vector

    return change


BAD: list[tuple[str, Spoil, type[Exception], str]] = [
    ("too short", with_vector(lambda v: v[:-1]), errors.VectorError, rf"has {D - 1} weights; expected {D}"),
    ("too long", with_vector(lambda v: np.append(v, v[:1])), errors.VectorError, rf"has {D + 1} weights; expected {D}"),
    ("empty", with_vector(lambda v: v[:0]), errors.VectorError, rf"has 0 weights; expected {D}"),
    ("matrix", with_vector(lambda v: v[None]), errors.VectorError, r"shape \(1, 11\); expected a flat vector"),
    ("float64", with_vector(lambda v: v.astype(np.float64)), errors.VectorError, "dtype float64; expected float32"),
    ("integers", with_vector(lambda v: v.astype(np.int32)), errors.VectorError, "dtype int32; expected float32"),
    ("big-endian", with_vector(lambda v: v.astype(">f4")), errors.VectorError, "dtype >f4; expected float32"),
    ("a list", with_vector(lambda v: v.tolist()), errors.VectorError, "is a list; expected a flat NumPy float32"),
    ("NaN", with_vector(poke(np.nan)), errors.VectorError, "holds nan at position 5; expected finite"),
    ("infinity", with_vector(poke(np.inf)), errors.VectorError, "holds inf at position 5; expected finite"),
    ("-infinity", with_vector(poke(-np.inf)), errors.VectorError, "holds -inf at position 5; expected finite"),
    ("no vector", lambda u: replace(u, vectors={}), errors.MissingVector, "needs the vector .*carries none"),
    ("stranger", lambda u: replace(u, client=N), errors.UnknownClient, f"client {N} is not in the federation of {N}"),
    ("negative client", lambda u: replace(u, client=-1), errors.UnknownClient, "client -1 is not"),
    ("client by name", lambda u: spoilt(u, client="a"), errors.UnknownClient, r"client is 'a' \(str\); expected an"),
    ("client True", lambda u: spoilt(u, client=True), errors.UnknownClient, "expected an integer"),
    ("client 1.0", lambda u: spoilt(u, client=1.0), errors.UnknownClient, "expected an integer"),
    ("a list as client", lambda u: spoilt(u, client=[1]), errors.UnknownClient, "expected an integer"),
    ("True steps", lambda u: spoilt(u, steps=True), errors.CountError, "expected an integer"),
    ("no dictionary", lambda u: spoilt(u, vectors=None), errors.InputError, "vectors is a NoneType; expected a dict"),
    (
        "future",
        lambda u: replace(u, version=10**6),
        errors.VersionError,
        "version 1000000 does not exist; expected one",
    ),
    ("negative version", lambda u: replace(u, version=-1), errors.VersionError, "version -1 does not exist; expected"),
    (
        "half a version",
        lambda u: spoilt(u, version=0.5),
        errors.VersionError,
        r"version is 0\.5 \(float\); expected an",
    ),
    ("no steps", lambda u: replace(u, steps=0), errors.CountError, "steps is 0; expected at least 1"),
    ("negative steps", lambda u: replace(u, steps=-3), errors.CountError, "steps is -3; expected at least 1"),
    (
        "half a step",
        lambda u: spoilt(u, steps=1.5),
        errors.CountError,
        r"steps is 1\.5 \(float\); expected an integer",
    ),
    ("no examples", lambda u: replace(u, examples=0), errors.CountError, "examples is 0; expected at least 1"),
    ("not an update", lambda u: {"client": 0}, errors.InputError, "expected an aflock.Update, got dict"),
]


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_bad_updates(case: Case) -> None:
    s = case.create()
    start(s)
    arrivals = Arrivals(7)
    arrivals.feed(s, 0, 25)
    good = arrivals.update(s, 25)
    before = digest(s.state_dict())
    for what, spoil, error, text in BAD:
        with pytest.raises(error, match=text) as caught:
            s.receive(spoil(good))
        assert isinstance(caught.value, errors.AflockError), what
        assert isinstance(caught.value, ValueError), what
        assert digest(s.state_dict()) == before, f"{what} changed the state"
    receipt = s.receive(good)
    assert receipt.rejected or digest(s.state_dict()) != before


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_large_finite_numbers_are_not_mistaken_for_infinity(case: Case) -> None:
    s = case.create()
    start(s)
    huge = np.full(D, 1e30, np.float32)
    s.receive(Update(0, s.version, dict.fromkeys(s.needs, huge)))


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_strided_vectors_are_taken(case: Case) -> None:
    """Every other element of a longer array is a sound vector."""
    a, b = case.create(), case.create()
    start(a)
    start(b)
    wide = np.arange(2 * D, dtype=np.float32)
    a.receive(Update(0, a.version, dict.fromkeys(a.needs, wide[::2])))
    b.receive(Update(0, b.version, dict.fromkeys(b.needs, wide[::2].copy())))
    assert digest(a.state_dict()) == digest(b.state_dict())


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_what_is_kept_is_copied(case: Case) -> None:
    """A caller may reuse its arrays at once."""
    a, b = case.create(), case.create()
    start(a)
    start(b)
    arrivals = Arrivals(9)
    for position in range(40):
        update = arrivals.update(a, position)
        b.receive(replace(update, vectors={k: v.copy() for k, v in update.vectors.items()}))
        a.receive(update)
        for vector in update.vectors.values():
            vector[:] = np.nan
    assert digest(a.state_dict()) == digest(b.state_dict())


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_models_handed_out_stay_as_they_were(case: Case) -> None:
    s = case.create()
    start(s)
    job, model = s.job(0), s.model
    kept = {name: extra.copy() for name, extra in job.extras.items()}, job.model.copy(), model.copy()
    Arrivals(2).feed(s, 0, 40)
    assert all(np.array_equal(job.extras[name], kept[0][name]) for name in kept[0])
    assert np.array_equal(job.model, kept[1])
    assert np.array_equal(model, kept[2])
    with pytest.raises(ValueError, match="read-only"):
        s.model[0] = 1.0
    with pytest.raises(ValueError, match="read-only"):
        s.job(0).model[0] = 1.0


@pytest.mark.parametrize("name", strategies.names())
def test_bad_starts(name: str) -> None:
    s = strategies.create(name, clients=N)
    w0 = np.zeros(D, np.float32)
    first = {c: np.ones(D, np.float32) for c in range(N)}
    with pytest.raises(errors.OrderError, match="has not been started; call start"):
        s.receive(Update(0, 0, {}))
    with pytest.raises(errors.OrderError):
        s.job(0)
    with pytest.raises(errors.VectorError, match="w0 has dtype float64; expected float32"):
        s.start(np.zeros(D))  # type: ignore[arg-type]
    with pytest.raises(errors.VectorError, match="w0 has shape"):
        s.start(np.zeros(0, np.float32), first=first if s.first else None)
    _bad_first(s, w0, first)
    s.start(w0, first=first if s.first else None)
    with pytest.raises(errors.OrderError, match="started before"):
        s.start(w0, first=first if s.first else None)


def _bad_first(s: Strategy, w0: Any, first: dict[int, Any]) -> None:
    if not s.first:
        with pytest.raises(errors.FirstGradients, match="takes no first gradients"):
            s.start(w0, first=first)
        return
    with pytest.raises(errors.FirstGradients, match=r"missing: 0, 1, 2, 3, 4, 5, 6 \(7 of 7\)"):
        s.start(w0)
    with pytest.raises(errors.FirstGradients, match=r"missing: 3 \(1 of 7\)"):
        s.start(w0, first={c: g for c, g in first.items() if c != 3})
    with pytest.raises(errors.UnknownClient, match="client 99"):
        s.start(w0, first={**first, 99: first[0]})
    with pytest.raises(errors.VectorError, match="first gradient of client 2 holds nan"):
        s.start(w0, first={**first, 2: np.full(D, np.nan, np.float32)})


BAD_PARAMETERS: list[tuple[str, dict[str, Any], str]] = [
    ("ace", {"lr": 0}, "lr=0 is not valid; expected a positive number"),
    ("ace", {"lr": float("nan")}, "lr=nan"),
    ("ace", {"lr": True}, "lr=True"),
    ("ace", {"lr": "0.1"}, "lr='0.1'"),
    ("ace", {"memory": "moon"}, "memory='moon' is not valid; expected one of 'server', 'client'"),
    ("ace", {"cache": "int4"}, "expected one of 'dense', 'int8', 'disk'"),
    ("aced", {"tau_algo": -1}, "tau_algo=-1"),
    ("fedbuff", {"buffer": 0}, "buffer=0 is not valid; expected an integer of at least 1"),
    ("fedbuff", {"buffer": 2.5}, r"buffer=2\.5"),
    ("mr-asyncfl", {"gamma": 1.0}, r"gamma=1\.0 is not valid; expected a number in \(0, 1\)"),
    ("mr-asyncfl", {"exchange": "never"}, "expected one of 'before', 'after'"),
    ("fedasync", {"alpha": 1.5}, r"alpha=1\.5 is not valid; expected a number in \(0, 1\]"),
    ("masfl", {"buffer": 50, "rounds": 10}, "rounds of at least 50"),
    ("fedavg", {"buffer": 8}, "buffer=8 can never fill with 7 clients; expected at most 7"),
    ("afl", {"buffer": 8}, "buffer=8 can never fill with 7 clients; expected at most 7"),
    ("afl", {"buffer": 3, "buffer_min": 4}, "buffer_min=4 exceeds"),
    ("masfl", {"buffer": 8, "selection": "random"}, "buffer=8 of 7 clients cannot be drawn; expected at most 7"),
    ("adamasfl", {"buffer": 8, "selection": "random"}, "expected at most 7"),
]


@pytest.mark.parametrize(("name", "params", "text"), BAD_PARAMETERS)
def test_bad_parameters(name: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.ParameterError, match=text):
        strategies.create(name, clients=N, **params)


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("fedasync", {"staleness": "constant", "a": 0.9}, "a=0.9 has no effect with staleness='constant'"),
        ("fedasync", {"staleness": "polynomial", "b": 7}, "b=7 has no effect with staleness='polynomial'"),
        ("delay-adaptive", {"mode": "drop", "smoothness": 2.0}, "smoothness=2.0 has no effect with mode='drop'"),
        ("mr-asyncfl", {"reset": "silent"}, "reset='silent' has no effect with max_staleness=None"),
        ("ace", {"memory": "client", "cache": "int8"}, "cache='int8' has no effect with memory='client'"),
        ("masfl", {"beta": 0.3, "gamma": 0.1, "steps": 5}, "steps=5 has no effect with beta=0.3 and gamma=0.1"),
        ("masfl", {"gamma": 0.1, "smoothness": 2.0}, "smoothness=2.0 has no effect with gamma=0.1"),
    ],
)
def test_a_parameter_that_would_do_nothing_is_refused(name: str, params: dict[str, Any], text: str) -> None:
    """Its default may be given: it says nothing that does not happen. `used` leaves it out."""
    with pytest.raises(errors.ParameterError, match=re.escape(f"{name}: {text}; leave it out")):
        strategies.create(name, clients=N, **params)
    idle, kind = list(params)[-1], strategies.get(name).params
    default = {item["name"]: item["default"] for item in kind.describe()}[idle]
    made = strategies.create(name, clients=N, **(params | {idle: default}))
    assert idle not in made.p.used()


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("fedasync", {"staleness": "hinge", "a": 0.9, "b": 7}),
        ("mr-asyncfl", {"max_staleness": 0, "reset": "silent"}),
    ],
)
def test_a_parameter_whose_option_is_chosen_is_taken(name: str, params: dict[str, Any]) -> None:
    """A bound of 0 is given, too: only None is not."""
    assert params.items() <= strategies.create(name, clients=N, **params).p.used().items()


@pytest.mark.parametrize("name", strategies.names())
def test_unknown_parameters_name_the_nearest(name: str) -> None:
    known = strategies.get(name).params.describe()[0]["name"]
    with pytest.raises(errors.UnknownParameter, match=f"did you mean '{known}'") as caught:
        strategies.create(name, clients=N, **{known + "e": 1})
    assert isinstance(caught.value, TypeError)


def test_unknown_names_name_the_nearest() -> None:
    with pytest.raises(errors.UnknownName, match="did you mean 'fedbuff'"):
        strategies.create("fedbuf", clients=N)
    with pytest.raises(errors.UnknownName, match="did you mean 'scaffold'"):
        strategies.create("fedbuff+scafold", clients=N)


@pytest.mark.parametrize("clients", [0, -1, 2.0, True, None])
def test_a_federation_needs_clients(clients: Any) -> None:
    with pytest.raises(errors.ParameterError, match=r"clients is .*; expected an? (positive )?integer"):
        strategies.create("asgd", clients=clients)


def test_a_buffer_that_repeats_can_fill_may_exceed_the_federation() -> None:
    strategies.create("fedbuff", clients=2, buffer=10)

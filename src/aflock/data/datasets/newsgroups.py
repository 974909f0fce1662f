"""20 Newsgroups, split by date: 11,314 + 7,532 articles, 20 classes.

As rows of numbers (`representation="tfidf"`): how often each of the `features` most frequent words of the training
articles occurs, as 1 + log, against how common it is, scaled to length 1. As rows of tokens ("tokens"): the first
`length` of each article, filled up with 0; from the words and signs of the training articles by frequency (1 is any
other), or from a pretrained model's own `tokenizer`.

Headers, signatures and quotations often name the group. They are left out unless strip=False, as scikit-learn
recommends.

K. Lang, "NewsWeeder: Learning to Filter Netnews", ICML 1995.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...params import Params, choice, switch, whole
from ...types import State
from ..base import Dataset
from ..checks import imported, text
from ..fetching import cache
from ..fetching.archives import contents
from ..fetching.fetch import Supply
from ..fetching.sources import Web
from ..registry import register

_PARTS = ("20news-bydate-train", "20news-bydate-test")
_QUOTED = re.compile(r"^[>|]|^In article|^Quoted from|writes in|(writes|wrote|says|said):", re.MULTILINE)
_WORD = re.compile(r"\w+|[^\w\s]")
_FIRST_WORD = 2  # token 0 is padding, token 1 any unknown word


def read(paths: Sequence[Path]) -> State:
    """The articles as they are, those of a part and a group together, in the order of their file names."""
    found = sorted((PurePosixPath(path).parts[-3:], raw) for path, raw in contents(paths, _is_article))
    groups = sorted({group for (_, group, _), _ in found})
    train = [entry for entry in found if entry[0][0] == _PARTS[0]]
    test = [entry for entry in found if entry[0][0] == _PARTS[1]]
    if not train or not test:
        raise InputError(f"there are no articles in {' and '.join(_PARTS)}; expected 20news-bydate")
    articles = [raw for _, raw in train + test]
    return {
        "text": np.frombuffer(b"".join(articles), np.uint8),
        "ends": np.cumsum([len(raw) for raw in articles]),
        "labels": np.array([groups.index(group) for (_, group, _), _ in train + test]),
        "training": len(train),
        "groups": groups,
    }


def _is_article(path: str) -> bool:
    return len(parts := PurePosixPath(path).parts) >= 3 and parts[-3] in _PARTS


def _texts(kept: State, strip: bool) -> tuple[list[str], list[str]]:
    """The training and the test articles, with or without headers, signatures and quotations."""
    articles = [stripped(article) if strip else article for article in _articles(kept)]
    return articles[: kept["training"]], articles[kept["training"] :]


def _articles(kept: State) -> Iterator[str]:
    begin = 0
    for end in kept["ends"].tolist():
        yield kept["text"][begin:end].tobytes().decode("latin-1")
        begin = end


def stripped(article: str) -> str:
    """Without header (up to the first empty line), signature (after the last line of dashes or none) and quotations."""
    lines = article.partition("\n\n")[2].strip().split("\n")
    borders = [number for number, line in enumerate(lines) if not line.strip().strip("-")]
    body = lines[: borders[-1]] if borders and borders[-1] else lines
    return "\n".join(line for line in body if not _QUOTED.search(line)).strip()


# -- rows of numbers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewsParams(Params):
    """Parameters of 20 Newsgroups."""

    representation: str = choice("tfidf", ("tfidf", "tokens"), "what an article becomes")
    features: int = whole(2000, "words that are counted, for tfidf")
    length: int = whole(128, "tokens of an article, for tokens")
    vocabulary: int = whole(20_000, "kinds of tokens, for tokens without a tokenizer", least=_FIRST_WORD + 1)
    tokenizer: str | None = text(None, "folder or name of a pretrained tokenizer, for tokens (needs transformers)")
    strip: bool = switch(True, "whether headers, signatures and quotations are left out")


def examples(kept: State, params: NewsParams) -> State:
    """The articles as rows of numbers."""
    train, test = _texts(kept, params.strip)
    make = _tfidf if params.representation == "tfidf" else _pretrained if params.tokenizer else _words
    train_x, test_x, kinds = make(train, test, params)
    labels, cut = kept["labels"], kept["training"]
    return {"train_x": train_x, "train_y": labels[:cut], "test_x": test_x, "test_y": labels[cut:], "vocabulary": kinds}


Made = tuple[npt.NDArray[Any], npt.NDArray[Any], int | None]
"""Training rows, test rows, and how many kinds of tokens they may have."""


def _tfidf(train: list[str], test: list[str], params: NewsParams) -> Made:
    module = imported("sklearn.feature_extraction.text", "tf-idf is computed by scikit-learn", "scikit-learn")
    counter = module.TfidfVectorizer(
        max_features=params.features, sublinear_tf=True, stop_words="english", dtype=np.float32
    )
    return counter.fit_transform(train).toarray(), counter.transform(test).toarray(), None


def _words(train: list[str], test: list[str], params: NewsParams) -> Made:
    counts = Counter(word for article in train for word in _WORD.findall(article.lower()))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: params.vocabulary - _FIRST_WORD]
    numbers = {word: number for number, word in enumerate(ranked, _FIRST_WORD)}

    def rows(articles: list[str]) -> npt.NDArray[np.int32]:
        filled = np.zeros((len(articles), params.length), np.int32)
        for row, article in zip(filled, articles, strict=True):
            found = [numbers.get(word, 1) for word in _WORD.findall(article.lower())[: params.length]]
            row[: len(found)] = found
        return filled

    return rows(train), rows(test), params.vocabulary


def _pretrained(train: list[str], test: list[str], params: NewsParams) -> Made:
    module = imported("transformers", "a pretrained tokenizer needs transformers", "'aflock[text]'")
    tokenizer = module.AutoTokenizer.from_pretrained(params.tokenizer)

    def rows(articles: list[str]) -> npt.NDArray[np.int32]:
        filled = tokenizer(articles, truncation=True, padding="max_length", max_length=params.length)
        return np.array(filled["input_ids"], np.int32)

    return rows(train), rows(test), len(tokenizer)


BY_DATE = Supply(
    "20newsgroups",
    sources=tuple(
        Web.file(url, "8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610", "20news-bydate.tar.gz")
        for url in (
            "https://ndownloader.figshare.com/files/5975967",
            "http://qwone.com/~jason/20Newsgroups/20news-bydate.tar.gz",
        )
    ),
    read=read,
    digest="1897141c0d0472e01e40d7660d547eb23b50e0c4824ac864b894f096fd6b6eb4",
    licence="none stated; articles of their authors",
)


@register(
    "20newsgroups",
    source="K. Lang, NewsWeeder: Learning to Filter Netnews, ICML 1995",
    description="11,314 + 7,532 newsgroup articles, split by date, 20 classes; as tf-idf or as tokens",
    params=NewsParams,
    supplies=(BY_DATE,),
)
def newsgroups(params: NewsParams, seed: int) -> Dataset:
    """The articles; the seed makes no difference, the split is the canonical one."""
    kept = BY_DATE.arrays()
    name = cache.derived("20newsgroups", content=kept["origin"]["sha256"], **asdict(params))
    made = cache.kept(name, lambda: examples(kept, params))
    parts = (made["train_x"], made["train_y"], made["test_x"], made["test_y"])
    return Dataset("20newsgroups", *parts, classes=len(kept["groups"]), vocabulary=made["vocabulary"])

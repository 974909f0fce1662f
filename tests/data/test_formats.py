"""The readers of every format, on tiny archives of the same format, and what becomes of them as a dataset."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from aflock import data
from aflock.data import Dataset, partition
from aflock.data.datasets import cifar, mnist, newsgroups, shakespeare
from aflock.data.fetching import cache
from aflock.data.fetching.fetch import Supply
from aflock.errors import InputError, ParameterError
from tests.data.archives import tar, zipped

DRAWS = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFLOCK_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("AFLOCK_FILES", str(tmp_path))


Loaded = Callable[..., Dataset]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """Loads a dataset from files made here: its only source is AFLOCK_FILES, and any content will do."""

    def load(module: Any, supply: str, files: dict[str, bytes], name: str, **params: Any) -> Dataset:
        known: Supply = getattr(module, supply)
        monkeypatch.setattr(module, supply, replace(known, sources=(), digest=None))
        (tmp_path / known.name).mkdir(exist_ok=True)
        for path, body in files.items():
            (tmp_path / known.name / path).write_bytes(body)
        return data.load(name, **params)

    return load


# -- idx --------------------------------------------------------------------------------------------------------------


def idx(array: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_files(train: Any, test: Any) -> dict[str, bytes]:
    (train_x, train_y), (test_x, test_y) = train, test
    return dict(zip(mnist.FILES, map(idx, (train_x, train_y, test_x, test_y)), strict=True))


IMAGES = DRAWS.integers(0, 256, (6, 28, 28), np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9], np.uint8)
IDX = idx_files((IMAGES[:4], LABELS[:4]), (IMAGES[4:], LABELS[4:]))


@pytest.mark.parametrize(("name", "supply"), [("mnist", "MNIST"), ("fashion-mnist", "FASHION")])
@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_become_standardised_images(loaded: Loaded, name: str, supply: str, packed: bool) -> None:
    files = {f"{path}.gz": gzip.compress(body) for path, body in IDX.items()} if packed else IDX
    made = loaded(mnist, supply, files, name)
    assert made.train_x.dtype == np.uint8
    assert np.array_equal(made.train_x, IMAGES[:4])
    assert np.array_equal(made.test_x, IMAGES[4:])
    assert (made.train_y.tolist(), made.test_y.tolist()) == ([3, 1, 4, 1], [5, 9])
    assert made.classes == 10
    grey = IMAGES[:4].astype(np.float64) / 255
    expected = (IMAGES / 255 - grey.mean()) / grey.std()
    assert made.take(slice(None)) == pytest.approx(expected[:4], abs=1e-6)
    assert made.test_inputs == pytest.approx(expected[4:], abs=1e-6)


def test_images_between_0_and_1(loaded: Loaded) -> None:
    made = loaded(mnist, "MNIST", IDX, "mnist", standardise=False)
    assert made.take(slice(None)) == pytest.approx(IMAGES[:4] / 255, abs=1e-7)


def test_the_same_arrays_from_any_wrapping(tmp_path: Path) -> None:
    (tmp_path / "a.tgz").write_bytes(tar("gz", {f"package/data/{name}": body for name, body in IDX.items()}))
    (tmp_path / "b.whl").write_bytes(zipped({f"x/{name}.gz": gzip.compress(body) for name, body in IDX.items()}))
    one, two = mnist.read([tmp_path / "a.tgz"]), mnist.read([tmp_path / "b.whl"])
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "x does not begin like an idx file of bytes; expected 0 0 8"),
        (b"<html>", "x does not begin like an idx file of bytes; expected 0 0 8"),
        (idx(IMAGES)[:-1], "x has 4719 bytes; its head says 4720"),
        (idx(IMAGES) + b"1", "x has 4721 bytes; its head says 4720"),
        (idx(LABELS)[:6], "x has 6 bytes"),
    ],
)
def test_what_is_no_idx_file(raw: bytes, said: str) -> None:
    with pytest.raises(InputError) as caught:
        mnist.parse(raw, "x")
    assert str(caught.value).startswith(said)


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    for name, body in idx_files((IMAGES[:4], LABELS[:3]), (IMAGES[4:], LABELS[4:])).items():
        (tmp_path / name).write_bytes(body)
    with pytest.raises(InputError, match="there are 4 training images and 3 labels; expected as many"):
        mnist.read([tmp_path])
    (tmp_path / mnist.FILES[2]).unlink()
    with pytest.raises(InputError, match=f"there is no file {mnist.FILES[2]}; expected"):
        mnist.read([tmp_path])


# -- cifar ------------------------------------------------------------------------------------------------------------

PHOTOS = DRAWS.integers(0, 256, (12, 32, 32, 3), np.uint8)
TEN = DRAWS.integers(0, 10, 12)


class Python2Pickler(pickle._Pickler):
    """Writes strings as Python 2 did, which had one kind only."""

    write: Any
    memoize: Any
    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_string(self, obj: str | bytes) -> None:
        raw = obj.encode("latin-1") if isinstance(obj, str) else obj
        head = pickle.SHORT_BINSTRING + bytes([len(raw)]) if len(raw) < 256 else pickle.BINSTRING + le(len(raw))
        self.write(head + raw)
        self.memoize(obj)

    dispatch[bytes] = dispatch[str] = save_string


def le(number: int) -> bytes:
    return struct.pack("<i", number)


def batch(**content: Any) -> bytes:
    """A dictionary as the canonical archives have it: protocol 2 of Python 2, arrays of NumPy 1."""
    out = io.BytesIO()
    Python2Pickler(out, protocol=2).dump(content)
    return out.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def planes(photos: Any) -> Any:
    return np.ascontiguousarray(photos.transpose(0, 3, 1, 2)).reshape(len(photos), -1)


def pickled_ten() -> bytes:
    files = {
        f"cifar-10-batches-py/{name}": batch(
            data=planes(PHOTOS[2 * place : 2 * place + 2]), labels=TEN[2 * place : 2 * place + 2].tolist()
        )
        for place, name in enumerate(cifar.BATCHES)
    }
    return tar("gz", files | {"cifar-10-batches-py/batches.meta": b"not looked at"})


def sprites_of_ten() -> bytes:
    files = {}
    for place, name in enumerate(cifar.BATCHES):
        out = io.BytesIO()
        Image.fromarray(PHOTOS[2 * place : 2 * place + 2].reshape(2, 1024, 3)).save(out, "PNG")
        files[f"package/{name}.png"] = out.getvalue()
    labels = {"train_lables.json": TEN[:10].tolist(), "test_lables.json": TEN[10:].tolist()}
    return tar("gz", files | {f"package/{name}": json.dumps(text).encode() for name, text in labels.items()})


def test_pickles_and_sprites_are_the_same_photographs(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(pickled_ten())
    (tmp_path / "package.tgz").write_bytes(sprites_of_ten())
    one, two = (cifar.read_ten([tmp_path / name]) for name in ("cifar-10-python.tar.gz", "package.tgz"))
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert np.array_equal(one["train_x"], PHOTOS[:10])
    assert np.array_equal(one["test_x"], PHOTOS[10:])
    assert np.array_equal(one["train_y"], TEN[:10])


def test_colours_are_standardised_one_by_one(loaded: Loaded) -> None:
    made = loaded(cifar, "TEN", {"cifar-10-python.tar.gz": pickled_ten()}, "cifar10")
    assert (made.shape, made.classes) == ((32, 32, 3), 10)
    taken = made.take(slice(None)).astype(np.float64)
    assert taken.mean((0, 1, 2)) == pytest.approx(np.zeros(3), abs=1e-5)
    assert taken.std((0, 1, 2)) == pytest.approx(np.ones(3), abs=1e-5)


def test_a_hundred_classes_or_their_twenty_groups(loaded: Loaded) -> None:
    fine, coarse = DRAWS.integers(0, 100, 12), DRAWS.integers(0, 20, 12)
    parts = {"train": slice(0, 9), "test": slice(9, 12)}
    files = {
        f"cifar-100-python/{name}": batch(
            data=planes(PHOTOS[rows]), fine_labels=fine[rows].tolist(), coarse_labels=coarse[rows].tolist()
        )
        for name, rows in parts.items()
    }
    made = loaded(cifar, "HUNDRED", {"cifar-100-python.tar.gz": tar("gz", files)}, "cifar100")
    assert np.array_equal(made.train_x, PHOTOS[:9])
    assert (made.classes, made.train_y.tolist(), made.test_y.tolist()) == (100, fine[:9].tolist(), fine[9:].tolist())
    groups = data.load("cifar100", labels="coarse")
    assert (groups.classes, groups.train_y.tolist()) == (20, coarse[:9].tolist())


class Evil:
    def __reduce__(self) -> Any:
        return eval, ("1",)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (batch(data=Evil()), "a batch wants to run __builtin__.eval; expected nothing but arrays"),
        (batch(data=np.array([Evil()], object)), "a batch wants to run __builtin__.eval; expected nothing but arrays"),
        (pickle.dumps(np.zeros(1).tolist), "a batch wants to run builtins.getattr; expected nothing but arrays"),
        (b"junk", "a batch is no pickle"),
        (pickle.dumps([1, 2]), "a batch is a list; expected a dictionary"),
    ],
)
def test_a_pickle_runs_no_code(raw: bytes, said: str) -> None:
    with pytest.raises(InputError) as caught:
        cifar.unpickled(raw)
    assert str(caught.value).startswith(said)


def test_what_is_no_cifar() -> None:
    with pytest.raises(InputError, match="a batch holds no uint8 rows of 3072 pixels"):
        cifar.pixels_of({b"data": np.zeros((2, 5), np.uint8)})
    with pytest.raises(InputError, match="a batch has no fine_labels"):
        cifar.labels_of({b"labels": [1]}, "fine_labels")
    out = io.BytesIO()
    Image.new("RGB", (7, 2)).save(out, "PNG")
    with pytest.raises(InputError, match="a sprite is 7 pixels wide; expected 1024, one image per row"):
        cifar.pixels_of_sprite(out.getvalue())


# -- shakespeare ------------------------------------------------------------------------------------------------------

TINY = """First Citizen:
Speak, speak.

ALL:
Resolved. resolved.


First Citizen:
You know
Caius $ Marcius.

Nobody:

"""

PLAY = """HAMLET

by William Shakespeare

PERSONS REPRESENTED.

Claudius, King of Denmark.

ACT I.

Scene I. Elsinore.

[Francisco at his post. Enter to him
Bernardo.]

Ber.
Who's there?

KING HENRY.
Nay, answer me: stand [Draws.] and unfold
yourself.

[Exit.]

And I am sick at heart.

SCENE II. Another room.

Ber.
He.
"""


def said_by(kept: dict[str, Any]) -> dict[str, str]:
    texts = np.split(kept["tokens"], kept["ends"][:-1])
    return {
        name: "".join(shakespeare.LETTERS[token] for token in text)
        for name, text in zip(kept["roles"], texts, strict=True)
    }


def test_eighty_letters() -> None:
    assert len(shakespeare.LETTERS) == len(set(shakespeare.LETTERS)) == 80
    assert shakespeare.tokens_of(shakespeare.LETTERS).tolist() == list(range(80))
    assert shakespeare.tokens_of("a$b\u2019").tolist() == [shakespeare.LETTERS.index(c) for c in "a b?"]


def test_roles_of_the_tiny_text(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text(TINY)
    assert said_by(shakespeare.read_tiny([tmp_path])) == {
        "First Citizen": "Speak, speak.\nYou know\nCaius   Marcius.",
        "ALL": "Resolved. resolved.",
    }
    with pytest.raises(InputError, match="a paragraph begins with 'Speak, speak'; expected a name and a colon"):
        list(shakespeare.tiny_speeches("Speak, speak\n"))
    with pytest.raises(InputError, match=r"there is no file input.txt or"):
        shakespeare.read_tiny([])


def test_roles_of_the_plays(tmp_path: Path) -> None:
    files = {
        "s-0.6/shksprdata/texts/hamlet_gut.txt": PLAY,
        "s-0.6/shksprdata/texts/hamlet_gut_f.txt": "Ber.\nOld spelling.\n",
        "s-0.6/miltondata/texts/comus_gut.txt": "Ber.\nNot by Shakespeare.\n",
    }
    (tmp_path / "s.tar.gz").write_bytes(tar("gz", {name: text.encode("latin-1") for name, text in files.items()}))
    assert said_by(shakespeare.read_plays([tmp_path])) == {
        "hamlet: BER": "Who's there?\nHe.",
        "hamlet: KING HENRY": "Nay, answer me: stand  and unfold\nyourself.\nAnd I am sick at heart.",
    }
    with pytest.raises(InputError, match="there is no file shksprdata/texts/"):
        shakespeare.read_plays([])


ALPHABET = "abcdefghijklmnopqrst"  # twenty letters: sixteen to train on, four to test on


def test_windows_by_hand(loaded: Loaded) -> None:
    text = f"one:\n{ALPHABET}\n\nshort:\nabc\n\ntwo:\n{ALPHABET[::-1]}\n".encode()
    files = {"input.txt": text}
    params = {"min_characters": 10, "length": 3, "stride": 5, "test_stride": 1}
    made = loaded(shakespeare, "TINY", files, "shakespeare", **params)
    words = ["".join(shakespeare.LETTERS[token] for token in row) for row in made.train_x]
    assert words == ["abc", "fgh", "klm", "tsr", "onm", "jih"]
    assert [shakespeare.LETTERS[label] for label in made.train_y] == ["d", "i", "n", "q", "l", "g"]
    assert ["".join(shakespeare.LETTERS[token] for token in row) for row in made.test_x] == ["qrs", "dcb"]
    assert [shakespeare.LETTERS[label] for label in made.test_y] == ["t", "a"]
    assert made.keys is not None
    assert (made.keys.tolist(), made.key_names) == ([0, 0, 0, 1, 1, 1], ("one", "two"))
    assert (made.classes, made.vocabulary, made.train_x.dtype.name) == (80, 80, "uint8")
    assert len(partition.create("key", made, None).indices) == 2


def test_all_windows_are_kept_and_none_crosses_the_border(loaded: Loaded) -> None:
    files = {"input.txt": f"one:\n{ALPHABET}\n".encode()}
    made = loaded(shakespeare, "TINY", files, "shakespeare", min_characters=1, length=3, test_stride=1)
    assert len(made.train_y) == 13
    assert len(made.test_y) == 1
    assert not set(made.train_y.tolist()) & set(made.test_y.tolist())


def test_other_parameters_are_another_file(loaded: Loaded) -> None:
    files = {"input.txt": f"one:\n{ALPHABET}\n".encode()}
    params = {"min_characters": 1, "length": 3, "test_stride": 1}
    one = loaded(shakespeare, "TINY", files, "shakespeare", **params)
    two = data.load("shakespeare", stride=2, **params)
    assert len(one.train_y) > len(two.train_y)
    assert len(list(cache.folder().glob("shakespeare-*.safetensors"))) == 2
    with pytest.raises(InputError, match="no role has 1000 characters; lower min_characters or length"):
        data.load("shakespeare")


# -- newsgroups -------------------------------------------------------------------------------------------------------

ARTICLE = """From: someone
Subject: orbit

Somebody wrote:
> a quoted line
Rockets reach the orbit of the moon.

--
Signature of someone
"""


def articles() -> bytes:
    files = {}
    for part, number in (("train", 3), ("test", 2)):
        for group, word in (("sci.space", "orbit moon rocket"), ("rec.autos", "engine wheel car")):
            for article in range(number):
                text = f"From: x\n\n{word} {article} na\xefve\n"
                files[f"20news-bydate-{part}/{group}/{900 + article}"] = text.encode("latin-1")
    return tar("xz", files)


def test_what_gives_an_article_away_is_left_out() -> None:
    assert newsgroups.stripped(ARTICLE) == "Rockets reach the orbit of the moon."
    assert newsgroups.stripped("no header at all") == ""
    assert newsgroups.stripped("A: b\n\nbody\nIn article 5 X writes:\n| quoted\nmore") == "body\nmore"


def test_articles_as_tf_idf(loaded: Loaded) -> None:
    made = loaded(newsgroups, "BY_DATE", {"20news-bydate.tar.xz": articles()}, "20newsgroups", features=6)
    assert (made.train_x.shape, made.test_x.shape, made.classes) == ((6, 6), (4, 6), 2)
    assert made.train_y.tolist() == [0, 0, 0, 1, 1, 1]  # rec.autos comes before sci.space
    assert made.test_y.tolist() == [0, 0, 1, 1]
    assert made.train_x.dtype == np.float32
    assert np.linalg.norm(made.train_x, axis=1) == pytest.approx(np.ones(6), abs=1e-6)
    assert made.train_x[0] @ made.train_x[4] < 0.3 < made.train_x[0] @ made.train_x[1]  # groups share a word only
    assert made.vocabulary is None


def test_articles_as_tokens(loaded: Loaded) -> None:
    params = {"representation": "tokens", "length": 4, "vocabulary": 5}
    made = loaded(newsgroups, "BY_DATE", {"20news-bydate.tar.xz": articles()}, "20newsgroups", **params)
    assert made.vocabulary == 5
    assert made.train_x.dtype == np.int32
    # na\xefve occurs six times and is 2; car and engine come next by the alphabet; all others are 1
    assert made.train_x.tolist()[0] == [4, 1, 3, 1]
    assert made.train_x.tolist()[3] == [1, 1, 1, 1]
    longer = data.load("20newsgroups", representation="tokens", length=8, vocabulary=5)
    assert longer.train_x.tolist()[0] == [4, 1, 3, 1, 2, 0, 0, 0]
    whole = data.load("20newsgroups", representation="tokens", length=8, vocabulary=5, strip=False)
    assert np.count_nonzero(whole.train_x[0]) == 8  # "From", ":" and "x" come first


def test_a_pretrained_tokenizer(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        def __len__(self) -> int:
            return 50

        def __call__(self, texts: list[str], *, truncation: bool, padding: str, max_length: int) -> dict[str, Any]:
            assert (truncation, padding) == (True, "max_length")
            return {"input_ids": [[len(text.split())] * max_length for text in texts]}

    class Transformers:
        class AutoTokenizer:
            @staticmethod
            def from_pretrained(name: str) -> Tokenizer:
                assert name == "some/folder"
                return Tokenizer()

    monkeypatch.setattr(newsgroups, "imported", lambda *_: Transformers)
    params = {"representation": "tokens", "length": 4, "tokenizer": "some/folder"}
    made = loaded(newsgroups, "BY_DATE", {"20news-bydate.tar.xz": articles()}, "20newsgroups", **params)
    assert made.vocabulary == 50
    assert made.train_x.tolist()[0] == [5, 5, 5, 5]


def test_what_is_no_newsgroup(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no articles in 20news-bydate-train and 20news-bydate-test"):
        newsgroups.read([tmp_path])
    with pytest.raises(ParameterError, match="tokenizer='' is not valid; expected a string, or None"):
        data.load("20newsgroups", tokenizer="")


# -- by name ----------------------------------------------------------------------------------------------------------


def test_every_dataset_of_the_papers_has_a_name() -> None:
    papers = ["20newsgroups", "cifar10", "cifar100", "digits", "fashion-mnist", "mnist", "shakespeare", "wind"]
    assert set(papers) <= set(data.names())
    for name in papers:
        for supply in data.get(name).supplies:
            assert supply.sources
            assert supply.digest is not None or name == "cifar100"
    assert len({supply.name for name in data.names() for supply in data.get(name).supplies}) == 8

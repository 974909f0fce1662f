"""What a client has at hand as a member: the terms it was greeted with, what it remembers, and what trains by them."""

from __future__ import annotations

from collections.abc import Callable

from .answers import Hello
from .keep import Keep
from .terms import Train


class Membership:
    """Opened at the first hello, and adapted to every later one."""

    def __init__(self, hello: Hello, opened: Callable[[Hello], Keep], prepare: Callable[[Hello], Train]) -> None:
        self._opened, self._prepare = opened, prepare
        self.hello = hello
        self.keep = opened(hello)
        try:
            self.train = prepare(hello)
        except BaseException:
            self.keep.close()
            raise

    def follow(self, hello: Hello) -> None:
        """The terms are those from now on; what is remembered of another federation stays where it is."""
        before, self.hello = self.hello, hello
        if hello.federation != before.federation:
            self.keep.close()
            self.keep = self._opened(hello)
        if hello.terms != before.terms:
            self.train = self._prepare(hello)

    def close(self) -> None:
        """Lets another process be this client; doing so twice is no error."""
        self.keep.close()

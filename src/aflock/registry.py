"""Things by name: a wrong name is answered with the nearest right one."""

from __future__ import annotations

from typing import Generic, TypeVar

from .errors import ParameterError, UnknownName, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """A dictionary that explains itself."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> None:
        """Makes an item known; a name can be taken only once."""
        if name in self._items:
            raise ParameterError(f"a {self.what} called {name!r} is registered already; choose another name")
        self._items[name] = item

    def get(self, name: str) -> T:
        """The item of that name."""
        if name not in self._items:
            raise unknown(self.what, name, self.names())
        return self._items[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._items)

    def entries(self) -> list[T]:
        """All items, by name."""
        return [self._items[name] for name in self.names()]


def unknown(what: str, name: str, known: list[str]) -> UnknownName:
    """The error for a name that nobody has, with the nearest that somebody has."""
    return UnknownName(f"there is no {what} called {name!r}; {did_you_mean(name, known)}known are {', '.join(known)}")

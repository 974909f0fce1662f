"""Compiles loops with numba: cached on disk, one thread, IEEE arithmetic unless an option says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[F], F]:
    """Decorator; the compiled code is cached next to the module or in the user's cache folder."""

    def wrap(function: F) -> F:
        settings = {"nogil": True, "error_model": "numpy", **options}
        try:
            return cast(F, numba.njit(cache=True, **settings)(function))
        except RuntimeError:  # no writable cache folder (read-only package, no home): compile at every start
            return cast(F, numba.njit(**settings)(function))

    return wrap

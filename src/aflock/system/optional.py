"""Checks for optional packages, which the extras of `pip install aflock[...]` bring."""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import AflockError


def need(*modules: str, extra: str, what: str) -> None:
    """Raises an error that says how to install what is missing; called before the work begins."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise AflockError(f"{what} needs {', '.join(missing)}; pip install 'aflock[{extra}]'")

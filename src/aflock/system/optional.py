"""What is optional: parts that need packages the light core does without."""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import AflockError


def need(*modules: str, extra: str, what: str) -> None:
    """Says how to get what is missing, before anything is begun."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise AflockError(f"{what} needs {', '.join(missing)}; pip install 'aflock[{extra}]'")

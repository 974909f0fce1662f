"""A client file: a member's own Python file, which `aflock join` and `aflock export` import.

model = nn.Linear(784, 10)              an nn.Module or an aflock model, or a function that returns one
batches = DataLoader(...)               pairs (x, y) to iterate over repeatedly, or a function that returns an iterator
local, steps, examples, loss, buffers   optional, as for aflock.Client.run
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import AflockError, InputError

_MODULE = "aflock_client_file"
_OPTIONAL = ("local", "steps", "examples", "loss", "buffers")


def load(file: str | Path) -> dict[str, Any]:
    """Runs the client file; what it defines is returned as arguments for `Client.run`."""
    path = Path(file)
    if not path.is_file():
        raise InputError(f"the client file {path} does not exist; expected one that defines `model` and `batches`")
    try:
        return _arguments(path, _import(path))
    except AflockError:
        raise
    except Exception as error:
        raise InputError(f"the client file {path} cannot be run: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """The type and the text of an error that the client file's code has raised, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def location(file: str | Path, error: Exception) -> str:
    """The client file, with the number of the innermost of its lines in the error's traceback, if there is one."""
    loaded = sys.modules[_MODULE].__file__
    own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == loaded]
    return f"{file}, line {own[-1]}" if own else str(file)


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise InputError(f"the client file {path} is not a Python file; expected a name that ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # pickle (in a DataLoader's workers) finds classes by the name of their module
    sys.path.insert(0, str(path.parent.resolve()))  # so that the client file can import its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _arguments(path: Path, module: ModuleType) -> dict[str, Any]:
    found = {name: getattr(module, name) for name in ("model", "batches", *_OPTIONAL) if hasattr(module, name)}
    for name in ("model", "batches"):
        if name not in found:
            raise InputError(f"{path} does not define `{name}`; a client file defines `model` and `batches`")
    if inspect.isroutine(found["model"]) or inspect.isclass(found["model"]):
        found["model"] = found["model"]()
    return found

"""A client's recipe: a Python file of the user's own that says what is trained on which data.

model = nn.Linear(784, 10)              an nn.Module or an aflock model, or a function that returns one
batches = DataLoader(...)               (x, y), again and again; or a function that returns such
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

from ..errors import AflockError, InputError

_MODULE = "aflock_recipe"
_OPTIONAL = ("local", "steps", "examples", "loss", "buffers")


def load(file: str | Path) -> dict[str, Any]:
    """What the file defines, as arguments for `Client.run`."""
    path = Path(file)
    if not path.is_file():
        raise InputError(f"{path} does not exist; expected a Python file that defines `model` and `batches`")
    try:
        return _found(path, _executed(path))
    except AflockError:
        raise
    except Exception as error:
        raise InputError(f"{path} cannot be run: {reason(error)}") from error


def reason(error: Exception) -> str:
    """What somebody else's code has raised, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def place(file: str | Path, error: Exception) -> str:
    """The recipe's file, with the last of its lines on the way to the error, if any."""
    loaded = sys.modules[_MODULE].__file__
    own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == loaded]
    return f"{file}, line {own[-1]}" if own else str(file)


def _executed(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file; expected a name that ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # what it defines must be importable by those who pickle it
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _found(path: Path, module: ModuleType) -> dict[str, Any]:
    found = {name: getattr(module, name) for name in ("model", "batches", *_OPTIONAL) if hasattr(module, name)}
    for name in ("model", "batches"):
        if name not in found:
            raise InputError(f"{path} does not define `{name}`; a recipe defines `model` and `batches`")
    if inspect.isroutine(found["model"]) or inspect.isclass(found["model"]):
        found["model"] = found["model"]()
    return found

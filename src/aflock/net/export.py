"""`aflock export`: the model of a federation, for whoever wants to use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..errors import InputError
from ..files import write_whole
from ..types import Vector
from . import weights


def write(folder: Path, out: Path, *, best: bool = False, recipe: str | None = None) -> str:
    """Writes the model at the last snapshot, or the best one measured; says what it wrote."""
    source = folder / ("best.safetensors" if best else "model.safetensors")
    if not source.is_file():
        hint = "set [evaluation] every" if best else "stop the server, or wait for its next snapshot"
        raise InputError(f"{source} does not exist yet; {hint}")
    try:
        vector = weights.flat(source)
    except ConfigError as error:
        raise InputError(str(error)) from None
    if recipe is None:
        write_whole(out, source.read_bytes())
        return f"{out}: {vector.size:,} weights, one float32 tensor"
    count = _write_state_dict(out, vector, recipe)
    return f"{out}: a state_dict of {count} tensors; torch.load reads it"


def _write_state_dict(out: Path, vector: Vector, recipe: str) -> int:
    """The weights in a torch module's own tensors."""
    from ..extras import need
    from .recipe import load

    need("torch", extra="torch", what="a state_dict")
    import torch

    module: Any = load(recipe)["model"]
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"the `model` of {recipe} is a {type(module).__name__}; expected a torch.nn.Module")
    parameters = list(module.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    if total != vector.size:
        raise InputError(f"the `model` of {recipe} has {total} weights; the federation's has {vector.size}")
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(torch.from_numpy(vector.copy()), parameters)
    state = module.state_dict()
    torch.save(state, out)
    return len(state)

"""`aflock export`: writes the model of a federation to a file, as safetensors or as a torch state_dict."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ...config import ConfigError
from ...errors import InputError
from ...system.files import write_whole
from ...types import Vector
from ..identity import members
from ..storage import model_file


def write(folder: Path, out: Path, *, best: bool = False, client_file: str | None = None) -> str:
    """Writes the model of the last snapshot, or the best one measured; returns a line for the user.

    With a client file, its `model` gives the names and shapes of the state_dict's tensors.
    """
    _check_out(folder, out)
    vector, about = _model(folder, best=best)
    which = "the best one measured" if best else "the one of the last snapshot (a server writes one when it stops)"
    text = f"version {about.get('version', 'unknown')}, {which}"
    try:
        if client_file is None:
            model_file.write(out, vector, about)
            return f"{out}: {text}; {vector.size:,} weights, one float32 tensor"
        count = _write_state_dict(out, vector, client_file)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error.strerror}); choose another --out") from None
    return f"{out}: {text}; a state_dict of {count} tensors, torch.load reads it"


def _check_out(folder: Path, out: Path) -> None:
    members.existing(folder)
    if out.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{out} is in the federation's data folder; choose a file outside of it with --out")
    if not out.parent.is_dir():
        raise InputError(f"the folder {out.parent} does not exist; make it, or choose another --out")
    if out.is_dir():
        raise InputError(f"{out} is a folder; expected the name of a file for --out")


def _model(folder: Path, *, best: bool) -> tuple[Vector, dict[str, str]]:
    source = folder / ("best.safetensors" if best else "model.safetensors")
    if not source.is_file():
        hint = "set [evaluation] every" if best else "stop the server, or wait for its next snapshot"
        raise InputError(f"{source} does not exist yet; {hint}")
    try:
        return model_file.read(source)
    except ConfigError as error:
        raise InputError(str(error)) from None


def _write_state_dict(out: Path, vector: Vector, client_file: str) -> int:
    """Writes the weights as the state_dict of the client file's module; returns how many tensors it has."""
    from ...system.optional import need
    from ..client.client_file import load

    need("torch", extra="torch", what="a state_dict")
    import torch

    module: Any = load(client_file)["model"]
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"the `model` of {client_file} is a {type(module).__name__}; expected a torch.nn.Module")
    parameters = list(module.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    if total != vector.size:
        raise InputError(f"the `model` of {client_file} has {total} weights; the federation's has {vector.size}")
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(torch.from_numpy(vector.copy()), parameters)
    state = module.state_dict()
    content = io.BytesIO()
    torch.save(state, content)
    write_whole(out, content.getbuffer())
    return len(state)

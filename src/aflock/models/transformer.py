"""A pretrained transformer with a new head for the classes: any checkpoint of the transformers library.

    tokens (B, T) -> encoder of the checkpoint -> its classification head

The checkpoint is a folder, an installed package that contains one, or a name on the hub (DistilBERT, BERT, MiniLM ...).
Tokens come from the dataset (20newsgroups with representation = "tokens" and the checkpoint's tokenizer); padding is
masked. The start is the checkpoint's weights and a head drawn from the seed; dropout draws from the batch, as in
torch_module.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from .torch_module import TorchModule


class Encoder(nn.Module):
    """The checkpoint's own module, from tokens to logits."""

    def __init__(self, inner: Any, padding: int) -> None:
        super().__init__()
        self.inner, self.padding = inner, padding

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, as integers or as floats that hold integers, to logits."""
        tokens = x.long()
        logits: Tensor = self.inner(input_ids=tokens, attention_mask=(tokens != self.padding).long()).logits
        return logits


def model(checkpoint: str, classes: int, length: int, layers: int | None) -> TorchModule:
    """The network as a flat-vector model, for rows of that many tokens; `layers` keeps the first ones only."""
    source = locate(checkpoint)

    def build() -> nn.Module:
        from transformers import AutoConfig, AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it would warn that the head is untrained
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            config = AutoConfig.from_pretrained(source, num_labels=classes)
            if layers is not None:
                config.num_hidden_layers = layers
            inner = AutoModelForSequenceClassification.from_pretrained(source, config=config)
        except (OSError, ValueError) as error:
            raise InputError(f"the checkpoint {checkpoint!r} cannot be loaded: {str(error).splitlines()[0]}") from None
        inner.to(torch.float32)
        return Encoder(inner, int(config.pad_token_id or 0))

    return TorchModule(build, features=length, classes=classes)


def locate(checkpoint: str) -> str:
    """A folder as it is; the folder `model` of an installed package of that name; else a name for the hub."""
    if Path(checkpoint).is_dir():
        return checkpoint
    found = importlib.util.find_spec(checkpoint) if checkpoint.isidentifier() else None
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        if (Path(folder) / "model" / "config.json").is_file():
            return str(Path(folder) / "model")
    return checkpoint

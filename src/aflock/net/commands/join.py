"""`aflock join`: a client of a federation, until it has ended or Ctrl-C."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from ..errors import AflockError
from ..extras import need
from .recipe import load, place, reason


class TrainingFailed(AflockError):
    """The code of a recipe has raised something, which is the cause of this."""


def run(options: argparse.Namespace) -> int:
    """Takes part."""
    need("aiohttp", extra="net", what="a client")
    from .client import Client

    logging.basicConfig(level=logging.WARNING if options.quiet else logging.INFO, format="%(message)s")
    recipe = load(options.recipe)
    client = Client(
        options.url,
        Path(options.token_file),
        ca=None if options.ca is None else Path(options.ca),
        state_dir=None if options.state_dir is None else Path(options.state_dir),
        insecure=options.insecure,
        certificate=None if options.certificate is None else Path(options.certificate),
        key=None if options.key is None else Path(options.key),
    )
    try:
        client.run(**recipe, jobs=options.jobs)
    except AflockError:
        raise
    except Exception as error:  # what goes wrong with the network or this client's own files is an AflockError
        raise TrainingFailed(f"training failed in {place(options.recipe, error)}: {reason(error)}") from error
    return 0

"""Shared fixtures."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `contract.cases` and friends are plain modules of the test tree

"""The federation's state machine loads nothing that reaches a clock, a file, a socket or a logger.

import-linter checks the same, but it does not follow what a package's `__init__` imports. Here the modules that an
import really loads are read.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FORBIDDEN = {
    "asyncio", "logging", "mmap", "os", "pathlib", "shutil", "socket", "subprocess", "tempfile", "threading", "time",
    "urllib",
}  # fmt: skip

LIST = """
import sys, aflock.net.federation.federation
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "aflock":
        print(name, module.__file__)
"""


def imported(file: Path) -> Iterator[str]:
    """The top-level packages that a module imports when it is loaded, not those its functions import when called."""
    todo: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0]
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)


def test_the_state_machine_loads_no_module_that_reaches_the_outside() -> None:
    listed = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, check=True).stdout
    loaded = dict(line.split(maxsplit=1) for line in listed.splitlines())
    assert "aflock.coordination.coordinator" in loaded
    found = {name: FORBIDDEN & set(imported(Path(file))) for name, file in loaded.items()}
    assert {name: sorted(modules) for name, modules in found.items() if modules} == {}

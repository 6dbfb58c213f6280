"""Programs that start functions as workers: importable by these, and doing something as the main program."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_program(path: Path, head: str, functions: str, main: str) -> str:
    """Write a program.

    Args:
        path: Where.
        head: What stands before all.
        functions: Its functions, indented as one likes.
        main: What it does as the main program, ditto.

    Returns:
        The path.
    """
    body = textwrap.indent(textwrap.dedent(main).strip("\n"), "    ")
    path.write_text(f"{head}\n{textwrap.dedent(functions)}\nif __name__ == '__main__':\n{body}\n", encoding="utf-8")
    return str(path)

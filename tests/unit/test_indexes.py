"""A package whose first comment has a table of modules lists all of them, with one line each."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "elastic_run"
PACKAGES = sorted(path.parent for path in ROOT.rglob("__init__.py"))


def modules(package: Path) -> set[str]:
    """Return the names of a package's modules and of the packages in it, those that Python runs by themselves aside."""
    files = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    return files | {path.parent.name for path in package.glob("*/__init__.py")}


def listed(package: Path) -> list[str]:
    """Return the first column of the table in a package's docstring."""
    doc = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    return re.findall(r"^\| `(\w+)` \|", doc, re.MULTILINE)


def test_each_package_lists_its_modules() -> None:
    """A reader finds every module of a package, with one line each, where the package begins."""
    wrong = {}
    for package in PACKAGES:
        name = ".".join(package.relative_to(ROOT).parts)
        if listed(package) and set(listed(package)) != modules(package):
            wrong[name] = set(listed(package)) ^ modules(package)
    assert wrong == {}

"""Packages with entry points, as an installer would leave them, for programs that get their directory on PYTHONPATH."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_plugin(directory: Path, package: str, group: str, entry_points: dict[str, str], source: str = "") -> None:
    """Write a package's metadata, and its module.

    Args:
        directory: Where, the same for several packages.
        package: Name of the package and its module.
        group: Group of its entry points.
        entry_points: What each name of the group stands for, `MODULE:NAME`.
        source: Source of the module; empty for none.
    """
    metadata = directory / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entry_points.items()), ""]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    if source:
        (directory / f"{package}.py").write_text(source, encoding="utf-8")

"""Names of a package that are loaded when they are first used (PEP 562): a public API that costs nothing to import."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a package's `__getattr__`.

    Args:
        package: The package's `__name__`.
        homes: The module of each name, relative to the package.

    Returns:
        A function that imports the module, keeps the value in the package, and raises AttributeError for other names.
    """

    def load(name: str) -> object:
        if name not in homes:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message)
        import importlib  # noqa: PLC0415 - not on the way to the first worker

        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load

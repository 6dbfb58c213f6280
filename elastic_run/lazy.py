"""Names of a module that are loaded when they are first used (PEP 562): a public API that costs nothing to import."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_names(module: str, homes: Mapping[str, str], *, logger: str = "") -> Callable[[str], object]:
    """Return a module's `__getattr__`.

    Args:
        module: The module's `__name__`.
        homes: For each name the module that has it, relative to this one unless it begins with `elastic_run`.
            `MODULE:OTHER` has it under another name, and `MODULE:` is the module itself.
        logger: A name under which the module's logger can be had, as in torch's module of the same kind.

    Returns:
        A function that imports the home, keeps the value in the module, and raises AttributeError for other names.
    """

    def load(name: str) -> object:
        if name == logger:
            from elastic_run.utils.logging import get_logger

            return get_logger(module)
        if name not in homes:
            message = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(message)
        import importlib

        home, colon, other = homes[name].partition(":")
        found = importlib.import_module(home if home.partition(".")[0] == "elastic_run" else f"{module}.{home}")
        value = found if colon and not other else getattr(found, other or name)
        setattr(sys.modules[module], name, value)
        return value

    return load

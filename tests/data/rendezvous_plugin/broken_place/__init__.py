"""A package whose rendezvous backend can't be imported: something it needs is not installed."""

import a_missing_library  # type: ignore[import-not-found]  # noqa: F401

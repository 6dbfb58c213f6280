"""Data loading for elastic jobs; these are for training scripts, and only the sampler imports torch."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.utils.data.cycling_iterator import CyclingIterator
    from elastic_run.utils.data.elastic_distributed_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from importlib import import_module  # noqa: PLC0415 - loaded by now, and a lazy name is rare

    module = "cycling_iterator" if name == "CyclingIterator" else "elastic_distributed_sampler"
    return getattr(import_module(f"{__name__}.{module}"), name)

"""Start worker processes, watch them, and take their output; torch's names, each loaded when it is first used."""

from __future__ import annotations

from elastic_run import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.multiprocessing.api import SignalException as SignalException
    from elastic_run.multiprocessing.api import Std as Std
    from elastic_run.multiprocessing.api import get_std_cm as get_std_cm
    from elastic_run.multiprocessing.api import to_map as to_map
    from elastic_run.multiprocessing.errors.failures import ProcessFailure as ProcessFailure
    from elastic_run.multiprocessing.functions.start_processes import MultiprocessContext as MultiprocessContext
    from elastic_run.multiprocessing.functions.start_processes import PContext as PContext
    from elastic_run.multiprocessing.functions.start_processes import RunProcsResult as RunProcsResult
    from elastic_run.multiprocessing.functions.start_processes import SubprocessContext as SubprocessContext
    from elastic_run.multiprocessing.functions.start_processes import start_processes as start_processes
    from elastic_run.multiprocessing.logs import DefaultLogsSpecs as DefaultLogsSpecs
    from elastic_run.multiprocessing.logs import LogsDest as LogsDest
    from elastic_run.multiprocessing.logs import LogsSpecs as LogsSpecs

_HOMES = {
    "DefaultLogsSpecs": "logs",
    "LogsDest": "logs",
    "LogsSpecs": "logs",
    "MultiprocessContext": "functions.start_processes",
    "PContext": "functions.start_processes",
    "ProcessFailure": "errors",
    "RunProcsResult": "functions.start_processes",
    "SignalException": "api",
    "get_std_cm": "api",
    "Std": "api",
    "SubprocessContext": "functions.start_processes",
    "start_processes": "functions.start_processes",
    "to_map": "api",
}

__all__ = list(_HOMES)

#: Names that torch's modules have from others, and that programs take from there.
_BORROWED = {
    "NumaOptions": "elastic_run.cluster.numa",
    "get_logger": "elastic_run.utils",
    "record": "errors",
}

__getattr__ = lazy_names(__name__, _HOMES | _BORROWED, logger="logger")

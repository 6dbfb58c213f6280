"""The command: from the words of a command line to a job, and from the job to an exit code.

    words -> parse_args -> Request -> checks -> make_config -> launch_job -> exit code
                                             `-> --explain prints it, and the program ends with 0

`run_command` tells that story. The other public names are torch's, for programs that call them: `main` and `run` raise
where `run_command` prints and exits. Nothing is imported here that the first worker doesn't need: see law 1 in
docs/architecture.md.
"""

from __future__ import annotations

import errno
import os
import sys

from elastic_run import contract, lazy_names
from elastic_run.cli.checks import check_master, check_request, find_notices
from elastic_run.cli.flags import CONFIGURATION, FLAGS
from elastic_run.cli.make_config import count_workers, get_rdzv_endpoint, make_config
from elastic_run.cli.parser import LauncherArgumentParser
from elastic_run.cli.request import (
    choose_rendezvous,
    complete_arguments,
    get_use_env,
    keep_static_place,
    may_have_scheduler,
    name_source,
    read_request,
    write_given,
)
from elastic_run.cli.values import node_range
from elastic_run.multiprocessing.fork_exec import ensure_standard_descriptors
from elastic_run.notices import UsageError, find_foreign_place, say
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.cli.flags import Flag
    from elastic_run.cli.request import Origin, Origins, Request
    from elastic_run.core.config import JoinCommand
    from elastic_run.launch_config import LaunchConfig

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

#: The name of torch's console script. It calls `main` without words, and is a command under `elastic_run.compat`.
_TORCHS_COMMAND = "torchrun"

#: Names that torch's module has from others, and that programs take from there.
__getattr__ = lazy_names(
    __name__,
    {
        "DefaultLogsSpecs": "elastic_run.multiprocessing",
        "LaunchConfig": "elastic_run.launcher",
        "LogsSpecs": "elastic_run.multiprocessing",
        "Std": "elastic_run.multiprocessing",
        "elastic_launch": "elastic_run.launcher",
        "get_logger": "elastic_run.utils",
        "macros": "elastic_run.utils",
        "record": "elastic_run.multiprocessing.errors",
    },
    logger="logger",
)


def main(args: Sequence[str] | None = None) -> None:
    """Run a job for a program, as torch's function of this name does; `run_command` is the command.

    Args:
        args: The words behind the command; None for those of this process.

    Raises:
        UsageError: A value is not allowed; it is a ValueError.
        ChildFailedError: A worker failed and restarts are used up.
        SystemExit: A flag is unknown, or a value or the script is missing (2).
    """
    if args is None and os.path.basename(sys.argv[0]) == _TORCHS_COMMAND:
        run_command()
        return
    from elastic_run.multiprocessing.errors import record

    parser = LauncherArgumentParser(FLAGS, raises_values=True)
    record(lambda: _run(parser.parse_args(args), parser.origins))()


def run_command(
    words: Sequence[str] | None = None,
    flags: Sequence[Flag] = FLAGS,
    command_words: Sequence[str] = ("elastic-run",),
) -> None:
    """Run a job for the command line, and leave with its exit code unless that is 0.

    `words` stand behind the command; None for those of this process. `command_words` are the command itself, to show
    how other nodes join the job.
    """
    parser = LauncherArgumentParser(flags)
    args: Namespace = parser.parse_args(sys.argv[1:] if words is None else words)
    leave: Callable[[int], object] = sys.exit
    try:
        # Before anything is opened: a closed standard descriptor's number would go to the first file.
        ensure_standard_descriptors()
        if args.hosts:
            sys.exit(_run_on_hosts(args, parser.origins, flags))
        request = _prepare(args, parser.origins, flags)
        if request is None:
            return
        _wait_for_hosts(args)
        config, command, command_args = make_config(request, os.environ)
        if config.max_nodes > 1:
            join_command = _make_join_command(args, flags, command_words, parser.origins)
            config.node_config = replace(config.node_config, join_command=join_command)
        from elastic_run.launch_config import PluginHungError, launch_job

        try:
            code = launch_job(config, command, command_args)
        except PluginHungError as hung:
            code, leave = hung.exit_code, os._exit
        is_stopped = code == contract.EXIT_SIGNAL_BASE + 15  # by SIGTERM
        if args.requeue is not None and is_stopped and not request.has_left_slurm:
            from elastic_run.schedulers.actions import requeue_job

            is_wanted, text = requeue_job(os.environ, args.requeue)
            if text:
                say(text)
            code = contract.EXIT_REQUEUED if is_wanted else code
    except KeyboardInterrupt:
        # Before the loop has the signals: nothing was started yet.
        code = contract.EXIT_SIGNAL_BASE + 2
    except Exception as error:  # noqa: BLE001 - what nobody foresaw is raised again in there
        code = _report_error(error, parser.origins)
    if code != contract.EXIT_SUCCESS or leave is not sys.exit:
        leave(code)


def _run_on_hosts(args: Namespace, origins: Origins, flags: Sequence[Flag]) -> int:
    """Start the job on the hosts of --hosts, and return its exit code when it has ended."""
    from elastic_run.cli.hosts import describe_job, plan_job
    from elastic_run.hosts.connections import run_on_hosts
    from elastic_run.notices import print_text

    job = plan_job(args, origins, flags, os.environ)
    if not (args.explain or args.explain_all):
        return run_on_hosts(job)
    print_text(describe_job(job))
    return contract.EXIT_SUCCESS


def _wait_for_hosts(args: Namespace) -> None:
    """Wait for the other hosts of --hosts if this launcher was started by it; they say where the nodes meet."""
    if mark := os.environ.get(contract.ENV_HOSTS_MARK):
        from elastic_run.hosts.remote import say_ready, wait_start

        say_ready(mark)
        from elastic_run.launch_config import import_ahead

        import_ahead()
        args.rdzv_endpoint = wait_start() or args.rdzv_endpoint


def _prepare(args: Namespace, origins: Origins | None, flags: Sequence[Flag] = FLAGS) -> Request | None:
    """Fill in what follows from other values, check everything, and say what the user should know.

    None: the job was only explained. `args` is changed, and new origins are added to `origins`, which are None where a
    program made the namespace.
    """
    recorded: Origins = {} if origins is None else origins
    complete_arguments(args)
    try:
        found = None
        if may_have_scheduler(os.environ):
            from elastic_run.cli.scheduler_values import complete_from_cluster

            found = complete_from_cluster(args, os.environ, origins)
        keep_static_place(args, recorded)
        workers = count_workers(args.nproc_per_node, os.environ)
        request = read_request(args, workers, os.environ, origins=recorded, found=found)
        check_request(request, os.environ)
        if origins is not None:
            check_master(request)
    except UsageError as error:
        raise UsageError(name_source(str(error), recorded, os.environ)) from None
    notices = [*([] if found is None else found.notices), *find_notices(request, os.environ)]
    choose_rendezvous(request)
    notices = [name_source(notice, recorded, os.environ) for notice in notices]
    if not (args.explain or args.explain_all):
        for notice in notices:
            say(notice)
        return request
    from elastic_run.cli.explain import render_explanation
    from elastic_run.launch_config import preview_environments
    from elastic_run.notices import print_text

    # Without the directory, which would be made; `check_request` has tried it out.
    quiet = replace(request, args=type(args)(**{**vars(args), "log_dir": None}))
    config, command, command_args = make_config(quiet, dict(os.environ), tell=lambda _: None)
    text = render_explanation(
        request,
        flags,
        config=config,
        command=[command, *command_args],
        environments=preview_environments(config, command, command_args),
        environ=os.environ,
        notices=notices,
    )
    print_text(text)
    return None


def _make_join_command(
    args: Namespace, flags: Sequence[Flag], command_words: Sequence[str], origins: Mapping[str, Origin]
) -> JoinCommand:
    """Return this node's command line in the parts that the command for other nodes is made of."""
    from elastic_run.core.config import JoinCommand

    program = (args.training_script, *args.training_script_args)
    is_told_apart = not args.training_script.startswith("-") and "--" not in args.training_script_args
    return JoinCommand(
        command=tuple(command_words),
        flags=tuple(filter(None, (write_given(flag, args, origins) for flag in flags if flag.group != CONFIGURATION))),
        program=program if is_told_apart else ("--", *program),
    )


def _report_error(error: Exception, origins: Mapping[str, Origin]) -> int:
    """Say in one line why no job was started, or that it ended by a defect of ours, and return the exit code."""
    if isinstance(error, ImportError) and str(error.name).startswith("elastic_run."):
        say(f"error: {error}: the files of elastic-run are not those that this process began with")
        return contract.EXIT_INTERNAL_ERROR
    from elastic_run.rendezvous.api import RendezvousError, is_kind

    if isinstance(error, (UsageError, RendezvousError)):
        say(f"error: {name_source(str(error), origins, os.environ)}")
        return contract.EXIT_USAGE if isinstance(error, UsageError) else contract.EXIT_RENDEZVOUS
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        say(f"error: no job was started: {error} (ulimit -n is the limit of this process)")
        return contract.EXIT_CANNOT_START
    if os.environ.get("LOGLEVEL", "").upper() == "DEBUG":
        raise error
    from elastic_run.multiprocessing.logs import LogsPluginError
    from elastic_run.utils import describe_exception

    if is_kind(error, RendezvousError):  # torch's, of a plug-in
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        say(f"error: the rendezvous plug-in makes no handler: {error}{cause} (LOGLEVEL=DEBUG shows the traceback)")
        return contract.EXIT_RENDEZVOUS
    place = find_foreign_place(error)
    if isinstance(error, LogsPluginError):
        say(f"error: {error}")
    elif place:  # of a plug-in
        told = f"{describe_exception(error)}, at {place}, which is no code of elastic-run"
        say(f"error: {told} (LOGLEVEL=DEBUG shows the traceback)")
    else:
        say(f"internal error: {describe_exception(error)} (please report it; LOGLEVEL=DEBUG shows the traceback)")
    return contract.EXIT_INTERNAL_ERROR


# --- for programs, under torch's names -------------------------------------------------------------------------------


def run(args: Namespace) -> None:
    """Run a job, as torch's function of this name does.

    Args:
        args: The command line, from `parse_args` or from the parser. Values that follow from others are filled in.

    Raises:
        UsageError: The job can't be started as asked for.
        ChildFailedError: A worker failed and restarts are used up.
    """
    _run(args, None)


def _run(args: Namespace, origins: Origins | None) -> None:
    request = _prepare(args, origins)
    if request is not None:
        from elastic_run.launcher import elastic_launch

        config, command, command_args = make_config(request, os.environ)
        elastic_launch(config, command)(*command_args)


def get_args_parser() -> LauncherArgumentParser:
    """Return the parser of the command line, for programs that build on it.

    It leaves --config and --explain to them: such names are common, and argparse refuses a flag that is there already.
    """
    return LauncherArgumentParser([flag for flag in FLAGS if flag.group != CONFIGURATION])


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Read a command line; a wrong one is told in one line.

    Args:
        args: The words behind the command; None for those of this process.

    Returns:
        The values by the flags' names.

    Raises:
        SystemExit: It is wrong (2), or asks for the help or the version (0).
    """
    namespace: Namespace = LauncherArgumentParser(FLAGS).parse_args(args)
    return namespace


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Read ``MIN[:MAX]``.

    Args:
        nnodes: The text.

    Returns:
        Fewest and most nodes.

    Raises:
        UsageError: It isn't of that form.
    """
    try:
        return node_range(nnodes)
    except ValueError as error:
        message = f"--nnodes: {nnodes!r} {error}"
        raise UsageError(message) from None


def determine_local_world_size(nproc_per_node: str) -> int:
    """Find out how many workers this node gets.

    Args:
        nproc_per_node: A number, or auto, cpu, gpu, xpu, or a device that a package adds to torch.

    Returns:
        At least 1.

    Raises:
        UsageError: It is none of these, or there is no such device here.
    """
    return count_workers(nproc_per_node, os.environ)


def config_from_args(args: Namespace) -> tuple[LaunchConfig, str, list[str]]:
    """Turn a command line into a configuration and the command of the workers.

    Args:
        args: The command line, from `parse_args` or from the parser.

    Returns:
        The configuration, the program, and its arguments.

    Raises:
        UsageError: A value is not allowed, or no plug-in has the name that was given.
    """
    complete_arguments(args)
    workers = count_workers(args.nproc_per_node, os.environ)
    return make_config(read_request(args, workers, os.environ), os.environ)


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script in this interpreter, as ``__main__``.

    Args:
        training_script: Its path.
        training_script_args: Its arguments.
    """
    import runpy

    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


if __name__ == "__main__":
    run_command()

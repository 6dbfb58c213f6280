"""The legacy front door, `python -m elastic_run.launch`: torch.distributed.launch's.

It takes the same flags and --use-env. Without that one every worker gets --local-rank=N as the first argument of its
script, as scripts of that time expect; those of torch 1 want --local_rank=N, which --local-rank-underscore gives them.
"""

from __future__ import annotations

from elastic_run import lazy_names
from elastic_run.cli.flags import LEGACY_FLAGS
from elastic_run.cli.parser import LauncherArgumentParser
from elastic_run.run import run, run_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

__all__ = ["launch", "main", "parse_args"]

_WORDS = ("python", "-m", "elastic_run.launch")

#: Names that torch's module has from others, and that programs take from there.
__getattr__ = lazy_names(
    __name__,
    {
        "get_args_parser": "elastic_run.run",
    },
)


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Read a command line, by default this process's; see `elastic_run.run.parse_args`."""
    namespace: Namespace = LauncherArgumentParser(LEGACY_FLAGS).parse_args(args)
    return namespace


def launch(args: Namespace) -> None:
    """Run a job, as torch's function of this name does; see `elastic_run.run.run`."""
    run(args)


def main(args: Sequence[str] | None = None) -> None:
    """Run a job for a program, as torch's function of this name does; see `elastic_run.run.main`."""
    launch(LauncherArgumentParser(LEGACY_FLAGS, raises_values=True).parse_args(args))


def run_legacy_command(words: Sequence[str] | None = None) -> None:
    """Run a job for the command line of this front door, by default this process's, and leave with its exit code."""
    run_command(words, LEGACY_FLAGS, _WORDS)


if __name__ == "__main__":
    run_legacy_command()

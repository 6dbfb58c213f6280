"""elastic-run as users have it: installed, not editable, in an environment without test tools.

An editable install and a coverage tool each put a .pth file into the environment that every start of Python pays for,
the launcher's and the workers'. So the benchmarks run in a throw-away environment: this one's packages by symbolic
link, elastic-run copied and compiled as pip does it, and the two commands as pip writes them. Both launchers, the
workers and the floor's workers run on its interpreter.
"""

from __future__ import annotations

import compileall
import shutil
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
#: Files of site-packages that a user's environment doesn't have.
_UNWANTED = ("_editable_impl", "__editable__", "a1_coverage", "__pycache__")
_COMMAND = """\
#!{python}
import sys
from {module} import main
if __name__ == '__main__':
    sys.argv[0] = sys.argv[0].removesuffix('.exe')
    sys.exit(main())
"""


@dataclass(frozen=True)
class Installation:
    """Commands to measure.

    Args:
        directory: A place to work in.
        python: The interpreter of all workers.
        elastic_run: The command.
        torchrun: The command.
    """

    directory: Path
    python: str
    elastic_run: tuple[str, ...]
    torchrun: tuple[str, ...]

    def worker(self, name: str) -> str:
        """Return the path of one of the scripts beside this file."""
        return str(Path(__file__).parent / "workers" / f"{name}.py")

    def launcher(self, name: str, nproc: int, *arguments: str) -> list[str]:
        """Return the command line of a launcher on this node alone.

        Args:
            name: `elastic-run` or `torchrun`.
            nproc: How many workers.
            arguments: What follows.
        """
        program = {"elastic-run": self.elastic_run, "torchrun": self.torchrun}[name]
        return [*program, "--standalone", f"--nproc-per-node={nproc}", *arguments]


def install(directory: Path) -> Installation:
    """Make the throw-away environment.

    Args:
        directory: Where; an empty directory.

    Returns:
        What is in it.
    """
    environment = directory / "environment"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(environment)
    python = str(environment / "bin" / "python")
    packages = environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(_UNWANTED) and entry.name != "elastic_run":
            (packages / entry.name).symlink_to(entry)
    shutil.copytree(_ROOT / "elastic_run", packages / "elastic_run", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(packages / "elastic_run", quiet=2)
    return Installation(
        directory=directory,
        python=python,
        elastic_run=(_write_command(environment, "elastic-run", "elastic_run.__main__"),),
        torchrun=(_write_command(environment, "torchrun", "torch.distributed.run"),),
    )


def _write_command(environment: Path, name: str, module: str) -> str:
    path = environment / "bin" / name
    path.write_text(_COMMAND.format(python=environment / "bin" / "python", module=module), encoding="ascii")
    path.chmod(0o755)
    return str(path)

"""elastic-run as users have it: installed, not editable, in an environment without test tools.

An editable install and a coverage tool each put a .pth file into the environment that every start of Python pays for,
the launcher's and the workers'. So the benchmarks run in a throw-away environment: this one's packages by symbolic
link, elastic-run copied and compiled as pip does it, and the two commands as pip writes them. Both launchers, the
workers and the floor's workers run on its interpreter.

ft_launcher, of NVIDIA's resiliency extension, has an environment of its own, with what it needs besides. Where that can
be had, tools/setup-peers.sh puts it into a directory; without it there are two launchers.
"""

from __future__ import annotations

import compileall
import shutil
import sys
import sysconfig
import venv
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROOT = Path(__file__).resolve().parents[1]
_PEERS = _ROOT / ".peers"
#: Files of site-packages that a user's environment doesn't have.
_UNWANTED = ("_editable_impl", "__editable__", "a1_coverage", "elastic-run-tests", "__pycache__")
_COMMAND = """\
#!{python}
import sys
from {module} import main
if __name__ == '__main__':
    sys.argv[0] = sys.argv[0].removesuffix('.exe')
    sys.exit(main())
"""


@dataclass(frozen=True)
class Effort:
    """How much is measured: what `make bench` records, and what a shorter run may reduce.

    Args:
        pairs: Turns that elastic-run and torchrun, or the floor, take.
        starts: Starts in a row of a job whose workers connect.
        restarts: Restarts of a job one of whose workers is late.
        kills: Launchers that are killed.
        megabytes: Size of the output that has to arrive whole.
        rounds: Rounds of each number of nodes.
        nodes: The largest number of nodes.
        connections: Rounds of each kind in which the workers of several nodes connect.
        faults: Planted faults, at most.
    """

    pairs: int = 5
    starts: int = 1000
    restarts: int = 100
    kills: int = 50
    megabytes: int = 200
    rounds: int = 3
    nodes: int = 4000
    connections: int = 100
    faults: int = 1000


@dataclass(frozen=True)
class Installation:
    """Commands to measure.

    Args:
        directory: A place to work in.
        python: The interpreter of all workers.
        elastic_run: The command.
        torchrun: The command.
        ft_launcher: The command, or nothing where it isn't installed.
        ft_launcher_version: That of nvidia-resiliency-ext, or "".
    """

    directory: Path
    python: str
    elastic_run: tuple[str, ...]
    torchrun: tuple[str, ...]
    ft_launcher: tuple[str, ...] = ()
    ft_launcher_version: str = ""

    @property
    def launchers(self) -> tuple[str, ...]:
        """The names of those that are here, ours first."""
        return ("elastic-run", "torchrun", "ft_launcher") if self.ft_launcher else ("elastic-run", "torchrun")

    def worker(self, name: str) -> str:
        """Return the path of one of the scripts beside this file."""
        return str(Path(__file__).parent / "workers" / f"{name}.py")

    def launcher(self, name: str, nproc: int, *arguments: str) -> list[str]:
        """Return the command line of a launcher on this node alone."""
        program = {"elastic-run": self.elastic_run, "torchrun": self.torchrun, "ft_launcher": self.ft_launcher}[name]
        return [*program, "--standalone", f"--nproc-per-node={nproc}", *arguments]


def install(directory: Path) -> Installation:
    """Make the throw-away environment, and one for ft_launcher where that is here."""
    environment = directory / "environment"
    ours = _make_environment(environment, [Path(sysconfig.get_path("purelib"))])
    shutil.copytree(_ROOT / "elastic_run", ours / "elastic_run", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(ours / "elastic_run", quiet=2)
    installation = Installation(
        directory=directory,
        python=str(environment / "bin" / "python"),
        elastic_run=(_write_command(environment, "elastic-run", "elastic_run.__main__"),),
        torchrun=(_write_command(environment, "torchrun", "torch.distributed.run"),),
    )
    return _with_peers(installation) if _PEERS.is_dir() else installation


def _with_peers(installation: Installation) -> Installation:
    environment = installation.directory / "environment-of-peers"
    _make_environment(environment, [_PEERS, Path(sysconfig.get_path("purelib"))])
    command = _write_command(environment, "ft_launcher", "nvidia_resiliency_ext.fault_tolerance.launcher")
    (found,) = distributions(name="nvidia-resiliency-ext", path=[str(_PEERS)])
    return replace(installation, ft_launcher=(command,), ft_launcher_version=found.version)


def _make_environment(environment: Path, sources: Sequence[Path]) -> Path:
    """Make an environment with what directories hold, the first that has it; returns its directory of packages."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(environment)
    packages = environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for source in sources:
        for entry in source.iterdir():
            place = packages / entry.name
            if not entry.name.startswith(_UNWANTED) and entry.name != "elastic_run" and not place.is_symlink():
                place.symlink_to(entry)
    return packages


def _write_command(environment: Path, name: str, module: str) -> str:
    path = environment / "bin" / name
    path.write_text(_COMMAND.format(python=environment / "bin" / "python", module=module), encoding="ascii")
    path.chmod(0o755)
    return str(path)

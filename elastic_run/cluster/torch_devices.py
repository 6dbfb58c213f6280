"""What only torch knows, without importing it: devices that packages add, such as `npu` of torch_npu; its version.

Such a package has an entry point of the group `torch.backends`, which torch calls when it is imported; there the
package names its device (`torch.utils.rename_privateuse1_backend`). So torch has to be asked: in this process if the
program around us has imported it, otherwise in a child process. A child takes seconds, so it is started only if such a
package is installed. Run as a script, this file is the child.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

#: Torch's name for such a device as long as no package gives it another name.
DEFAULT_NAME = "privateuseone"
_GROUP = b"[torch.backends]"
_METADATA = (".dist-info", ".egg-info")
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_TIMEOUT = 120.0
#: Characters of torch/version.py, in which the version stands near the top.
_MOST = 4096
#: The text in front of the child's answer: modules that it imports may also write to stdout.
_MARK = "elastic-run devices: "
#: The question for addresses in place of a number; no device has such a name.
_ADDRESSES = "--addresses"


class TorchUnavailableError(Exception):
    """Torch can't be asked; the message says why."""


def find_torch_version(paths: Iterable[str]) -> str:
    """Return the version of the first torch on a search path like `sys.path`, or "" where it is unknown."""
    for path in paths:
        try:
            with open(os.path.join(path, "torch", "version.py"), encoding="utf-8", errors="replace") as file:
                lines = file.read(_MOST).splitlines()
        except OSError:
            continue
        found = (line.partition("=")[2].strip().strip("'\"") for line in lines if line.startswith("__version__"))
        return next(found, "")
    return ""


def count_by_torch(word: str, environ: Mapping[str, str], python: str, path: Iterable[str]) -> int | None:
    """Ask torch how many devices there are, in this process or in a child; None if torch doesn't know the name.

    `word` is the name of a device type, or `auto` for the device that torch prefers. `python` is the child's
    interpreter, "" where there is none; `path` are directories with installed packages.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        return count_devices(torch, word)
    if not python or (word != DEFAULT_NAME and not has_backend_package(environ, path)):
        return None
    answer = _ask_child(word, environ, python)
    return int(answer) if answer else None


def addresses_by_torch(environ: Mapping[str, str], python: str, path: Iterable[str]) -> list[str]:
    """Return the PCI address, or "?", of each device that torch prefers; see `count_by_torch`."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return list_addresses(torch)
    return _ask_child(_ADDRESSES, environ, python).split() if python and has_backend_package(environ, path) else []


def has_backend_package(environ: Mapping[str, str], path: Iterable[str]) -> bool:
    """Whether a package that brings a backend for torch is installed, and torch would load it.

    TORCH_DEVICE_BACKEND_AUTOLOAD may turn such packages off. The files are read without importlib.metadata, which takes
    longer to import than they do to read.
    """
    if environ.get(_AUTOLOAD, "1") != "1":
        return False
    for directory in {entry or os.curdir for entry in path}:
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in names:
            try:
                with open(os.path.join(directory, name, "entry_points.txt"), "rb") as file:
                    found = name.endswith(_METADATA) and _GROUP in file.read()
            except OSError:
                continue
            if found:
                return True
    return False


def _ask_child(word: str, environ: Mapping[str, str], python: str) -> str:
    import subprocess

    try:
        done = subprocess.run(
            [python, os.path.abspath(__file__), word],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
            env=dict(environ),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise TorchUnavailableError(str(error)) from None
    answers = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or not answers:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise TorchUnavailableError(lines[-1])
    return answers[-1].removeprefix(_MARK)


def count_devices(torch: Any, word: str) -> int | None:
    """Count devices with torch, as torch's own launcher does; None where torch knows no device by that name."""
    name = torch._C._get_privateuse1_backend_name()  # noqa: SLF001 - as torch.distributed.run; there is no public one
    if word == "auto" and hasattr(torch, "accelerator"):  # since torch 2.6
        return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else 0
    if word not in {"auto", name}:
        return None
    module = getattr(torch, name, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def list_addresses(torch: Any) -> list[str]:
    """Return the PCI address of each device that torch prefers, as torch's NUMA binding reads it since torch 2.15."""
    if not hasattr(torch, "accelerator") or not torch.accelerator.is_available():
        return []
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return [_address(module.get_device_properties(index)) for index in range(torch.accelerator.device_count())]


def _address(properties: Any) -> str:
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
        place = f"{bus}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        place = "?"
    return place


def main() -> None:
    """Answer the parent with a number of devices, or with nothing if torch doesn't know the name; or with addresses."""
    # Modules in this file's directory may have the same names as libraries.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    import gc

    gc.disable()  # its looks at all of torch, during the import and at the end, take a third of this process's time
    import torch

    gc.freeze()
    if sys.argv[1] == _ADDRESSES:
        answer = " ".join(list_addresses(torch))
    else:
        count = count_devices(torch, sys.argv[1])
        answer = "" if count is None else str(count)
    os.write(1, f"\n{_MARK}{answer}\n".encode())


if __name__ == "__main__":
    main()

"""A local etcd for tests and for jobs of one machine: torch's helper, with the same names.

The program is TORCHELASTIC_ETCD_BINARY_PATH, or `etcd` on PATH. Different on purpose: nothing is left in the temporary
directory when the interpreter ends without `stop`, and a directory that the caller gave is never removed.
"""

from __future__ import annotations

import atexit
import http.client
import importlib
import os
import shutil
import subprocess
import tempfile
import time

from elastic_run import lazy_names
from elastic_run.utils import get_free_port, get_socket_with_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

__all__ = ["EtcdServer", "find_free_port", "stop_etcd"]

__getattr__ = lazy_names(__name__, {}, logger="logger")

#: Torch's name for it: a socket that holds a free port.
find_free_port = get_socket_with_port

_ENV_PROGRAM = "TORCHELASTIC_ETCD_BINARY_PATH"
#: Seconds between two questions whether it is up: nothing else tells (law 2: retrying a connection).
_PAUSE = 0.05
_WAIT_LIMIT = 10
#: From this version on there is no v2 API, and its flag is an error.
_WITHOUT_V2 = (3, 6)


class EtcdServer:
    """A single etcd on free ports of the loopback address.

    Args:
        data_dir: Where its data goes; None for a temporary directory.
    """

    def __init__(self, data_dir: str | None = None) -> None:
        self._host = "localhost"
        self._port = -1
        self._program = os.environ.get(_ENV_PROGRAM) or "etcd"
        self._own_dir = None if data_dir else tempfile.mkdtemp(prefix="elastic-run-etcd-")
        self._data_dir = data_dir or str(self._own_dir)
        self._process: subprocess.Popen[Any] | None = None
        atexit.register(self.stop)

    def get_port(self) -> int:
        """Return the port, -1 before it was started."""
        return self._port

    def get_host(self) -> str:
        """Return the host."""
        return self._host

    def get_endpoint(self) -> str:
        """Return host and port, as for --rdzv-endpoint."""
        return f"{self._host}:{self._port}"

    def start(self, timeout: int = 60, num_retries: int = 3, stderr: int | TextIO | None = None) -> None:
        """Start it, and wait until it answers.

        Args:
            timeout: Seconds to wait, for each attempt.
            num_retries: How often to try: somebody may take a port in the moment before etcd does.
            stderr: Where its messages go, as for `subprocess.Popen`.

        Raises:
            FileNotFoundError: There is no such program.
            RuntimeError: It has ended.
            TimeoutError: It doesn't answer.
        """
        for attempt in range(num_retries):
            try:
                self._start(os.path.join(self._data_dir, str(attempt)), timeout, stderr)
            except (RuntimeError, TimeoutError):
                stop_etcd(self._process)
                if attempt + 1 == num_retries:
                    raise
            else:
                return

    def _start(self, directory: str, timeout: float, stderr: int | TextIO | None) -> None:
        os.makedirs(directory, exist_ok=True)
        self._port = get_free_port()
        url = f"http://{self._host}:{self._port}"
        flags = ["--data-dir", directory, "--listen-client-urls", url, "--advertise-client-urls", url]
        flags += ["--listen-peer-urls", f"http://{self._host}:{get_free_port()}"]
        if _version(self._program) < _WITHOUT_V2:
            flags.append("--enable-v2")
        self._process = subprocess.Popen([self._program, *flags], stderr=stderr)
        self._wait_until_ready(self._process, timeout)

    def _wait_until_ready(self, process: subprocess.Popen[Any], timeout: float) -> None:
        end = time.monotonic() + timeout
        while not self._is_ready():
            if process.poll() is not None:
                message = f"{self._program} has ended with exit code {process.returncode}"
                raise RuntimeError(message)
            if time.monotonic() > end:
                message = f"{self._program} doesn't answer at {self.get_endpoint()} after {timeout} s"
                raise TimeoutError(message)
            time.sleep(_PAUSE)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_WAIT_LIMIT)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def get_client(self) -> Any:
        """Return a client of the package python-etcd, which speaks the v2 API.

        Raises:
            ModuleNotFoundError: The package is not installed.
        """
        try:
            etcd = importlib.import_module("etcd")  # an extra, which only version 2 needs
        except ModuleNotFoundError as error:
            message = "EtcdServer.get_client returns a client of python-etcd: pip install python-etcd"
            raise ModuleNotFoundError(message) from error
        return etcd.Client(host=self._host, port=self._port, version_prefix="/v2", read_timeout=_WAIT_LIMIT)

    def stop(self) -> None:
        """Stop it, and remove the temporary directory; harmless when that was done."""
        process, self._process = self._process, None
        stop_etcd(process, self._own_dir)
        atexit.unregister(self.stop)


def stop_etcd(subprocess: subprocess.Popen[Any] | None, data_dir: str | None = None) -> None:
    """Stop an etcd.

    Args:
        subprocess: Its process, or None.
        data_dir: A directory to remove, or None.
    """
    if subprocess is not None and subprocess.poll() is None:
        subprocess.terminate()
        subprocess.wait()
    if data_dir:
        shutil.rmtree(data_dir, ignore_errors=True)


def _version(program: str) -> tuple[int, ...]:
    """Return an etcd's version, ``(3, 5, 21)``."""
    text = subprocess.run([program, "--version"], stdout=subprocess.PIPE, text=True, check=False).stdout
    first = text.partition("\n")[0].rpartition(" ")[2]
    return tuple(int(part) for part in first.split("-")[0].split(".") if part.isdigit())

"""The pictures of a job's history in the documentation.

    python -m tests.benchmarks.history_picture [DIRECTORY]

The command runs a real job of three nodes on this machine, each in a UTS namespace with a name of its own: a worker
raises an exception, a silent worker is killed by SIGKILL, a launcher is killed by SIGKILL and started again. Then it
makes the page of the job's history, and pictures of it with headless Chromium: wide and light, narrow and dark. It
needs root and Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.recording import ROOT
from tests.support.launch import ELASTIC_RUN
from tests.support.sessions import free_port

_PICTURES = ROOT / "docs" / "pictures"
_WORKER = Path(__file__).parent / "workers" / "history_job.py"
#: Name, width, height and whether it is dark.
_SIZES = (("history", 1280, 2190, False), ("history-phone", 390, 3180, True))
#: Seconds after the start: the launcher of a node is killed and started again; the job may end.
_KILL_AT, _START_AT, _END_AT = 44.0, 49.0, 58.0


def main() -> None:
    """Run the job and draw its page."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(directory)
        run_job(place)
        page = place / "report.html"
        subprocess.run([*ELASTIC_RUN, "report", "logs", "-o", page], check=True, cwd=place)
        for name, width, height, is_dark in _SIZES:
            take_picture(page, _PICTURES / f"{name}.png", width, height, is_dark=is_dark)


def run_job(place: Path) -> None:
    """Run a job of three nodes to its end."""
    end, port = place / "end", free_port()
    flags = ["--nnodes=2:3", "--nproc-per-node=2", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=train-7b"]
    flags += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=keep_alive_interval=1,last_call_timeout=20"]
    shutil.copy(_WORKER, place / "train.py")
    command = [*ELASTIC_RUN, *flags, "--tee=3", "--log-dir=logs", "--events-file=all.jsonl", "train.py", str(end)]

    def start(node: int) -> subprocess.Popen[bytes]:
        named = ["unshare", "--uts", "sh", "-c", f'hostname node{node} && exec "$@"', "sh", *command]
        return subprocess.Popen(named, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    began = time.monotonic()

    def wait_until(age: float) -> None:
        time.sleep(max(0.0, age - (time.monotonic() - began)))

    launchers = [start(node) for node in range(3)]
    wait_until(_KILL_AT)
    launchers[1].kill()
    wait_until(_START_AT)
    launchers.append(start(1))
    wait_until(_END_AT)
    end.touch()
    for launcher in launchers:
        launcher.wait()


def take_picture(page: Path, picture: Path, width: int, height: int, *, is_dark: bool) -> None:
    """Let headless Chromium draw a page."""
    dark = ["--blink-settings=preferredColorScheme=0"] if is_dark else ["--blink-settings=preferredColorScheme=1"]
    window = [f"--window-size={width},{height}", "--hide-scrollbars", f"--screenshot={picture}"]
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *dark, *window, page.as_uri()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

"""Install pip into the environment of the Python that runs this, from the package index, with nothing but the stdlib.

For a Debian without python3-venv: its Python can make an environment, but has no pip to put into it. pip's wheel is a
zip file that can install itself. The version and its hash are pinned; bump both together.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

WHEEL = "pip-26.3-py3-none-any.whl"
SHA256 = "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
TIMEOUT = 30.0


def download() -> bytes:
    """Return the pinned wheel, found through the index's page for pip."""
    page_address = f"{INDEX.rstrip('/')}/pip/"
    with urllib.request.urlopen(page_address, timeout=TIMEOUT) as page:  # noqa: S310 - the user's own index
        address = page.url
        links = re.findall(r'href="([^"]+)"', page.read().decode())
    link = next(link for link in links if WHEEL in link)
    with urllib.request.urlopen(urllib.parse.urljoin(address, link), timeout=TIMEOUT) as answer:  # noqa: S310
        wheel: bytes = answer.read()
    if hashlib.sha256(wheel).hexdigest() != SHA256:
        message = f"{WHEEL} from {INDEX} is not the file that was pinned"
        raise ValueError(message)
    return wheel


def main() -> int:
    """Install pip and return pip's exit code, or 1 when the index can't be reached."""
    try:
        wheel = download()
    except (OSError, ValueError, StopIteration) as error:
        print(f"setup: pip can't be fetched: {error or 'the index does not list it'}", file=sys.stderr)  # noqa: T201
        return 1
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / WHEEL
        path.write_bytes(wheel)
        return subprocess.call([sys.executable, f"{path}/pip", "install", "--quiet", "--no-index", str(path)])


if __name__ == "__main__":
    sys.exit(main())

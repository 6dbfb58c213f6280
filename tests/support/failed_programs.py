"""Programs whose rank 1 raises an exception: kinds that live on after it, and kinds that handle it and go on.

`tests/data/failed_programs` has a text for each kind: `## its name`, with ` -> pattern` if the cause is not the usual
one, and below it what rank 1 runs. Rank 0 waits, without torch for a file that never comes, unless `WAITS=0` says that
it ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_DIRECTORY = Path(__file__).parents[1] / "data" / "failed_programs"
_CAUSE = "ValueError: shard 7 is corrupt"
_TORCH = ("dist.", "loader", "torch.")
_TAIL = "if __name__ == '__main__':\n    main()\n    if rank == 1: run()\n"


class Kind(NamedTuple):
    """A kind of program."""

    name: str
    body: str
    cause: str

    @property
    def program(self) -> str:
        """The whole program."""
        heads = ["head.txt"] + ["torch.txt"] * any(word in self.body for word in _TORCH)
        head = "\n".join((_DIRECTORY / name).read_text(encoding="utf-8") for name in heads)
        body = "".join(f"    {line}\n" for line in self.body.splitlines())
        return f"{head}\ndef run():\n    global kept\n{body}\n{_TAIL}"


def read_kinds(file: str) -> dict[str, Kind]:
    """Return the kinds of a file, `lives_on` or `goes_on`, by their names."""
    found = {}
    for text in (_DIRECTORY / f"{file}.txt").read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, body = text.partition("\n")
        name, _, cause = title.partition(" -> ")
        found[name] = Kind(name, body.strip(), cause or _CAUSE)
    return found

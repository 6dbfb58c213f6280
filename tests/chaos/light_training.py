"""A training job that keeps books as `accounted_training.py` does, without torch: it starts in a tenth of a second.

    elastic-run … tests/chaos/light_training.py DIRECTORY

Not a test: the worker of `tests.chaos.deaths`, which kills agents faster than torch can be imported.

- The ranks meet in the workers' store: a step counts when all have written down their samples of it.
- Two workers of one rank in one store, and two lives that write checkpoints at the same time, are written to the file
  `conflicts`: no agent may let either happen.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import uuid
from pathlib import Path

from elastic_run.store.client import StoreClient

#: As in `tests.chaos.job`.
SAMPLES_PER_STEP = 12
SAVE_EVERY = 5
PACE = 0.02
#: Seconds for a rank that is gone.
WAIT_LIMIT = 20.0


class Training:
    """One life of one rank.

    Args:
        directory: For checkpoints and books.
        store: The workers' store.
    """

    def __init__(self, directory: Path, store: StoreClient) -> None:
        self.directory = directory
        self.store = store
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.life = self._name_life()
        self.ancestry: list[dict[str, object]] = []
        self.first = 0
        self.former = ""
        self._load()
        path = directory / "books" / f"{self.life}.{self.rank}.jsonl"
        path.parent.mkdir(exist_ok=True)
        self.book = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def _name_life(self) -> str:
        if self.store.add(f"present/{self.rank}", 1) > 1:
            self.complain(f"two workers of rank {self.rank} in the store at port {self.store.port}")
            sys.exit(3)
        if self.rank == 0:
            self.store.set("life", uuid.uuid4().hex[:8])
            progress = self.directory / "progress.json"
            self.store.set("checkpoint", progress.read_bytes() if progress.exists() else b"{}")
        return self.store.get("life").decode()

    def _load(self) -> None:
        # From rank 0, so that all begin with the same one.
        document = json.loads(self.store.get("checkpoint"))
        if document:
            self.ancestry, self.first, self.former = document["ancestry"], document["step"], document["life"]

    def complain(self, text: str) -> None:
        """Write down what must not happen."""
        with (self.directory / "conflicts").open("a", encoding="ascii") as file:
            file.write(f"{socket.gethostname()} round of {os.environ['MASTER_PORT']}: {text}\n")

    def run(self) -> None:
        """Train until it is enough."""
        where = f"rank {self.rank} of {self.ranks} on {socket.gethostname()}"
        print(f"life {self.life}: {where} from step {self.first}", flush=True)  # noqa: T201 - a training script prints
        step = self.first
        while True:
            samples = list(range(step * SAMPLES_PER_STEP, (step + 1) * SAMPLES_PER_STEP))[self.rank :: self.ranks]
            os.write(self.book, (json.dumps({"step": step, "samples": samples}) + "\n").encode())
            meet(self.store, f"step/{step}", self.ranks)
            step += 1
            time.sleep(PACE)  # the work of a model
            if step % SAVE_EVERY == 0 and self._save(step):
                return

    def _save(self, step: int) -> bool:
        """Write a checkpoint as rank 0; returns, on all ranks alike, whether it is enough."""
        if self.rank == 0:
            self._check_alone()
            own = {"life": self.life, "first": self.first, "last": step, "ranks": self.ranks}
            ancestry = [*self.ancestry, own]
            loss = 1.0 / (1 + step)
            document = {"step": step, "loss": loss, "life": self.life, "ranks": self.ranks, "ancestry": ancestry}
            note = self.directory / f"progress.{self.life}.partial"
            note.write_text(json.dumps(document), encoding="ascii")
            note.replace(self.directory / "progress.json")
            self.former = self.life
            self.store.set(f"enough/{step}", b"yes" if (self.directory / "enough").exists() else b"no")
        return self.store.get(f"enough/{step}") == b"yes"

    def _check_alone(self) -> None:
        path = self.directory / "progress.json"
        found = json.loads(path.read_bytes())["life"] if path.exists() else ""
        if found != self.former:
            self.complain(f"life {self.life} went on from {self.former}, but life {found} writes checkpoints too")


def meet(store: StoreClient, name: str, ranks: int) -> None:
    """Wait until all ranks have come."""
    if store.add(name, 1) == ranks:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"], WAIT_LIMIT)


def main() -> None:
    """Join the others, train, leave."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with StoreClient(address, port, WAIT_LIMIT) as store:
        training = Training(Path(sys.argv[1]), store)
        training.run()
        # The store goes with rank 0's agent: nobody leaves before all have read the last word.
        meet(store, "end", training.ranks)


if __name__ == "__main__":
    main()

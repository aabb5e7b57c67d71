"""A learner's work on a run's folder, stopped or killed before its n-th file operation: `fenced_learner.py FOLDER N SIGNAL`.

With N = 0 it prints the number of operations. Exit code 3: fenced.
"""

import os
import sys
from pathlib import Path

from offbeat.services.errors import FencedError
from offbeat.trainer.training.checkpoint import LearnerState, newest_complete
from offbeat.trainer.training.checkpoint_store import CheckpointStore

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.listdir", "os.scandir", "fsync")
EPOCH, STEP, KEEP = 2, 12, 1


def write(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(folder.name.encode() * 100)
    os.makedirs(folder / "state" / "policy", exist_ok=True)
    (folder / "state" / "policy" / "optimizer.pt").write_bytes(b"moments")


def checkpoint(folder: Path, epoch: int, step: int, *, lineage: str = "now", keep: int = KEEP) -> None:
    """Take the folder over, load the newest checkpoint, save and score another."""
    store = CheckpointStore(folder, keep, epoch)
    store.newest_complete(lineage)
    store.save(LearnerState(step, lineage, entry_ids=(f"{epoch}-{step}",)), write).result()
    store.score(step, float(step))


def count_operations(folder: Path, stop_before: int, number: int) -> list[int]:
    """Count the file operations under `folder`; send this process a signal before one of them."""
    count = [0]
    synced = os.fsync

    def observe(event: str, arguments: tuple[object, ...]) -> None:
        if event not in EVENTS or (event != "fsync" and not str(arguments[0]).startswith(str(folder))):
            return
        count[0] += 1
        if count[0] == stop_before:
            os.kill(os.getpid(), number)

    def fsync(descriptor: int) -> None:
        observe("fsync", ())
        synced(descriptor)

    os.fsync = fsync
    sys.addaudithook(observe)
    return count


def main() -> None:
    folder, stop_before, number = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    newest_complete(folder)  # imports what the first call needs
    count = count_operations(folder, stop_before, number)
    try:
        checkpoint(folder, EPOCH, STEP)
    except FencedError:
        os._exit(3)
    sys.stdout.write(str(count[0]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

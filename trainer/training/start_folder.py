"""Folder of the policy's weights after its warm start, from which critic and reference start.

Invariants: it has its name once it is complete; its files never change, so checkpoints link to them.
"""

import json
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from offbeat.trainer.engines.process_group import Ranks, gather
from offbeat.trainer.run import START, LearnerRun

IN_CHECKPOINT = Path("state", START)
"""Copy in the checkpoints of a run whose reference has these weights."""


class StartFolder:
    """`OUTPUT_DIR/start`; collective."""

    def __init__(self, run: LearnerRun, ranks: Ranks) -> None:
        self.path = run.output_dir / START
        self._ranks = ranks

    def make_staging(self) -> Path:
        """Return a path that no other learner uses."""
        return self.path.with_name(f".{START}-{secrets.token_hex(4)}")

    def publish(self, staging: Path) -> None:
        """Replace the folder by rank 0's `staging`, if that exists."""
        if self._ranks.rank == 0 and staging.is_dir():
            replaced = self.make_staging()
            with suppress(FileNotFoundError):
                self.path.rename(replaced)
            staging.rename(self.path)
            shutil.rmtree(replaced, ignore_errors=True)
        gather(self._ranks, b"")  # barrier: all ranks read it next

    def link_into(self, checkpoint: Path) -> None:
        """Put the files into a checkpoint, which can then be resumed without this folder; on rank 0."""
        if self.path.is_dir():
            shutil.copytree(self.path, checkpoint / IN_CHECKPOINT, copy_function=_link_or_copy)

    def restore(self, checkpoint: Path, *, is_required: bool) -> None:
        """Copy the folder from a checkpoint, or from its run's, unless it is the same.

        Raises:
            RuntimeError: there is none, though it `is_required`.
        """
        staging = self.make_staging()
        if self._ranks.rank == 0 and (other := self._find(checkpoint)) is not None:
            shutil.copytree(other, staging)
        self.publish(staging)
        if is_required and not self.path.is_dir():
            raise RuntimeError(
                f"the reference is the policy after its warm start, and neither {self.path} nor {checkpoint} nor the "
                "checkpoint's run has these weights: they are saved only if the run has a reference when it begins"
            )

    def _find(self, checkpoint: Path) -> Path | None:
        inside, beside = checkpoint / IN_CHECKPOINT, checkpoint.resolve().parent.parent / START
        if inside.is_dir():
            return None if self._has_files_of(inside) else inside
        return beside if beside.is_dir() and beside != self.path.resolve() else None

    def _has_files_of(self, other: Path) -> bool:
        """Return whether the files are links to the same."""
        names = [path.name for path in other.iterdir()]
        own = [self.path / name for name in names]
        return all(path.is_file() and path.samefile(other / path.name) for path in own)


def is_based_on_start(checkpoint: Path) -> bool:
    """Return whether the base of a checkpoint's adapter is a policy after its warm start."""
    settings = json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())
    return Path(settings["base_model_name_or_path"]).name == START


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links, or another one
        shutil.copy2(source, target)

"""Removing what a run has written into its folder.

Invariant: nothing is removed that a run does not write, wherever its `output_dir` points; a folder in use is left alone.
"""

import shutil
from pathlib import Path

from offbeat.deploy.run_folder import holds_run, locked

WRITTEN = (
    "batches",
    "checkpoints",
    "config.yaml",
    "episodes.gif",
    "episodes.html",
    "evaluations",
    "learning_curve.png",
    "ledger",
    "logs",
    "metrics.jsonl",
    "policy",
    "report.json",
    "start",
    "tensorboard",
    "trackers",
    "weights",
    ".claim",
)
"""What runs, their learners and their reports write."""
LAST = ".lock"


def remove_run_files(folder: Path) -> list[str]:
    """Remove a run's files, and the folder itself if nothing else lies in it; returns what is gone.

    Raises:
        FolderInUseError: a command runs a run there.
    """
    if not holds_run(folder):
        return []
    removed: list[str] = []
    with locked(folder):
        for path in (folder / name for name in WRITTEN):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
            else:
                continue
            removed.append(str(path))
        (folder / LAST).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
        removed.append(str(folder))
    return removed

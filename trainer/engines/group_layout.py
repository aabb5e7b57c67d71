"""What a state of an optimizer fits: how its parameter groups are split, and the kind of its moments."""

import json
from pathlib import Path

from offbeat.trainer.config.actor_train import TrainingArgs

LAYOUT_FILE = "parameter_groups.json"
"""Absent before 0.2."""


def splits_decay(training: TrainingArgs) -> bool:
    return training.weight_decay > 0 and not training.decay_all_weights


def write_layout(folder: Path, training: TrainingArgs) -> None:
    layout = {"split": splits_decay(training), "optim": training.optim}
    (folder / LAYOUT_FILE).write_text(json.dumps(layout))


def check_layout(folder: Path, training: TrainingArgs) -> None:
    """Raise RuntimeError if a state is of other groups or moments."""
    if not any(folder.iterdir()):  # the engine itself reports an empty folder
        return
    key = "actor_train.training_args"
    was_split, optim = _read_layout(folder / LAYOUT_FILE)
    if optim != training.optim:
        raise RuntimeError(f"{folder} was written with optim {optim}: set {key}.optim={optim}")
    if was_split and not splits_decay(training):
        raise RuntimeError(
            f"{folder} was written with norms, biases and embeddings exempt from weight decay: set a positive "
            f"{key}.weight_decay, and {key}.decay_all_weights=false"
        )
    if splits_decay(training) and not was_split:
        raise RuntimeError(
            f"{folder} was written with weight decay of all weights, or none: set {key}.decay_all_weights=true, or "
            f"{key}.weight_decay=0"
        )


def _read_layout(path: Path) -> tuple[bool, str]:
    """Return whether groups are split, and the kind of moments."""
    if not path.is_file():
        return False, "adamw_torch"
    try:
        layout = json.loads(path.read_text())
        return bool(layout["split"]), layout.get("optim", "adamw_torch")
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"{path} can't be read: {error!r}") from error

"""A state of other groups or moments is refused with the key to set."""

from pathlib import Path

import pytest

from offbeat.trainer.config.actor_train import TrainingArgs
from offbeat.trainer.engines.group_layout import LAYOUT_FILE, check_layout, write_layout

PLAIN, NARROW = TrainingArgs(), TrainingArgs(optim="adamw_8bit")
APART = TrainingArgs(weight_decay=0.1)
KEY = "actor_train.training_args"


@pytest.mark.parametrize("training", [PLAIN, NARROW, APART])
def test_a_state_is_loaded_with_the_keys_that_it_was_written_with(tmp_path: Path, training: TrainingArgs) -> None:
    write_layout(tmp_path, training)
    check_layout(tmp_path, training)


@pytest.mark.parametrize(
    ("written", "read", "says"),
    [
        (PLAIN, NARROW, f"written with optim adamw_torch: set {KEY}.optim=adamw_torch"),
        (NARROW, PLAIN, f"written with optim adamw_8bit: set {KEY}.optim=adamw_8bit"),
        (APART, PLAIN, f"set a positive {KEY}.weight_decay"),
        (PLAIN, APART, f"set {KEY}.decay_all_weights=true"),
    ],
)
def test_other_keys_are_refused(tmp_path: Path, written: TrainingArgs, read: TrainingArgs, says: str) -> None:
    write_layout(tmp_path, written)
    with pytest.raises(RuntimeError, match=says):
        check_layout(tmp_path, read)


def test_a_state_of_version_0_1_has_one_group_and_moments_in_float32(tmp_path: Path) -> None:
    (tmp_path / "moments").touch()
    check_layout(tmp_path, PLAIN)
    with pytest.raises(RuntimeError, match="optim=adamw_torch"):
        check_layout(tmp_path, NARROW)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / LAYOUT_FILE).write_text(text)
    with pytest.raises(RuntimeError, match=f"{LAYOUT_FILE} can't be read"):
        check_layout(tmp_path, PLAIN)

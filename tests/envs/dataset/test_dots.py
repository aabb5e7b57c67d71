"""Made pictures: what a row asks is what its picture shows."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from offbeat.envs.dataset.dots import CELL, COLOURS, MAX_DOTS, SIDE, rows, write_dots


def count_dots(row: dict[str, Any], colour: str) -> int:
    """Look at the middle of each cell."""
    png = base64.b64decode(row["images"][0].partition(",")[2])
    pixels = np.asarray(Image.open(io.BytesIO(png)))
    assert pixels.shape == (SIDE * CELL, SIDE * CELL, 3)
    middles = pixels[CELL // 2 :: CELL, CELL // 2 :: CELL].reshape(-1, 3)
    return int((middles == COLOURS[colour]).all(axis=1).sum())


@pytest.mark.parametrize("held_out", [False, True])
def test_the_truth_is_what_the_picture_shows(held_out: bool):
    made = list(rows(200, held_out=held_out))
    for row in made:
        assert row["prompt"] == f"how many {row['tag']}"
        assert int(row["ground_truth"]) == count_dots(row, row["tag"])
    for colour in COLOURS:
        shares = np.bincount([int(row["ground_truth"]) for row in made if row["tag"] == colour], minlength=MAX_DOTS + 1)
        assert shares.min() > 0.12 * shares.sum(), "who does not look solves about a quarter"


def test_no_picture_is_held_out_and_trained(tmp_path: Path):
    for name, held_out in (("train", False), ("val", True)):
        write_dots(tmp_path / f"{name}.jsonl", 300, held_out=held_out)
    shown, held = (
        {json.loads(line)["images"][0] for line in (tmp_path / f"{name}.jsonl").open()} for name in ("train", "val")
    )
    assert len(shown) > 150 < len(held)
    assert not shown & held

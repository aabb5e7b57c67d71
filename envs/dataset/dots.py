"""Pictures of dots for `pipeline: rlvr` with images, as JSONL: `python -m offbeat.envs.dataset.dots OUT.jsonl [--held-out]`.

Three by three cells, each empty or with an orange or blue dot; a row asks for the number of dots of one colour. One
arrangement in eight is held out.
"""

import argparse
import base64
import io
import json
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

SIDE = 3
"""Cells per side."""
CELL = 32
"""Pixels per side of a cell."""
RADIUS = 12
"""Of a dot, pixels."""
COLOURS = {"orange": (230, 110, 30), "blue": (40, 80, 200)}
"""Tag -> RGB."""
MAX_DOTS = 3
"""Of a colour in one picture."""
HELD_OUT_SHARE = 8
"""Inverse share of arrangements."""

Arrangement = npt.NDArray[np.int64]
"""[9]: 0 is empty, 1 orange, 2 blue."""


def rows(count: int, *, held_out: bool, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield questions about arrangements of a split; each number of dots is about equally frequent."""
    return islice(_rows(np.random.default_rng(seed), held_out=held_out), count)


def _rows(rng: np.random.Generator, *, held_out: bool) -> Iterator[dict[str, Any]]:
    while True:
        counts = rng.integers(MAX_DOTS + 1, size=len(COLOURS))
        cells = np.repeat(np.arange(len(COLOURS) + 1), [SIDE**2 - counts.sum(), *counts])
        rng.shuffle(cells)
        if _is_held_out(cells) != held_out:
            continue
        asked = int(rng.integers(len(COLOURS)))
        colour = tuple(COLOURS)[asked]
        yield {
            "prompt": f"how many {colour}",
            "images": [f"data:image/png;base64,{base64.b64encode(draw(cells)).decode()}"],
            "ground_truth": str(counts[asked]),
            "tag": colour,
        }


def draw(cells: Arrangement) -> bytes:
    """Return an arrangement as PNG, 96 pixels per side."""
    image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
    pen = ImageDraw.Draw(image)
    fills = list(COLOURS.values())
    for at, kind in enumerate(cells.tolist()):
        if kind:
            x, y = (at % SIDE) * CELL + CELL // 2, (at // SIDE) * CELL + CELL // 2
            pen.ellipse((x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS), fill=fills[int(kind) - 1])
    out = io.BytesIO()
    image.save(out, format="PNG")
    return out.getvalue()


def _is_held_out(cells: Arrangement) -> bool:
    return (
        int.from_bytes(blake2b(cells.astype(np.uint8).tobytes(), digest_size=8).digest(), "big") % HELD_OUT_SHARE == 0
    )


def write_dots(path: Path, count: int, *, held_out: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) + "\n" for row in rows(count, held_out=held_out))
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--held-out", action="store_true")
    arguments = parser.parse_args()
    write_dots(arguments.out, arguments.rows, held_out=arguments.held_out)


if __name__ == "__main__":
    main()

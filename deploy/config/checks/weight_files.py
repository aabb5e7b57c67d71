"""Names and shapes of a model's weights, from the headers of its safetensors files."""

import json
from collections.abc import Iterator
from pathlib import Path


def weight_shapes(folder: str | Path) -> Iterator[tuple[str, list[int]]]:
    """Yield name and shape of each weight; raises OSError or ValueError for an unreadable file."""
    for file in Path(folder).glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        yield from ((name, entry["shape"]) for name, entry in header.items() if name != "__metadata__")

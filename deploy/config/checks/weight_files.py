"""Names and shapes of a model's weights, from the headers of its safetensors files."""

import json
from collections.abc import Iterator
from pathlib import Path

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SECOND_COPY = "consolidated*"
"""Files in which Mistral's repositories hold all weights once more, by other names."""


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers loads; raises OSError or ValueError for an unreadable index."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            raise ValueError(f"{folder / INDEX} names no files")
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    return [path for path in sorted(folder.glob("*.safetensors")) if not path.match(SECOND_COPY)]


def weight_shapes(folder: str | Path) -> Iterator[tuple[str, list[int]]]:
    """Yield name and shape of each weight; raises OSError or ValueError for an unreadable file."""
    for file in weight_files(Path(folder)):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        yield from ((name, entry["shape"]) for name, entry in header.items() if name != "__metadata__")

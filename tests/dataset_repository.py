"""A dataset's repository as those of arithmetic on the hub: two configs of parquet files, one split in two files."""

import json
from pathlib import Path

from datasets import Dataset

CONFIGS = ("main", "socratic")
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
- config_name: pairs
  data_files: [{split: train, path: pairs.jsonl.gz}]
---
# Sums
"""


def sums(start: int, count: int) -> list[dict[str, str]]:
    """Return rows as GSM8K's."""
    numbers = range(start, start + count)
    return [{"question": f"{n} + {n} ?", "answer": f"Twice {n} is {2 * n}\n#### {2 * n}"} for n in numbers]


def write_repository(folder: Path) -> Path:
    files = {
        "main/train-00000-of-00002": sums(0, 20),
        "main/train-00001-of-00002": sums(20, 12),
        "main/test-00000-of-00001": sums(32, 8),
        "socratic/train-00000-of-00001": sums(40, 4),
    }
    for name, rows in files.items():
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_list(rows).to_parquet(path)
    (folder / "README.md").write_text(CARD)
    (folder / "sums.py").write_text("raise SystemExit('a script was run')")
    return folder


def write_export(folder: Path) -> Path:
    """Write the files of `refs/convert/parquet`."""
    for config, split in (("main", "train"), ("main", "test"), ("socratic", "train")):
        path = folder / config / split / "0000.parquet"
        path.parent.mkdir(parents=True)
        Dataset.from_list(sums(100, 3)).to_parquet(path)
    return folder


def to_lines(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)

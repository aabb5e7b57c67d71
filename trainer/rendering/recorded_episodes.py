"""Evaluation episodes: `evaluations/<kind>-<sampling>-<step>.jsonl`.

JSON per line: `tag`, `seed`, `reward`, `metrics`, `text` (system prompt, alternating observations and answers).
"""

import json
from collections.abc import Iterator
from pathlib import Path

from offbeat.trainer.rendering.episodes import RecordedEpisode

FOLDER = "evaluations"
TITLES = {"before": "before training", "after": "after training"}


def read_recorded_episodes(folder: Path, limit: int) -> list[RecordedEpisode]:
    """Return up to `limit` sampled episodes each from before and after training, on the same tasks."""
    out: list[RecordedEpisode] = []
    for kind, title in TITLES.items():
        files = sorted((folder / FOLDER).glob(f"{kind}-sampled-*.jsonl"), key=lambda path: path.stat().st_mtime)
        if files:
            out += [episode for _, episode in zip(range(limit), read_episodes(files[-1], title), strict=False)]
    return out


def read_episodes(path: Path, title: str) -> Iterator[RecordedEpisode]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        success = row["metrics"].get("success")
        yield RecordedEpisode(
            title=title,
            tag=row["tag"],
            seed=row["seed"],
            answers=tuple(row["text"][2::2]),
            reward=row["reward"],
            success=None if success is None else success > 0,
        )

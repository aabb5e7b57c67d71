"""Scores of all rows of a dataset, computed once and kept beside it; collective.

Invariants: an interrupted preparation continues with the first missing file; rank 0 decides which are missing.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import Group, Trajectory
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.config.scored_roles import ScoredRole
from offbeat.trainer.engines.process_group import Ranks, gather
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.group_scorer import EncodedScores
from offbeat.trainer.training.score_files import ROWS_PER_FILE, ScoreFiles, token_digest

logger = logging.getLogger(__name__)

ROWS_PER_PASS = 32

Progress = Callable[[str, int, int], None]
"""(file of the dataset, rows done, rows in total)."""


class RowScorer(Protocol):
    def encode(self, groups: Sequence[Group]) -> list[EncodedScores]: ...


def row_group(row: int, members: Sequence[Trajectory]) -> Group:
    """Return a row's trajectories as a group."""
    first = members[0]
    return Group("", first.group_id, row, first.tag, first.seed, 0, tuple(members))


def open_sources(run: LearnerRun, model_folder: Path) -> Iterator[tuple[Path, DataSource]]:
    """Yield the training and validation files, each with a reader. model_folder: of tokenizer and chat template."""
    data = run.config.data
    if data is None:
        return
    paths = [data.dataset_name, *([data.val_dataset_name] if data.val_dataset_name else [])]
    for path in dict.fromkeys(paths):
        yield path, open_source(run, data, path, model_folder)


def open_source(run: LearnerRun, data: DataConfig, path: Path, model_folder: Path) -> DataSource:
    """Open a file of rows; raises ValueError."""
    rows, config = data.model_copy(update={"dataset_name": path}), run.config
    return DataSource(rows, config.pipeline, model_folder, seed=config.seed, max_tokens=config.sequence_length)


def prepare_scores(
    sources: Sequence[tuple[Path, DataSource]],
    role: ScoredRole,
    key: str,
    scorer: RowScorer,
    ranks: Ranks | None = None,
    show: Progress = lambda *_: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> int | None:
    """Score missing rows, and those that have changed; return their number, or None if stopped.

    ranks: None for one process. should_stop: the same on all ranks.
    """
    num_scored = 0
    for path, source in sources:
        files = ScoreFiles(path, key)
        for rows in _missing_files(files, source, ranks):
            scores: dict[int, tuple[bytes, bytes]] = {}
            digests = [source.digest(row) for row in rows] if ranks is None or ranks.rank == 0 else []
            for start in range(0, len(rows), ROWS_PER_PASS):
                if should_stop():
                    return None
                block = rows[start : start + ROWS_PER_PASS]
                groups = {row: group for row in block if (group := _read(source, row)) and role.scores(group.tag)}
                for (row, group), encoded in zip(groups.items(), scorer.encode(list(groups.values())), strict=True):
                    scores[row] = token_digest(group), encoded.blob
                show(str(path), block[-1] + 1, source.num_rows)
            if ranks is None or ranks.rank == 0:
                files.write(rows, scores, digests, source.stamp)
            num_scored += len(scores)
    return num_scored


def show_files(sources: Sequence[tuple[Path, DataSource]], progress: Callable[[int, int], None]) -> Progress:
    """Return a progress over the rows of all files that calls `progress` after each file of scores."""
    counts = {str(path): source.num_rows for path, source in sources}
    starts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))

    def show(path: str, done: int, total: int) -> None:
        if done % ROWS_PER_FILE == 0 or done == total:
            progress(starts[path] + done, sum(counts.values()))

    return show


def _missing_files(files: ScoreFiles, source: DataSource, ranks: Ranks | None) -> list[range]:
    missing = files.missing_files(source) if ranks is None or ranks.rank == 0 else []
    if ranks is None:
        return missing
    bounds = json.loads(gather(ranks, json.dumps([(rows.start, rows.stop) for rows in missing]).encode())[0])
    return [range(start, stop) for start, stop in bounds]


def _read(source: DataSource, row: int) -> Group | None:
    """Return a row's group; None if it can't be trained."""
    try:
        members = source.row(row)
    except EpisodeError as error:
        logger.warning("no scores: %s", error)
        return None
    return row_group(row, members) if all(member.num_sampled for member in members) else None

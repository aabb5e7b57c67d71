"""Rows of `pipeline: rlvr` as tasks.

Invariants: a group's number determines its domain and row; the domains' shares of the first n groups are off by less
than one group; each domain traverses its rows once per epoch, an evaluation the validation rows once.
"""

import asyncio
import zlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

from offbeat.envs.dataset.files import DatasetRows, Row, RowError, open_rows
from offbeat.envs.dataset.prompt import PromptError, RowPrompt, read_prompt
from offbeat.services.chat.assistant_tokens import ConversationError
from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import EpisodeKind
from offbeat.services.rollout.config import WorkerSettings
from offbeat.services.rollout.data.config import PLAYING_PROMPTS, DataConfig
from offbeat.services.rollout.data.images import read_images
from offbeat.services.rollout.data.interleaving import Interleaving
from offbeat.services.rollout.data.rows import row_of_group
from offbeat.services.rollout.data.source import BAD_ROW
from offbeat.services.rollout.tasks import Task

MAX_CACHED_ROWS = 32
"""With images, of up to 1 MB each."""


MAX_SCANNED, MAX_SHOWN = 10_000, 5
"""Rows and values of an error message."""


class DomainRows:
    """Rows of a file by tag."""

    def __init__(self, path: Path, config: DataConfig, tags: Sequence[str]) -> None:
        """Raises ValueError for an unreadable file, or a tag without rows."""
        self.rows: DatasetRows = open_rows(path, exact=(config.ground_truth_key,))
        self._column = config.tag_key
        self._tag_of = {value: tag for tag in tags for value in config.tag_included.get(tag, (tag,))}
        self._only = tags[0] if len(tags) == 1 and not config.tag_included else None
        """Tag of all rows."""
        self.by_tag = self._sort(tags)
        self.selected = array("q", sorted(row for rows in self.by_tag.values() for row in rows))
        for tag, rows in self.by_tag.items():
            if not len(rows):
                values = ", ".join(value for value, its_tag in self._tag_of.items() if its_tag == tag)
                raise ValueError(
                    f"{path}: no row is of {tag}: none has {values} in the column {self._column!r}{self._describe_others()}"
                )

    def _describe_others(self) -> str:
        """Return values of rows without a tag, and how to give them one."""
        values = (str(row.get(self._column)) for row in self.rows.scan((self._column,)) if self._column in row)
        others = list(dict.fromkeys(value for value in islice(values, MAX_SCANNED) if value not in self._tag_of))
        if not others:
            return ""
        shown = ", ".join([*others[:MAX_SHOWN], *(["..."] if len(others) > MAX_SHOWN else [])])
        return f", where rows have {shown}: assign them by data.tag_included"

    @property
    def num_left_out(self) -> int:
        return len(self.rows) - len(self.selected)

    def tag(self, row: int) -> str:
        return self._only or self._tag_of[str(self.rows[row].get(self._column))]

    def _sort(self, tags: Sequence[str]) -> "dict[str, array[int]]":
        if self._only is not None:
            return {self._only: array("q", range(len(self.rows)))}
        by_tag = {tag: array("q") for tag in tags}
        for number, row in enumerate(self.rows.scan((self._column,))):
            tag = self._tag_of.get(str(row.get(self._column)))
            if tag is not None:
                by_tag[tag].append(number)
        return by_tag


class PromptSource:
    def __init__(
        self,
        config: DataConfig,
        tags: Sequence[str],
        val_tags: Sequence[str],
        *,
        seed: int,
        val_group_size: int = 1,
    ) -> None:
        self._config = config
        self._seed = seed
        self._val_group_size = val_group_size
        self.train = DomainRows(config.dataset_name, config, tags)
        self.validation = (
            None if config.val_dataset_name is None else DomainRows(config.val_dataset_name, config, val_tags)
        )
        probs = config.domain_interleave_probs
        self._interleaving = Interleaving({tag: probs[tag] for tag in tags}) if probs else None
        self._images = lru_cache(MAX_CACHED_ROWS)(self._read_images)

    def train_task(self, number: int) -> Task:
        if self._interleaving is None:
            rows = self.train.selected
            row = rows[row_of_group(number, len(rows), self._seed, shuffle=self._config.shuffle)]
            return Task(self.train.tag(row), row)
        tag, position = self._interleaving.at(number)
        rows, stream = self.train.by_tag[tag], 1 + zlib.crc32(tag.encode())
        return Task(
            tag, rows[row_of_group(position, len(rows), self._seed, shuffle=self._config.shuffle, stream=stream)]
        )

    def eval_task(self, number: int, *, greedy: bool) -> Task:
        """Return an evaluation episode's tag and row, equal for siblings unless greedy."""
        assert self.validation is not None, "there are no evaluations without validation rows"
        rows = self.validation.selected
        row = rows[(number if greedy else number // self._val_group_size) % len(rows)]
        return Task(self.validation.tag(row), row)

    def row(self, kind: EpisodeKind, row: int) -> Row:
        """Raises EpisodeError, naming file and line."""
        rows = self._rows(kind)
        try:
            return rows[row]
        except RowError as error:
            raise EpisodeError(BAD_ROW, str(error)) from error

    async def read(self, kind: EpisodeKind, row: int) -> RowPrompt:
        """Return a row's prompt and images; raises EpisodeError, naming file and line."""
        prompt = self.prompt(kind, row)
        return prompt._replace(images=await asyncio.to_thread(self._images, kind, row)) if prompt.num_images else prompt

    def prompt(self, kind: EpisodeKind, row: int) -> RowPrompt:
        """Return a row's prompt without its images; raises EpisodeError, naming file and line."""
        config = self._config
        try:
            return read_prompt(self.row(kind, row), config.messages_key, config.prompt_key, config.images_key)
        except PromptError as error:
            raise EpisodeError(BAD_ROW, f"{self._rows(kind).name(row)}: {error}") from error

    def _read_images(self, kind: EpisodeKind, row: int) -> tuple[bytes, ...]:
        rows = self._rows(kind)
        try:
            return read_images(self.row(kind, row).get(self._config.images_key), rows.folder)
        except ConversationError as error:
            raise EpisodeError(BAD_ROW, f"{rows.name(row)}: {error}") from error

    def _rows(self, kind: EpisodeKind) -> DatasetRows:
        domains = self.train if kind is EpisodeKind.TRAIN else self.validation
        assert domains is not None
        return domains.rows


def open_prompts(settings: WorkerSettings) -> PromptSource | None:
    """Open a worker's rows; None unless it plays prompts. Raises ValueError."""
    if settings.pipeline not in PLAYING_PROMPTS or settings.data is None:
        return None
    return PromptSource(
        settings.data,
        settings.train_env_manager.tags_of(settings.custom_envs),
        settings.val_env_manager.tags_of(settings.custom_envs),
        seed=settings.seed,
        val_group_size=settings.val_env_manager.group_size,
    )


def count_validation(config: DataConfig, tags: Sequence[str]) -> int:
    """Return the number of validation rows of `pipeline: rlvr`; raises ValueError."""
    path = config.val_dataset_name
    return 0 if path is None else len(DomainRows(path, config, tags).selected)

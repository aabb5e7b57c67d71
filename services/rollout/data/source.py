"""Trajectories of dataset rows: token ids and a loss mask.

Invariants: a group's row and tokens depend on its number, the seed and the files; every learned token belongs to a
turn, carries the version of its admission and no logprob.
"""

import hashlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from offbeat.envs.dataset.files import DatasetRows, Row, RowError, open_rows
from offbeat.envs.dataset.rows import read_state
from offbeat.services.chat.assistant_tokens import AssistantTokens, ConversationError, Tokenized, common_length
from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import Segment, StopReason, Trajectory, Turn, VersionSpan
from offbeat.services.rollout.config import WorkerSettings
from offbeat.services.rollout.data.config import GROUP_SIZES, DataConfig
from offbeat.services.rollout.data.images import read_images
from offbeat.services.rollout.data.rows import row_of_group

logger = logging.getLogger(__name__)

BAD_ROW, TOO_LONG = "bad_row", "too_long"
MAX_SHOWN = 10
"""Bad validation rows in the log."""
REWARD_MODEL = "reward_model"
DIGEST_BYTES = 16
UNREADABLE = "unreadable"
"""What the digest of an unreadable row is of, wherever its file is."""
MARGIN = "margin"
"""Metric of a pair's trajectories."""
DATASET_KEY = "data.dataset_name"
Message = dict[str, Any]


class Validation(NamedTuple):
    groups: list[list[Trajectory]]
    """In the file's order."""
    left_out: Mapping[str, int]
    """Reason -> rows."""


class DataSource:
    def __init__(self, config: DataConfig, pipeline: str, model_folder: Path, *, seed: int, max_tokens: int) -> None:
        """Open the rows; raises ValueError for an unreadable file or a missing column."""
        self._config = config
        self._pipeline = pipeline
        self._folder = model_folder
        self._seed = seed
        self._max_tokens = max_tokens
        self._rows = open_rows(config.dataset_name)
        check_columns(self._rows, config, pipeline)
        state = read_state(config.dataset_name)
        self.stamp = "-".join(map(str, state[0])) if len(state) == 1 else _digest(repr(state)).hex()
        """State of the file, or of the folder's."""

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @cached_property
    def _tokens(self) -> AssistantTokens:
        return AssistantTokens(self._folder)

    def trajectory(self, number: int, index: int, version: int, *, group_id: str = "", attempt: int = 0) -> Trajectory:
        """Return a member of a training group; too long ones have no learned tokens.

        Raises:
            EpisodeError: the row can't be read; names file and line.
        """
        row = row_of_group(number, len(self._rows), self._seed, shuffle=self._config.shuffle)
        return self._read(self._rows, row, number, index, version, group_id, attempt)

    def validation(self) -> Validation:
        """Return the validation rows' groups, without bad and too long ones; raises ValueError for an unreadable file."""
        groups, left_out = list[list[Trajectory]](), Counter[str]()
        if self._config.val_dataset_name is None:
            return Validation(groups, left_out)
        rows = open_rows(self._config.val_dataset_name)
        check_columns(rows, self._config, self._pipeline)
        for row in range(len(rows)):
            try:
                group = self._members(rows, row)
            except EpisodeError as error:
                left_out[error.reason] += 1
                if left_out[error.reason] <= MAX_SHOWN:
                    logger.warning("validation row left out: %s", error)
                continue
            if all(trajectory.num_sampled for trajectory in group):
                groups.append(group)
            else:
                left_out[TOO_LONG] += 1
        if left_out:
            reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            logger.warning("%d of %d validation rows left out: %s", left_out.total(), len(rows), reasons)
        return Validation(groups, left_out)

    def row(self, row: int) -> list[Trajectory]:
        """Return the members of a training row's group.

        Raises:
            EpisodeError: as `trajectory`.
        """
        return self._members(self._rows, row)

    def digest(self, row: int) -> bytes:
        """Return a digest of what a training row's tokens and tag are read from."""
        config = self._config
        keys = (*message_keys(config), config.tools_key, config.images_key, config.tag_key)
        try:
            contents = [self._rows[row]]
            if is_unpaired(self._rows, config, self._pipeline):
                contents.append(_mismatch(self._rows, row, config))
            read = json.dumps([[content.get(key) for key in keys] for content in contents], default=_to_text)
        except (RowError, RecursionError):
            read = UNREADABLE
        return _digest(read)

    def _members(self, rows: DatasetRows, row: int) -> list[Trajectory]:
        size = GROUP_SIZES[self._pipeline]
        return [self._read(rows, row, row, index, 0, str(row), 0) for index in range(size)]

    def _read(
        self, rows: DatasetRows, row: int, number: int, index: int, version: int, group_id: str, attempt: int
    ) -> Trajectory:
        unpaired = is_unpaired(rows, self._config, self._pipeline)
        try:
            content = _mismatch(rows, row, self._config) if unpaired and index else rows[row]
            tokenized = self._tokenize(content, 0 if unpaired else index, rows.folder)
            reward = float(unpaired and _read_label(content, self._config.label_key))
            metrics = self._read_margin(content)
        except (ConversationError, RowError) as error:
            name = "" if isinstance(error, RowError) else f"{rows.name(row)}: "
            raise EpisodeError(BAD_ROW, f"{name}{error}") from error
        return _to_trajectory(
            tokenized,
            self._max_tokens,
            truncate=self._config.too_long == "truncate" or (unpaired and index > 0),
            reward=reward,
            version=version,
            identity={
                "group_id": group_id or str(number),
                "index": index,
                "attempt": attempt,
                "tag": str(content.get(self._config.tag_key) or self._pipeline),
                "seed": row,
                "metrics": metrics,
            },
        )

    def _tokenize(self, row: Row, index: int, folder: Path) -> Tokenized:
        messages, first = read_conversation(row, self._config, self._pipeline, index)
        tools = _read_tools(row.get(self._config.tools_key))
        train_on = self._config.train_on
        images = read_images(row.get(self._config.images_key), folder)
        tokenized = self._tokens.tokenize(messages, tools, first=first, last_only=train_on == "last", images=images)
        if self._pipeline == REWARD_MODEL:  # it reads the last token's hidden state
            return tokenized._replace(turns=[(len(tokenized.tokens) - 1, len(tokenized.tokens))])
        if train_on != "completion" or not tokenized.turns:
            return tokenized
        starts, end = [start for start, _ in tokenized.turns], tokenized.turns[-1][1]
        if any(image.start >= starts[0] for image in tokenized.images):
            raise ConversationError(
                "train_on: completion can't learn an image after the first answer: take all or last"
            )
        return tokenized._replace(turns=list(pairwise([*starts, end])))

    def _read_margin(self, row: Row) -> dict[str, float]:
        value: Any = row.get(self._config.margin_key) if self._pipeline == REWARD_MODEL else None
        if value is None:
            return {}
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max:
            raise ConversationError(f"{self._config.margin_key}: expected a finite number, got {value!r}")
        return {MARGIN: float(value)}


def open_data(settings: WorkerSettings) -> DataSource | None:
    """Open a worker's rows; None if it plays episodes."""
    if settings.data is None or settings.pipeline not in GROUP_SIZES:
        return None
    return DataSource(
        settings.data,
        settings.pipeline,
        settings.model_folder,
        seed=settings.seed,
        max_tokens=settings.sequence_length,
    )


def is_unpaired(rows: DatasetRows, config: DataConfig, pipeline: str) -> bool:
    return pipeline == "dpo" and config.chosen_key not in rows.columns and config.completion_key in rows.columns


def _mismatch(rows: DatasetRows, row: int, config: DataConfig) -> Row:
    """Return a row with another one's response, which appended rows do not change, to estimate KTO's KL."""
    other = row - 1 if row else min(1, len(rows) - 1)
    return {**rows[row], config.completion_key: rows[other].get(config.completion_key)}


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def _to_text(value: Any) -> str:
    """Return what stands in a digest for a value that JSON has not."""
    return hashlib.blake2b(value).hexdigest() if isinstance(value, bytes) else repr(value)


def _read_label(row: Row, key: str) -> bool:
    value: Any = row.get(key)
    if not isinstance(value, bool) and value not in (0, 1):
        raise ConversationError(f"{key}: expected true or false, got {value!r}")
    return bool(value)


def message_keys(config: DataConfig) -> tuple[str, ...]:
    pairs = (config.chosen_key, config.rejected_key, config.completion_key)
    parts = [key for key in (config.query_key, config.system_key) if key is not None]
    return config.messages_key, config.prompt_key, *parts, config.response_key, *pairs


def check_columns(rows: DatasetRows, config: DataConfig, pipeline: str) -> None:
    """Raise ValueError unless the pipeline's columns exist."""
    has = ", ".join(rows.columns)
    if GROUP_SIZES[pipeline] == 1:
        if config.messages_key in rows.columns:
            return
        for key in ("prompt_key", "response_key"):
            if getattr(config, key) not in rows.columns:
                raise ValueError(
                    f"{rows.name(0)}: there is neither the column {config.messages_key!r} (messages_key) nor "
                    f"{getattr(config, key)!r} ({key}); there is {has}"
                )
        return
    keys = ("chosen_key", "rejected_key")
    if is_unpaired(rows, config, pipeline):
        keys = ("prompt_key", "completion_key", "label_key")
    for key in keys:
        if getattr(config, key) not in rows.columns:
            raise ValueError(f"{rows.name(0)}: there is no column {getattr(config, key)!r} ({key}); there is {has}")


def read_conversation(row: Row, config: DataConfig, pipeline: str, index: int) -> tuple[list[Message], int]:
    """Return a trajectory's messages, and the first that may be learned.

    Raises:
        RowError, ConversationError: no messages.
    """
    if GROUP_SIZES[pipeline] == 1:
        if row.get(config.messages_key) is not None:
            return _messages(row, config.messages_key), 0
        return _answer(_prompt(row, config), row, config.response_key)
    if row.get(config.chosen_key) is None and row.get(config.completion_key) is not None:
        return _answer(_messages(row, config.prompt_key, "user"), row, config.completion_key)
    keys, prompt = (config.chosen_key, config.rejected_key), row.get(config.prompt_key)
    pair = [_messages(row, key, None if prompt is None else "assistant") for key in keys]
    if prompt is None or (isinstance(prompt, str) and all(map(_starts_with_question, pair))):
        # Of a pair without a difference the last messages are the responses, as in TRL
        return pair[index], min(common_length(*pair), *(len(each) - 1 for each in pair))
    return _answer(_messages(row, config.prompt_key, "user"), row, keys[index])


def _answer(prompt: list[Message], row: Row, key: str) -> tuple[list[Message], int]:
    """Return a prompt with a column's response, and the response's first message."""
    response = _messages(row, key, "assistant")
    if prompt[-1]["role"] == "user" and _starts_with_question(response):
        role = response[0]["role"]
        raise ConversationError(f"{key}[0]: expected an answer to the prompt, got a message of the role {role}")
    return [*prompt, *response], len(prompt)


def _starts_with_question(messages: list[Message]) -> bool:
    return messages[0]["role"] in ("system", "user")


def _prompt(row: Row, config: DataConfig) -> list[Message]:
    """Return a conversation's messages before the response."""
    prompt = _messages(row, config.prompt_key, "user")
    if query := _text(row, config.query_key):
        text = row[config.prompt_key]
        if not isinstance(text, str):
            raise ConversationError(f"{config.query_key}: it follows a text, but {config.prompt_key} has messages")
        prompt = [{"role": "user", "content": f"{text}\n{query}"}]
    system = _text(row, config.system_key)
    return [{"role": "system", "content": system}, *prompt] if system else prompt


def _text(row: Row, key: str | None) -> str:
    """Return an optional column's text."""
    value: Any = None if key is None else row.get(key)
    if value is not None and not isinstance(value, str):
        raise ConversationError(f"{key}: expected a text, got {type(value).__name__}")
    return value or ""


def _messages(row: Row, key: str, role: str | None = None) -> list[Message]:
    """Return a column's messages; a text is one of `role`."""
    value: Any = row.get(key)
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        expected = "a list of messages" if role is None else "a text or a list of messages"
        got = "nothing" if value is None else type(value).__name__
        raise ConversationError(f"{key}: expected {expected}, got {got}")
    return [_message(each, f"{key}[{i}]") for i, each in enumerate(cast(Sequence[Any], value))]


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, Mapping) or not isinstance(cast(Mapping[str, Any], value).get("role"), str):
        raise ConversationError(f"{name}: expected an object with role and content")
    message = _without_nothing(cast(Mapping[str, Any], value))
    if isinstance(content := message.get("content"), Sequence) and not isinstance(content, str):
        message["content"] = [_part(part, name) for part in cast(Sequence[Any], content)]
    if "content" not in message and "tool_calls" not in message:
        raise ConversationError(f"{name}: a message needs content or tool_calls")
    return message if "content" in message else {**message, "content": ""}


def _without_nothing(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): each for key, each in value.items() if each is not None}


def _part(value: Any, name: str) -> dict[str, Any]:
    """Return a part of a message; `image_url` and the like are refused."""
    part = _without_nothing(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else {}
    kind = part.get("type")
    if kind == "image" or (kind == "text" and isinstance(part.get("text"), str)):
        return part
    raise ConversationError(f"{name}: a part of a content is {{type: text, text: ...}} or {{type: image}}")


def _read_tools(value: Any) -> list[Any]:
    if value is None:
        return []
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ConversationError(f"tools: not JSON: {error}") from error
    if not isinstance(tools, Sequence):
        raise ConversationError(f"tools: expected a list of JSON schemas, got {type(tools).__name__}")
    return list(cast(Sequence[Any], tools))


def _to_trajectory(
    tokenized: Tokenized, max_tokens: int, *, truncate: bool, reward: float, version: int, identity: Mapping[str, Any]
) -> Trajectory:
    is_long = len(tokenized.tokens) > max_tokens
    end = max_tokens if truncate else 0
    limit = end if is_long else len(tokenized.tokens)
    images = [image for image in tokenized.images if image.start + image.count <= (limit or max_tokens)]
    if is_long and len(images) < len(tokenized.images):
        # Image tokens without their image would be learned from as they are
        limit = min(limit, tokenized.images[len(images)].start)
    tokens = np.array(tokenized.tokens[: limit or max_tokens], dtype=np.int32)
    # A sequence's first token is predicted by nothing
    turns = [(max(start, 1), min(stop, limit)) for start, stop in tokenized.turns]
    turns = [(start, stop) for start, stop in turns if start < stop]
    mask = np.zeros(len(tokens), dtype=np.bool_)
    for start, stop in turns:
        mask[start:stop] = True
    spans = tuple(VersionSpan(start, stop, version) for start, stop in turns)
    segment = Segment(tokens, mask, np.zeros(len(tokens), dtype=np.float32), spans, images=tuple(images))
    rewards = [0.0] * (len(turns) - 1) + [reward]
    return Trajectory(
        **identity,
        segments=(segment,),
        turns=tuple(Turn(0, start, stop, own) for (start, stop), own in zip(turns, rewards, strict=False)),
        stop_reason=StopReason.MAX_LENGTH if is_long else StopReason.TERMINATED,
    )

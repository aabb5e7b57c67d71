"""Prompts of a dataset's rows, each answered once; rewards come from elsewhere."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast

import gymnasium
from gymnasium.spaces import Text

from offbeat.envs.config import Config
from offbeat.envs.dataset.env import CHARSET, MAX_CHARS
from offbeat.envs.dataset.files import Row, open_rows
from offbeat.envs.prompts import ROW_IMAGE


class PromptError(ValueError):
    """Row without a usable prompt; names the column."""


class RowPrompt(NamedTuple):
    system: str | None
    """None: no system message."""
    turns: tuple[str, ...]
    """User and assistant alternately, ending with the user; `ROW_IMAGE` in place of each image."""
    images: tuple[bytes, ...] = ()
    """PNG, in the order of their placeholders."""

    @property
    def num_images(self) -> int:
        """Number of image placeholders."""
        return sum(text.count(ROW_IMAGE) for text in self.turns)

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation in OpenAI's form, images as data URLs."""
        head: list[dict[str, Any]] = [] if self.system is None else [{"role": "system", "content": self.system}]
        roles, images = ("user", "assistant"), iter(self.images)
        return head + [
            {"role": roles[i % 2], "content": message_content(text, images)} for i, text in enumerate(self.turns)
        ]


def message_content(text: str, images: Iterator[bytes]) -> str | list[dict[str, Any]]:
    """Return a text, or its parts in OpenAI's form if it has image placeholders. images: PNG of each."""
    first, *others = text.split(ROW_IMAGE)
    if not others:
        return text
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for other in others:
        url = f"data:image/png;base64,{base64.b64encode(next(images)).decode()}"
        parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": other}]
    return [part for part in parts if part.get("text") != ""]


def read_prompt(row: Row, messages_key: str, prompt_key: str, images_key: str = "images") -> RowPrompt:
    """Return a row's prompt, without its images: messages (a list, or JSON of one), or a user's text.

    Images of a prompt without image parts come before the user's first text.

    Raises:
        PromptError: no usable prompt, or another number of image parts than of images.
    """
    key = messages_key if row.get(messages_key) is not None else prompt_key
    messages = _read_messages(row.get(key), key)
    count = len(list_images(row.get(images_key)))
    places = sum(text.count(ROW_IMAGE) for _, text in messages)
    if count and not places:
        first = next((i for i, (role, _) in enumerate(messages) if role == "user"), 0)
        messages[first] = (messages[first][0], ROW_IMAGE * count + messages[first][1])
    elif places != count:
        raise PromptError(f"{images_key}: {count} images for {places} image parts of {key}")
    system = messages.pop(0)[1] if messages and messages[0][0] == "system" else None
    if [role for role, _ in messages] != [("user", "assistant")[i % 2] for i in range(len(messages))]:
        raise PromptError(f"{key}: user and assistant must alternate, got {', '.join(role for role, _ in messages)}")
    if len(messages) % 2 == 0:
        raise PromptError(f"{key}: the last message must be the user's")
    return RowPrompt(system, tuple(text for _, text in messages))


def list_images(value: Any) -> Sequence[Any]:
    """Return a column's images, a list or a single one; raises PromptError."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping):
        return (cast(Any, value),)
    if not isinstance(value, Sequence):
        raise PromptError(f"images: expected an image or a list of them, got {type(value).__name__}")
    return cast(Sequence[Any], value)


def _read_messages(value: Any, key: str) -> list[tuple[str, str]]:
    if isinstance(value, str):
        messages = _parse_list(value)
        if messages is None:
            return [("user", _check_text(value, key))]
        return [_read_message(each, f"{key}[{i}]") for i, each in enumerate(messages)]
    if not isinstance(value, Sequence) or not value:
        got = "nothing" if value is None else type(cast(object, value)).__name__
        raise PromptError(f"{key}: expected a text or a list of messages, got {got}")
    return [_read_message(each, f"{key}[{i}]") for i, each in enumerate(cast(Sequence[Any], value))]


def _parse_list(text: str) -> list[Any] | None:
    """Return the objects of a JSON list, if it is one."""
    try:
        parsed = cast(object, json.loads(text)) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return None
    items = cast(list[Any], parsed) if isinstance(parsed, list) else []
    return items if items and all(isinstance(each, dict) for each in items) else None


def _read_message(value: Any, name: str) -> tuple[str, str]:
    message = _mapping(value)
    role, content = message.get("role"), message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [_read_part(_mapping(part), name) for part in cast(Sequence[Any], content)]
        content = "".join(cast(list[str], texts)) if all(isinstance(text, str) for text in texts) else None
    elif isinstance(content, str):
        content = _check_text(content, name)
    if not isinstance(role, str) or not isinstance(content, str):
        raise PromptError(f"{name}: expected an object with role and content, of texts and images (type: image)")
    if ROW_IMAGE in content and role != "user":
        raise PromptError(f"{name}: images are the user's, not of the role {role}")
    return role, content


def _read_part(part: Mapping[str, Any], name: str) -> str | None:
    if part.get("type") == "image":
        return ROW_IMAGE
    text = part.get("text")
    return _check_text(text, name) if isinstance(text, str) else None


def _check_text(text: str, name: str) -> str:
    if ROW_IMAGE in text:
        raise PromptError(f"{name}: has U+FDD0, which is no character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{name}: has half of a surrogate pair, which is no character: {error}") from error
    return text


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


class PromptConfig(Config):
    dataset_name: Path
    """A .jsonl, .json, .csv or .parquet file, a folder of such files, a `datasets` folder, or a dataset of the hub."""
    val_dataset_name: Path | None = None
    """Evaluation rows; None: those of training."""
    messages_key: str = "messages"
    """Column of chat messages."""
    prompt_key: str = "prompt"
    """Column of a user's text, without messages."""
    images_key: str = "images"
    """Column of images, if it exists."""
    split: Literal["train", "held_out"] = "train"


class PromptEnv(gymnasium.Env[str, str]):
    """A row's prompt, by the seed; the first answer ends the episode without a reward."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # pyright: ignore[reportIncompatibleVariableOverride]
    config_class: ClassVar[type[PromptConfig]] = PromptConfig
    system_prompt: str = ""
    words: tuple[str, ...] = ()
    """Without the dataset's."""

    def __init__(self, config: PromptConfig) -> None:
        """Raises ValueError for an unreadable file."""
        self.config = config
        held_out = config.val_dataset_name if config.split == "held_out" else None
        self._rows = open_rows(held_out or config.dataset_name)
        self.row: Row = {}
        """Of the current episode."""

    @cached_property
    def observation_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Text(min_length=0, max_length=MAX_CHARS, charset=CHARSET + ROW_IMAGE)

    @cached_property
    def action_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Text(min_length=0, max_length=MAX_CHARS, charset=CHARSET[3:98])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Show the row `seed` modulo their number; None draws one. Raises PromptError."""
        super().reset(seed=seed, options=options)
        number = int(self.np_random.integers(len(self._rows))) if seed is None else seed
        self.row = self._rows[number % len(self._rows)]
        config = self.config
        return read_prompt(self.row, config.messages_key, config.prompt_key, config.images_key).turns[-1], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # noqa: ARG002
        return "", 0.0, True, False, {}

    def task_id(self, seed: int) -> str:
        return self._rows.name(seed % len(self._rows))

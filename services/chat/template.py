"""Chat template of conversations with roles, tools and tool results, for external agents."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from jinja2 import TemplateError
from tokenizers import Tokenizer

from offbeat.services.chat.image_tokens import ImageReader, ImageTokens, make_image_tokens
from offbeat.services.chat.messages import (
    CALL_STYLES,
    CallParser,
    CallStyle,
    ChatMessage,
    ToolCall,
    Tools,
    normalize_arguments,
)
from offbeat.services.chat.tokenizer import find_end_ids, load_tokenizer, require_template
from offbeat.services.chat.vision import ImageProcessor
from offbeat.services.errors import RolloutError

RenderAny = Callable[[Sequence[dict[str, Any]], Sequence[Any], bool], str]
"""(messages, tools, add generation prompt) -> text."""

MAX_CACHED_TEXTS = 4_096
MAX_CACHED_CHARS = 512
"""Longer texts rarely repeat."""
NAME, KEY, VALUE = "offbeatname", "offbeatkey", "offbeatvalue"


class UnusableError(Exception):
    """The template can't render a conversation."""


class ToolFormat(NamedTuple):
    """JSON object between markers."""

    opening: str
    closing: str
    name_key: str
    arguments_key: str


class ChatTemplate:
    def __init__(
        self,
        render: RenderAny,
        tokenizer: Tokenizer,
        extra_stop_ids: Sequence[int] = (),
        parser: CallParser | None = None,
        reader: Callable[[], ImageReader] | None = None,
    ) -> None:
        """extra_stop_ids: besides the template's; parser: None for the detected JSON format; reader: as of `ChatFormat`.

        Raises:
            RolloutError: no special token ends an answer, or an answer has several messages.
        """
        self._render = render
        self._tokenizer = tokenizer
        self._parser = parser
        self._reader = reader
        self.style = _call_style(render)
        _require_one_message(render)
        self.end_id, self.end_text = _end_of_turn(render, tokenizer)
        self.stop_ids = tuple(dict.fromkeys((self.end_id, *extra_stop_ids)))
        self.start_ids = _start_of_text(tokenizer)
        """Tokens that the tokenizer puts before a text, such as Llama 3's BOS; chat templates write their own."""
        self.tools = _tool_format(render, tokenizer, self.end_text, self.style)
        self._encode = lru_cache(MAX_CACHED_TEXTS)(self._encode_now)

    @cached_property
    def num_tokens(self) -> int:
        """Token ids of the tokenizer, gaps between them included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def image_tokens(self) -> ImageTokens:
        """Return image support; raises RolloutError if the model or template has none."""
        return make_image_tokens(lambda messages: self._render(messages, (), True), self._reader)

    def refuse_images(self) -> None:
        """Take texts alone, although the folder may have image processing."""
        self._reader = None

    @property
    def reads_calls(self) -> bool:
        return self.tools is not None or self._parser is not None

    def render(self, messages: Sequence[ChatMessage], tools: Tools, *, prompt: bool) -> str:
        """Render a conversation; `prompt` adds the generation prompt.

        Raises:
            UnusableError: rejected, or unsupported tools.
        """
        if tools and not self.reads_calls:
            raise UnusableError(
                "the policy's chat template writes no tool calls that are read here: call without `tools`, or name a parser "
                "by tool_call_parser"
            )
        return self.write(messages, tools, prompt=prompt)

    def write(self, messages: Sequence[ChatMessage], tools: Tools, *, prompt: bool) -> str:
        """Render even if calls can't be parsed. Raises UnusableError."""
        try:
            return self._render([message.for_template(self.style) for message in messages], tools, prompt)
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise UnusableError(f"the policy's chat template can't render these messages: {error}") from error

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode without special tokens; for a parser, without stop tokens."""
        if self._parser is None:
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        words = [token for token in token_ids if token not in self.stop_ids]
        return self._tokenizer.decode(words, skip_special_tokens=False)

    def whole_text(self, token_ids: Sequence[int]) -> str:
        """Decode with special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def message_of(self, text: str, *, tools: Tools) -> ChatMessage:
        """Parse an answer; malformed calls stay text."""
        if tools and self._parser is not None:
            words, calls = self._parser(text, tools)
        elif tools and self.tools is not None:
            words, calls = _extract_calls(text, self.tools)
        else:
            return ChatMessage("assistant", text)
        return ChatMessage("assistant", words.strip(), calls) if calls else ChatMessage("assistant", text)

    def encode(self, text: str) -> tuple[int, ...]:
        return self._encode(text) if len(text) <= MAX_CACHED_CHARS else self._encode_now(text)

    def _encode_now(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def load_chat_template(folder: Path, parser_for: Callable[[Any], CallParser] | None = None) -> ChatTemplate:
    """Load a Hugging Face folder's template.

    Raises:
        RolloutError: no tokenizer or chat template, or an unknown end of answers.
    """
    tokenizer = load_tokenizer(folder)
    require_template(folder, tokenizer)
    backend = cast(Tokenizer, tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()

    def render(messages: Sequence[dict[str, Any]], tools: Sequence[Any], prompt: bool) -> str:
        return cast(
            str,
            tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
            ),
        )

    def reader() -> ImageReader:
        return ImageProcessor(folder)

    parser = None if parser_for is None else parser_for(tokenizer)
    return ChatTemplate(render, backend, find_end_ids(folder, tokenizer), parser, reader)


def _require_one_message(render: RenderAny) -> None:
    """Raise RolloutError if thought and answer are messages of their own, whose ends are not the turn's (harmony)."""
    question = {"role": "user", "content": KEY}
    answer = {"role": "assistant", "content": NAME} | dict.fromkeys(("thinking", "reasoning_content"), VALUE)
    try:
        plain, prompt = (render([question], (), is_prompt) for is_prompt in (False, True))
        full = render([question, answer], (), False)
    except (TemplateError, TypeError, ValueError, KeyError):
        return  # it takes no thoughts
    header = prompt.removeprefix(plain).strip()
    thought = full.removeprefix(prompt).partition(NAME)[0]
    if header and prompt.startswith(plain) and full.startswith(prompt) and header in thought:
        raise RolloutError(
            f"the chat template writes a thought and its answer as two messages ({header!r} begins both, as in gpt-oss' "
            "harmony): an answer would end after its thought; take a model that thinks and answers in one, such as Qwen3"
        )


def _end_of_turn(render: RenderAny, tokenizer: Tokenizer) -> tuple[int, str]:
    question, answer = {"role": "user", "content": KEY}, {"role": "assistant", "content": NAME}
    text = render([question, answer, {"role": "user", "content": VALUE}], (), True)
    if NAME not in text:  # the template omits earlier answers
        text = render([question, answer], (), False)
    _, _, after_answer = text.partition(NAME)
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if token.special and after_answer.startswith(token.content):
            return token_id, token.content
    raise RolloutError(
        f"the chat template puts {after_answer[:20]!r} after an answer, which is no special token of the tokenizer: the "
        "end of an answer can't be determined"
    )


def _start_of_text(tokenizer: Tokenizer) -> tuple[int, ...]:
    ids, plain = (tokenizer.encode(NAME, add_special_tokens=each).ids for each in (True, False))
    return tuple(ids[: ids.index(plain[0])]) if plain else ()


USER = {"role": "user", "content": KEY}
CALLING = ChatMessage("assistant", "", (ToolCall(NAME, normalize_arguments({KEY: VALUE}), "offbeat00"),))
OFFERED = {"type": "function", "function": {"name": NAME, "description": "", "parameters": {"type": "object"}}}


def _call_style(render: RenderAny) -> CallStyle:
    """Return the first readably rendered style, else the first."""
    for style in CALL_STYLES:
        try:
            text = render([USER, CALLING.for_template(style)], [OFFERED], False)
        except (TemplateError, TypeError, ValueError, KeyError):
            continue
        # an object printed without `tojson` is Python's; text printed with it is quoted twice
        if VALUE in text and f"'{KEY}'" not in text and f'\\"{KEY}' not in text:
            return style
    return CALL_STYLES[0]


def _tool_format(render: RenderAny, tokenizer: Tokenizer, end_text: str, style: CallStyle) -> ToolFormat | None:
    try:
        before = render([USER], [OFFERED], True)
        after = render([USER, CALLING.for_template(style)], [OFFERED], False)
        rendered = render([USER, replace(CALLING, content=VALUE).for_template(style)], [OFFERED], False)
    except (TemplateError, TypeError, ValueError, KeyError):
        return None
    if not after.startswith(before) or NAME not in before:
        return None
    written = after.removeprefix(before).partition(end_text)[0]
    start = written.find("{")
    try:
        parsed, length = json.JSONDecoder().raw_decode(written[start:]) if start >= 0 else (None, 0)
    except ValueError:
        return None
    if not isinstance(parsed, dict):
        return None
    keys = {value if isinstance(value, str) else "arguments": key for key, value in parsed.items()}
    arguments_key = next((key for key, value in parsed.items() if value == {KEY: VALUE}), None)
    # exclude text before a lone call, such as an empty thought
    rendered_prefix = rendered.rpartition(written[start : start + length])[0] or written[:start]
    opening = _common_suffix(written[:start], rendered_prefix).strip()
    closing = written[start + length :].strip()
    if NAME not in keys or arguments_key is None or not _survives_decoding(tokenizer, opening + closing):
        return None
    return ToolFormat(opening, closing, keys[NAME], arguments_key)


def _common_suffix(one: str, other: str) -> str:
    return next(one[position:] for position in range(len(one) + 1) if other.endswith(one[position:]))


def _survives_decoding(tokenizer: Tokenizer, mark: str) -> bool:
    ids = tokenizer.encode(mark, add_special_tokens=False).ids
    return tokenizer.decode(ids, skip_special_tokens=True).strip() == mark


def _extract_calls(text: str, tools: ToolFormat) -> tuple[str, tuple[ToolCall, ...]]:
    words: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (start := text.find(tools.opening or "{", position)) >= 0:
        body = start + len(tools.opening)
        body += len(text[body:]) - len(text[body:].lstrip())
        try:
            parsed, length = json.JSONDecoder().raw_decode(text[body:])
            call = ToolCall(str(parsed[tools.name_key]), normalize_arguments(parsed[tools.arguments_key]))
        except (ValueError, KeyError, TypeError, RecursionError):
            words.append(text[position : start + 1])
            position = start + 1
            continue
        words.append(text[position:start])
        position = body + length
        rest = text[position:].lstrip()
        if tools.closing and rest.startswith(tools.closing):
            position = len(text) - len(rest) + len(tools.closing)
        calls.append(call)
    return "".join([*words, text[position:]]), tuple(calls)

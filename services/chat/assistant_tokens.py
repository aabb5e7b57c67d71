"""Assistant tokens of a conversation, by the chat template.

Generation tags mark them; without tags, an assistant's turn is what the template adds to the conversation with its
generation prompt. An answer that lacks the thought which the prompt opens starts where that thought would. Whitespace
after the end-of-turn token is excluded.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from jinja2 import TemplateError

from offbeat.services.chat.messages import CallStyle, normalize_arguments
from offbeat.services.chat.template import NAME, USER, load_chat_template
from offbeat.services.chat.tokenizer import load_tokenizer
from offbeat.services.chat.vision import ImageProcessor
from offbeat.services.errors import RolloutError
from offbeat.services.messages.types import PromptImage

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
Messages = Sequence[dict[str, Any]]


class ConversationError(ValueError):
    """The template can't render a conversation, or its turns are ambiguous."""


class Tokenized(NamedTuple):
    """Token ids of a conversation; turns: [start, end) of the assistant's."""

    tokens: list[int]
    turns: list[tuple[int, int]]
    images: tuple[PromptImage, ...] = ()


class AssistantTokens:
    """Tokenizer of conversations for supervised training."""

    def __init__(self, folder: Path) -> None:
        """Load a Hugging Face folder's template; raises RolloutError."""
        self._folder = folder
        template = load_chat_template(folder)
        self._end_text, self._style = template.end_text, template.style
        self._tokenizer = load_tokenizer(folder)
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._has_tags = _GENERATION_TAG.search(self._tokenizer.get_chat_template()) is not None

    def tokenize(
        self,
        messages: Messages,
        tools: Sequence[Any] = (),
        *,
        first: int = 0,
        last_only: bool = False,
        images: Sequence[bytes] = (),
    ) -> Tokenized:
        """Tokenize a conversation up to its last assistant turn.

        first: message from which assistant turns count. images: PNG, in the order of the messages' image parts.

        Raises:
            ConversationError: rejected by the template, without an assistant turn, with turns that later ones change, or
                with images that do not fit messages or policy.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if not answers:
            raise ConversationError("there is no assistant turn to learn")
        messages = [_in_style(message, self._style) for message in messages[: answers[-1] + 1]]
        text = self._render(messages, tools)
        chosen = answers[-1:] if last_only else answers
        spans = self._tagged_spans(messages, tools, chosen) if self._has_tags else None
        if spans is None:
            spans = [self._span(messages, i, tools, text) for i in chosen]
        encoding = self._backend.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        tokenized = Tokenized(encoding.ids, [turn for span in spans if (turn := _token_range(starts, span))])
        return self._place(tokenized, images) if images or self._has_image_parts(messages) else tokenized

    @cached_property
    def _images(self) -> ImageProcessor:
        try:
            return ImageProcessor(self._folder)
        except RolloutError as error:
            raise ConversationError(f"the row has images, but the policy has no image input: {error}") from error

    def _has_image_parts(self, messages: Messages) -> bool:
        return any(part.get("type") == "image" for message in messages for part in content_parts(message))

    def _place(self, tokenized: Tokenized, images: Sequence[bytes]) -> Tokenized:
        placeholder = self._images.image_token_id
        if (count := tokenized.tokens.count(placeholder)) != len(images):
            raise ConversationError(
                f"{len(images)} images for {count} image parts of the messages up to the last answer"
            )
        rest, tokens, starts = iter(images), list[int](), list[int]()
        placed: list[PromptImage] = []
        for token in tokenized.tokens:
            starts.append(len(tokens))
            if token != placeholder:
                tokens.append(token)
                continue
            png = next(rest)
            try:
                num_tokens = self._images.count(png)
            except ValueError as error:
                raise ConversationError(str(error)) from error
            placed.append(PromptImage(len(tokens), num_tokens, png))
            tokens += [placeholder] * num_tokens
        starts.append(len(tokens))
        turns = [(starts[start], starts[end]) for start, end in tokenized.turns]
        return Tokenized(tokens, turns, tuple(placed))

    def _render(self, messages: Messages, tools: Sequence[Any], *, prompt: bool = False) -> str:
        try:
            text = cast(
                str,
                self._tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
                ),
            )
            text.encode()  # raises for half of a surrogate pair, which no tokenizer takes
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise ConversationError(f"the chat template can't render these messages: {error}") from error
        return text

    def _tagged_spans(
        self, messages: Messages, tools: Sequence[Any], chosen: Sequence[int]
    ) -> list[tuple[int, int]] | None:
        """Return the spans of generation tags; None unless one per assistant turn."""
        from transformers.utils.chat_template_utils import render_jinja_template

        _, spans = render_jinja_template(
            conversations=[list(messages)],
            tools=list(tools) or None,
            chat_template=self._tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            add_generation_prompt=False,
            **self._tokenizer.special_tokens_map,
        )
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans[0]) != len(answers):
            return None
        ranges = cast(list[tuple[int, int]], spans[0])  # of the text, whatever transformers' annotation says
        return [span for i, span in zip(answers, ranges, strict=True) if i in chosen]

    def _span(self, messages: Messages, i: int, tools: Sequence[Any], text: str) -> tuple[int, int]:
        through = text if i == len(messages) - 1 else self._render(messages[: i + 1], tools)
        opened = self._render(messages[:i], tools) if i else ""
        before = self._render(messages[:i], tools, prompt=True) if i else ""
        start = self._start(messages[:i], tools, before, through)
        # A template may close conversations, so that a rendered beginning has that text in place of the next turn
        unclosed = opened[: common_length(opened, before)]
        shared = common_length(text, through)
        end = through.rfind(self._end_text, start, shared)
        is_whole = shared == len(through) or (end >= 0 and text.endswith(through[shared:]))
        if not is_whole or not through.startswith(unclosed):
            raise ConversationError(
                "the chat template changes earlier turns when later ones follow: set data.train_on to last"
            )
        if shared < len(through):
            return start, end + len(self._end_text)
        is_end = end >= 0 and not through[end + len(self._end_text) :].strip()
        return start, end + len(self._end_text) if is_end else len(through)

    def _start(self, messages: Messages, tools: Sequence[Any], before: str, through: str) -> int:
        """Return the start of the answer that `through` adds to `messages`; before: with the generation prompt."""
        if messages and through.startswith(before):
            return len(before)
        header = self._header(messages, tools)
        if messages:
            # The answer's text may begin as the thought that the generation prompt opens
            return min(common_length(before, through), common_length(before, header))
        after_user = self._header([USER], tools)
        added = after_user[common_length(self._render([USER], tools, prompt=True), after_user) :]
        return common_length(header.removesuffix(added), through)

    def _header(self, messages: Messages, tools: Sequence[Any]) -> str:
        """Render what is before the text of an answer to `messages`."""
        text = self._render([*messages, {"role": "assistant", "content": NAME}], tools)
        if (end := text.rfind(NAME)) < 0:
            raise ConversationError("the chat template leaves out the text of an answer")
        return text[:end]


def _in_style(message: dict[str, Any], style: CallStyle) -> dict[str, Any]:
    """Return a message with the arguments of its calls in the form that the template takes, as in a rollout."""
    calls: Any = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_in_style(call, style) for call in cast(list[Any], calls)]}


def _call_in_style(value: Any, style: CallStyle) -> Any:
    if not isinstance(value, Mapping):
        return value
    call = cast(Mapping[str, Any], value)
    if "function" in call:
        return {**call, "function": _call_in_style(call["function"], style)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str | Mapping) or not (isinstance(arguments, str) or style.text_arguments):
        return call
    try:
        text = normalize_arguments(cast("str | Mapping[str, Any]", arguments or "{}"))
    except (TypeError, ValueError) as error:
        raise ConversationError(f"the arguments of a tool call are no JSON object: {error}") from error
    return {**call, "arguments": text if style.text_arguments else json.loads(text)}


def content_parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message's parts; none of a text."""
    content: Any = message.get("content")
    return cast(list[dict[str, Any]], content) if isinstance(content, list) else []


def _token_range(starts: Sequence[int], span: tuple[int, int]) -> tuple[int, int] | None:
    """Return the tokens that begin within a span of the text."""
    inside = [i for i, start in enumerate(starts) if span[0] <= start < span[1]]
    return (inside[0], inside[-1] + 1) if inside else None


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(one), len(other)))

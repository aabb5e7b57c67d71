"""Agents that answer with text."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.envs.contract import random_answer
from offbeat.envs.registry import TextEnv
from offbeat.envs.tools.functions import Call, write_calls, write_results
from offbeat.envs.tools.tool_calls import MCP_INSTRUCTION
from offbeat.services.chat.append_only import ChatFormat, ChatMessageDict
from offbeat.services.chat.template import ChatTemplate
from offbeat.services.chat.tool_templates import load_playing_format
from offbeat.services.messages.types import Completion, PromptImage, VersionSpan

START, END, IMAGE = "<|im_start|>", "<|im_end|>", "<|image|>"


class UserLeftError(Exception): ...


def load_chat(folder: Path | None, *, has_images: bool = True) -> ChatFormat:
    """Return a folder's chat format; byte-level ChatML without one, whose agents can send images if `has_images`."""
    return _build_byte_chat(has_images) if folder is None else load_playing_format(folder)


class TextSampler:
    """Text answers as completions with zero logprobs."""

    def __init__(self, respond: Callable[[], str], chat: ChatFormat) -> None:
        self._respond = respond
        self._chat = chat

    async def __call__(
        self,
        _: tuple[int, ...],
        max_tokens: int,
        __: tuple[PromptImage, ...] = (),
        *,
        stop_strings: tuple[str, ...] = (),
    ) -> Completion:
        del stop_strings  # an agent's gateway cuts answers, too
        ids = (*self._chat.encode(self._respond()), self._chat.end_id)[:max_tokens]
        return Completion("", ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 0),))


def make_random_agent(env: TextEnv, seed: int) -> Callable[[], str]:
    rng = np.random.default_rng(seed)
    return lambda: random_answer(env, rng)


def make_human_agent() -> Callable[[], str]:

    def respond() -> str:
        try:
            return input("> ")
        except (EOFError, KeyboardInterrupt):
            raise UserLeftError from None

    return respond


class OneTokenImages:
    def __init__(self, image_token_id: int) -> None:
        self.image_token_id = image_token_id

    def count(self, _: bytes, /) -> int:
        return 1


def _build_byte_chat(has_images: bool) -> ChatFormat:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    vocabulary = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (START, END, IMAGE)])

    def render(messages: Sequence[ChatMessageDict], prompt: bool) -> str:
        text = "".join(
            f"{START}{message['role']}\n{_render_content(message['content'])}{END}\n" for message in messages
        )
        return text + (f"{START}assistant\n" if prompt else "")

    (image_id,) = tokenizer.encode(IMAGE).ids

    def reader() -> OneTokenImages:
        return OneTokenImages(image_id)

    return ChatFormat(
        render,
        tokenizer,
        reader=reader,
        calling=lambda _: ChatTemplate(
            lambda messages, tools, prompt: render(_render_tools(messages, tools), prompt),
            tokenizer,
            reader=reader if has_images else None,
        ),
    )


def _render_tools(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[ChatMessageDict]:
    rendered: list[ChatMessageDict] = []
    if tools:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        rendered.append({"role": "system", "content": MCP_INSTRUCTION.replace("{tools}", schemas)})
    for message in messages:
        role, text = message["role"], message["content"]
        calls = [
            Call(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
        ]
        if role == "tool":
            role, text = "user", write_results([text])
        if rendered and role == "system":
            rendered[0]["content"] = text + rendered[0]["content"]
        else:
            rendered.append({"role": role, "content": write_calls(text, calls) if calls else text})
    return rendered


def _render_content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(IMAGE if part["type"] == "image" else part["text"] for part in content)

"""Sources of answers (a person, random actions, a policy), and their conversion to tokens."""

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
from offbeat.services.messages.types import Completion, Picture, VersionSpan

START, END, IMAGE = "<|im_start|>", "<|im_end|>", "<|image|>"


class GoneError(Exception):
    """The person at the keyboard has left."""


def chat_of(folder: Path | None) -> ChatFormat:
    """Return the chat format of a model's folder; without one, byte-level ChatML."""
    return _byte_chat() if folder is None else load_playing_format(folder)


class SpokenAnswers:
    """Text answers as tokens that no policy sampled: their logprobs are zero."""

    def __init__(self, say: Callable[[], str], chat: ChatFormat) -> None:
        self._say = say
        self._chat = chat

    async def __call__(self, _: tuple[int, ...], most: int, __: tuple[Picture, ...] = ()) -> Completion:
        ids = (*self._chat.encode(self._say()), self._chat.end_id)[:most]
        return Completion("", ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 0),))


def random_speaker(env: TextEnv, seed: int) -> Callable[[], str]:
    """Return a generator of the env's random answers, deterministic by seed."""
    rng = np.random.default_rng(seed)
    return lambda: random_answer(env, rng)


def human_speaker() -> Callable[[], str]:
    """Return a function that reads an answer from the keyboard."""

    def say() -> str:
        try:
            return input("> ")
        except (EOFError, KeyboardInterrupt):
            raise GoneError from None

    return say


class OneToken:
    """Image reader without a model: one token per image."""

    def __init__(self, image_token_id: int) -> None:
        self.image_token_id = image_token_id

    def count(self, _: bytes, /) -> int:
        return 1


def _byte_chat() -> ChatFormat:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    vocabulary = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (START, END, IMAGE)])

    def render(messages: Sequence[ChatMessageDict], prompt: bool) -> str:
        text = "".join(f"{START}{message['role']}\n{_written(message['content'])}{END}\n" for message in messages)
        return text + (f"{START}assistant\n" if prompt else "")

    (image_id,) = tokenizer.encode(IMAGE).ids
    return ChatFormat(
        render,
        tokenizer,
        reader=lambda: OneToken(image_id),
        calling=lambda _: ChatTemplate(
            lambda messages, tools, prompt: render(_in_words(messages, tools), prompt), tokenizer
        ),
    )


def _in_words(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[ChatMessageDict]:
    """Return the messages with functions, calls and results as text, in the format of Qwen's and Hermes' templates."""
    told: list[ChatMessageDict] = []
    if tools:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        told.append({"role": "system", "content": MCP_INSTRUCTION.replace("{tools}", schemas)})
    for message in messages:
        role, words = message["role"], message["content"]
        calls = [
            Call(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
        ]
        if role == "tool":
            role, words = "user", write_results([words])
        if told and role == "system":
            told[0]["content"] = words + told[0]["content"]
        else:
            told.append({"role": role, "content": write_calls(words, calls)})
    return told


def _written(content: Any) -> str:
    """Return a message's text, with a token for each image."""
    if isinstance(content, str):
        return content
    return "".join(IMAGE if part["type"] == "image" else part["text"] for part in content)

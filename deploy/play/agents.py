"""Who answers: a person, a random agent, or a policy; and the tokens that an answer in words becomes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from envs.contract import random_answer
from envs.registry import TextEnv
from services.rollout.chat import ChatFormat, Message, load_chat_format
from services.schema import Completion, VersionSpan

START, END = "<|im_start|>", "<|im_end|>"


class GoneError(Exception):
    """The person at the keyboard has left."""


def chat_of(folder: Path | None) -> ChatFormat:
    """The chat format of a model's folder; without one, ChatML over bytes, which loses no character of any text."""
    return _byte_chat() if folder is None else load_chat_format(folder)


class SpokenAnswers:
    """Answers in words, as tokens that nobody sampled: their logprobs are zero."""

    def __init__(self, say: Callable[[], str], chat: ChatFormat) -> None:
        self._say = say
        self._chat = chat

    async def __call__(self, _: tuple[int, ...], most: int) -> Completion:
        """See `services.rollout.episode.Sample`."""
        ids = (*self._chat.encode(self._say()), self._chat.end_id)[:most]
        return Completion("", ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 0),))


def random_speaker(env: TextEnv, seed: int) -> Callable[[], str]:
    """Says what the env calls a random answer; the same for the same seed."""
    rng = np.random.default_rng(seed)
    return lambda: random_answer(env, rng)


def human_speaker() -> Callable[[], str]:
    """Reads a line from the keyboard."""

    def say() -> str:
        try:
            return input("> ")
        except (EOFError, KeyboardInterrupt):
            raise GoneError from None

    return say


def _byte_chat() -> ChatFormat:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    vocabulary = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (START, END)])

    def render(messages: Sequence[Message], prompt: bool) -> str:
        text = "".join(f"{START}{message['role']}\n{message['content']}{END}\n" for message in messages)
        return text + (f"{START}assistant\n" if prompt else "")

    return ChatFormat(render, tokenizer)

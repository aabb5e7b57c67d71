"""Experts of the tokens of an agent's conversations, of which each answer has those of the call that sampled it."""

from dataclasses import replace

import numpy as np

from offbeat.services.chat.messages import ChatMessage
from offbeat.services.chat.template import ChatTemplate
from offbeat.services.gateway.session import EpisodeSession, ModelRequest
from offbeat.services.messages.types import Completion, PromptImage, Segment
from tests.services.gateway.templates import Scripted, session_of


class Routed(Scripted):
    """A policy whose expert of each token is the number of the call."""

    async def __call__(
        self,
        prompt: tuple[int, ...],
        max_new_tokens: int,
        images: tuple[PromptImage, ...] = (),
        stop_strings: tuple[str, ...] = (),
    ) -> Completion:
        made = await super().__call__(prompt, max_new_tokens, images, stop_strings)
        experts = np.full((len(prompt) + len(made.token_ids) - 1, 1, 1), len(self.sent), dtype=np.uint8)
        return replace(made, routing=experts)


async def ask(session: EpisodeSession, *messages: ChatMessage, stop: tuple[str, ...] = ()) -> ChatMessage:
    replies = await session.answer(ModelRequest(messages, stop=stop))
    session.deliver(replies)
    return replies[0].message


def experts_of(segment: Segment) -> list[int]:
    assert segment.routing is not None
    return segment.routing[:, 0, 0].tolist()


async def test_branches_have_the_experts_of_their_stem(plain: ChatTemplate) -> None:
    policy = Routed(plain, ["stem", "left", "right", "on"])
    session = session_of(policy)
    a, left, right, on = (ChatMessage("user", text) for text in ("a", "l", "r", "o"))
    stem = await ask(session, a)
    leftmost = await ask(session, a, stem, left)
    await ask(session, a, stem, right)
    await ask(session, a, stem, left, leftmost, on)
    of_right, of_left = sorted(session.close().segments, key=lambda segment: len(segment.tokens))
    ends = [len(sent) + len(made.token_ids) - 1 for sent, made in zip(policy.sent, policy.made, strict=True)]
    assert experts_of(of_right) == [1] * ends[0] + [3] * (ends[2] - ends[0])
    assert experts_of(of_left) == [1] * ends[0] + [2] * (ends[1] - ends[0]) + [4] * (ends[3] - ends[1])


async def test_tokens_after_a_stop_word_leave_no_experts(plain: ChatTemplate) -> None:
    policy = Routed(plain, ["think Observation: made up", "two"])
    session = session_of(policy)
    a, b = ChatMessage("user", "a"), ChatMessage("user", "b")
    said = await ask(session, a, stop=("Observation:",))
    await ask(session, a, ChatMessage("assistant", said.content + "Observation:"), b)
    (segment,) = session.close().segments
    num_first = len(policy.sent[0]) + len(plain.encode("think Observation:")) - 1
    assert experts_of(segment) == [1] * num_first + [2] * (len(segment.tokens) - 1 - num_first)

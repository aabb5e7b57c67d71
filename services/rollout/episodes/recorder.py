"""Recorders of an episode's tokens, in one or more segments.

Invariant: exactly the tokens sent and sampled are recorded, each sampled one once.
"""

import asyncio
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from msgspec import structs

from offbeat.envs.tools.functions import Call, read_results, write_calls
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.chat.capture import Reward, capture
from offbeat.services.chat.messages import ChatMessage, Tools
from offbeat.services.chat.template import ChatTemplate, UnusableError
from offbeat.services.chat.token_tree import Prompt, TokenTree
from offbeat.services.chat.tool_probe import can_render_results
from offbeat.services.errors import EpisodeError, RolloutError
from offbeat.services.messages.types import (
    Completion,
    FinishReason,
    PromptImage,
    RoutingArray,
    Segment,
    Turn,
    VersionSpan,
)
from offbeat.services.rollout.config import CustomEnv


class TurnMessage(NamedTuple):
    """Message with a placeholder for each image, or of an episode's first turn for those of the opening, too."""

    words: str
    images: tuple[bytes, ...] = ()
    """PNG."""
    observation: str = ""
    """Without the template."""


Sent = tuple[Sequence[int], tuple[PromptImage, ...]]


class Record(NamedTuple):
    """Turns, and token sequences up to their last completion."""

    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]


class EpisodeRecorder(Protocol):
    """Recorder of turns by `ask`, `add_completion`, `add_reward`, in order."""

    def ask(self, message: TurnMessage) -> Sent:
        """Return the next prompt.

        Raises:
            EpisodeError: rendering failed.
        """
        ...

    def add_completion(self, completion: Completion) -> str:
        """Record a completion; return its text.

        Raises:
            EpisodeError: as `check_completion`.
        """
        ...

    def add_reward(self, reward: float, state_hash: str) -> None: ...

    def record(self) -> Record: ...


class AppendOnlyRecorder:
    """Recorder of one sequence, in arrays, as prompts are sent as bytes."""

    __slots__ = ("_chat", "_images", "_logprobs", "_opening", "_routing", "_spans", "_system", "_tokens", "_turns")

    def __init__(self, chat: ChatFormat, system: str, opening: Sequence[str] = ()) -> None:
        """opening: texts of user and assistant before the first message."""
        self._chat = chat
        self._system = system
        self._opening = opening
        self._turns: list[Turn] = []
        self._tokens = array("i")
        self._images: list[PromptImage] = []
        self._logprobs = array("d")
        """Of sampled tokens only."""
        self._spans: list[VersionSpan] = []
        self._routing: list[RoutingArray] = []

    def ask(self, message: TurnMessage) -> Sent:
        if self._turns and self._tokens[-1] != self._chat.end_id:
            self._tokens.append(self._chat.end_id)
        words = message.words
        ids = self._chat.next_prompt(words) if self._turns else self._first_prompt(words)
        images: tuple[PromptImage, ...] = ()
        if message.images:
            ids, images = self._chat.image_tokens.place(ids, message.images)
        before = len(self._tokens)
        self._images += [structs.replace(image, start=before + image.start) for image in images]
        self._tokens.extend(ids)
        return self._tokens[:], tuple(self._images)

    def _first_prompt(self, words: str) -> tuple[int, ...]:
        if not self._opening:
            return self._chat.first_prompt(self._system, words)
        chat, (first, *rest) = self._chat, (*self._opening, words)
        ids = [*chat.first_prompt(self._system, first)]
        for answer, message in zip(rest[::2], rest[1::2], strict=True):
            ids += [*chat.encode(answer), chat.end_id, *chat.next_prompt(message)]
        return tuple(ids)

    def add_completion(self, completion: Completion) -> str:
        start, count = len(self._tokens), len(completion.token_ids)
        check_completion(completion)
        self._tokens.extend(completion.token_ids)
        self._logprobs.extend(completion.logprobs)
        for span in completion.versions:
            last = self._spans[-1] if self._spans else None
            if last is not None and last.end == start + span.start and last.version == span.version:
                self._spans[-1] = VersionSpan(last.start, start + span.end, span.version)
            else:
                self._spans.append(VersionSpan(start + span.start, start + span.end, span.version))
        if (
            completion.routing is not None
        ):  # earlier turns have recorded the first rows, which a view would keep in memory
            self._routing.append(completion.routing[sum(map(len, self._routing)) :].copy())
        is_truncated = completion.finish_reason is FinishReason.LENGTH
        self._turns.append(Turn(0, start, start + count, 0.0, is_truncated=is_truncated))
        return self._chat.answer(completion.token_ids)

    def add_reward(self, reward: float, state_hash: str) -> None:
        self._turns[-1] = self._turns[-1]._replace(reward=reward, state_hash=state_hash)

    def record(self) -> Record:
        length = self._turns[-1].end if self._turns else len(self._tokens)
        mask = np.zeros(length, dtype=np.bool_)
        for turn in self._turns:
            mask[turn.start : turn.end] = True
        logprobs = np.zeros(length, dtype=np.float32)
        logprobs[mask] = self._logprobs
        images = tuple(image for image in self._images if image.start + image.count <= length)
        tokens = np.array(self._tokens[:length], dtype=np.int32)
        routing = np.concatenate(self._routing) if self._routing else None
        return Record(tuple(self._turns), (Segment(tokens, mask, logprobs, tuple(self._spans), images, routing),))


class PerStepRecorder:
    def __init__(self, chat: ChatFormat, system: str) -> None:
        self._chat = chat
        self._system = system
        self._steps: list[AppendOnlyRecorder] = []

    def ask(self, message: TurnMessage) -> Sent:
        self._steps.append(AppendOnlyRecorder(self._chat, self._system))
        return self._steps[-1].ask(message)

    def add_completion(self, completion: Completion) -> str:
        return self._steps[-1].add_completion(completion)

    def add_reward(self, reward: float, state_hash: str) -> None:
        self._steps[-1].add_reward(reward, state_hash)

    def record(self) -> Record:
        steps = [step.record() for step in self._steps]
        answered = [step for step in steps if step.turns] or steps[:1]
        turns = [turn._replace(segment=n) for n, step in enumerate(answered) for turn in step.turns]
        return Record(tuple(turns), tuple(segment for step in answered for segment in step.segments))


@dataclass
class RerenderedRecorder:
    """Recorder that renders whole conversations; unchanged prefixes continue a sequence.

    functions: in OpenAI's form; calls are followed by their results.
    """

    template: ChatTemplate
    system: str
    functions: Tools = ()
    opening: Sequence[str] = ()
    """Texts of user and assistant before the first message."""
    messages: list[ChatMessage] = field(default_factory=list[ChatMessage])
    _states: list[str] = field(default_factory=list[str])
    _rewards: list[Reward] = field(default_factory=list[Reward])
    _prompt: Prompt | None = None

    def __post_init__(self) -> None:
        self._tree = TokenTree(self.template)
        self._result_role = "tool" if self.functions and can_render_results(self.template) else "user"
        if self.system:
            self.messages.append(ChatMessage("system", self.system))
        self.messages += [ChatMessage(("user", "assistant")[i % 2], text) for i, text in enumerate(self.opening)]

    def ask(self, message: TurnMessage) -> Sent:
        if message.images:
            raise EpisodeError("bad_conversation", "re-rendered conversations do not support images")
        calls = self.messages[-1].tool_calls if self.messages else ()
        if calls:
            results = read_results(message.observation, len(calls))
            pairs = zip(calls, results, strict=True)
            self.messages += [ChatMessage(self._result_role, text, tool_call_id=call.call_id) for call, text in pairs]
        else:
            self.messages.append(ChatMessage("user", message.words))
        try:
            self._prompt = self._tree.plan_chat(self.messages, self.functions)
        except UnusableError as error:
            raise EpisodeError("bad_conversation", str(error)) from error
        return self._prompt.tokens, ()

    def add_completion(self, completion: Completion) -> str:
        """Return the text, with tool calls as `write_calls`."""
        assert self._prompt is not None, "call ask() first"
        check_completion(completion)
        answer = self._parse_answer(self.template.text_of(completion.token_ids))
        number = self._tree.record(self._prompt, answer, completion, len(completion.token_ids))
        self._tree.nodes[number].delivered = True
        self.messages.append(answer)
        self._states.append("")
        return write_calls(answer.content, [Call(call.name, call.parsed()) for call in answer.tool_calls])

    def _parse_answer(self, text: str) -> ChatMessage:
        """Parse an answer; calls that can't be rerendered stay text."""
        answer = self.template.message_of(text, tools=self.functions).with_call_ids(len(self._tree.nodes))
        if not answer.tool_calls:
            return answer
        try:
            self.template.render([*self.messages, answer], self.functions, prompt=False)
        except UnusableError:
            return ChatMessage("assistant", text)
        return answer

    def add_reward(self, reward: float, state_hash: str) -> None:
        self._rewards.append(Reward(len(self._tree.nodes), reward))
        self._states[-1] = state_hash

    def record(self) -> Record:
        captured = capture(self._tree, self._rewards)
        states = zip(captured.turns, self._states, strict=True)
        return Record(tuple(turn._replace(state_hash=state) for turn, state in states), captured.segments)


async def make_recorder(
    chat: ChatFormat, env: CustomEnv, system: str, functions: Tools = (), opening: Sequence[str] = ()
) -> EpisodeRecorder:
    """Return a tag's recorder. opening: texts before the first message.

    Raises:
        EpisodeError: the template can't offer functions, or step-wise prompts have an opening.
    """
    if functions:
        try:
            # the first call may import vLLM, which takes seconds
            template = await asyncio.to_thread(chat.calling, env.tool_call_parser)
            return RerenderedRecorder(template, system, functions, opening)
        except RolloutError as error:
            raise EpisodeError("bad_conversation", str(error)) from error
    if env.env_manager_cls != "TrajEnvManager":
        if opening:
            raise EpisodeError("bad_conversation", f"{env.env_manager_cls} has no messages before the first one")
        return PerStepRecorder(chat, system)
    if chat.rewriting is None:
        return AppendOnlyRecorder(chat, system, opening)
    return RerenderedRecorder(chat.rewriting, system, opening=opening)


def check_completion(completion: Completion) -> None:
    """Raise EpisodeError unless finite logprobs and versions match the tokens."""
    count, covered = len(completion.token_ids), 0
    for span in completion.versions:
        if span.start != covered or span.end <= span.start:
            raise EpisodeError("generation_invalid", f"version spans {completion.versions} of {count} tokens")
        covered = span.end
    if not count or covered != count or len(completion.logprobs) != count:
        raise EpisodeError(
            "generation_invalid", f"{count} tokens, {len(completion.logprobs)} logprobs, versions for {covered}"
        )
    if not all(map(math.isfinite, completion.logprobs)):
        raise EpisodeError("generation_invalid", "a logprob that is not finite")

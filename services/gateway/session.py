"""Session of one episode.

Invariants: completions use the run's sampling parameters and are recorded before delivery; a closed session answers
nothing.
"""

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from offbeat.services.chat.capture import Captured, Reward, capture
from offbeat.services.chat.messages import ChatMessage, Tools
from offbeat.services.chat.stops import StopStrings
from offbeat.services.chat.template import ChatTemplate
from offbeat.services.chat.token_tree import Prompt, TokenTree
from offbeat.services.gateway.images import RequestImages, check_episode_images
from offbeat.services.messages.types import Completion, FinishReason

Sample = Callable[..., Awaitable[Completion]]
"""(prompt, maximum new tokens[, images][, stop_strings=]) -> completion."""

NO_LIMIT = 1 << 30
MAX_ANSWERS_PER_CALL = 16


class InvalidCallError(Exception):
    """Mistake of the agent.

    kind: machine-readable, OpenAI's name if any.
    """

    def __init__(self, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class SessionLimits:
    sequence_length: int
    """Prompt and answer, tokens."""
    max_new_tokens: int
    """One completion, tokens."""
    max_calls: int = 1024
    """Answers per episode."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """API-independent call."""

    messages: tuple[ChatMessage, ...] = ()
    """With images as they were sent."""
    tools: Tools = ()
    reads_calls: bool = True
    """Whether calls of the tools are parsed, not left as text (`tool_choice: none`)."""
    prompt: str | tuple[int, ...] | None = None
    """Instead of messages."""
    has_start: bool = True
    """Begin a text with the tokenizer's BOS."""
    prefill: str = ""
    """Beginning of the answer to the messages."""
    max_tokens: int | None = None
    num_answers: int = 1
    stop: tuple[str, ...] = ()
    wants_logprobs: bool = False
    ignored: tuple[str, ...] = ()
    """For counting."""


@dataclass(frozen=True, slots=True)
class ModelReply:
    node: int
    message: ChatMessage
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    token_texts: tuple[str, ...]
    """Empty unless the request wants logprobs: each is decoded by itself."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop_word: str
    prompt_ids: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)


class EpisodeEnv(Protocol):
    @property
    def task(self) -> dict[str, Any]:
        """Observation, system prompt, seed, tag, ..."""
        ...

    async def step(self, action: str) -> dict[str, Any]:
        """Return observation, reward, `done` and metrics, all of them JSON.

        Raises:
            InvalidCallError: the episode is over.
        """
        ...


@dataclass
class EpisodeSession:
    template: ChatTemplate
    sample: Sample
    bounds: SessionLimits
    model: str = "policy"
    key: str = field(default_factory=lambda: f"offbeat-{secrets.token_urlsafe(24)}")
    env: EpisodeEnv | None = None
    conversations: dict[str, tuple[ChatMessage, ...]] = field(default_factory=dict[str, tuple[ChatMessage, ...]])
    """By the last response's id."""
    ignored_parameters: int = 0
    ran_out: bool = False
    """True if `sequence_length` left no room for the last call."""
    failure: Exception | None = None
    """Error that ended capture."""

    def __post_init__(self) -> None:
        self.tree = TokenTree(self.template)
        self._images = RequestImages(self.template)
        self.failed = asyncio.Event()
        self.closed = False
        self.rewards: list[Reward] = []
        self._num_requested = 0
        self._extra_ids: set[int] = set()
        """Sampled ids beyond the tokenizer's, of a model with more rows."""
        self._undelivered: dict[int, tuple[ChatMessage, ...]] = {}
        """Messages of calls, by answer."""
        self._last: tuple[int, tuple[ChatMessage, ...]] | None = None
        """Newest delivered or continued answer, and the messages of its call."""

    @property
    def is_chat(self) -> bool:
        """Return whether the newest delivered answer is one to messages."""
        return self._last is not None and self.tree.nodes[self._last[0]].prompt.is_chat

    @property
    def conversation(self) -> tuple[ChatMessage, ...]:
        """Return the messages up to the newest delivered answer, a text or tokens as the user's; empty without one."""
        if self._last is None:
            return ()
        number, messages = self._last
        node = self.tree.nodes[number]
        if not node.prompt.is_chat:
            messages = (ChatMessage("user", node.prompt.text or self.template.text_of(node.prompt.tokens)),)
        return (*messages, node.message)

    async def answer(self, request: ModelRequest) -> list[ModelReply]:
        """Sample and record `num_answers` answers, undelivered.

        Raises:
            InvalidCallError, UnusableError: the call can't be answered.
            Exception: sampling failed; sets `failed`.
        """
        messages = await self._images.read(request.messages)
        self._require_open()
        self._admit(request)
        prompt = self._plan(request, messages)
        room = self.bounds.sequence_length - len(prompt.tokens)
        self.ran_out = room < 1
        if self.ran_out:
            raise InvalidCallError(
                f"this model's maximum context length is {self.bounds.sequence_length} tokens; the messages have "
                f"{len(prompt.tokens)} tokens and leave no room for an answer",
                "context_length_exceeded",
            )
        max_new_tokens = min(room, self.bounds.max_new_tokens, request.max_tokens or NO_LIMIT)
        self.ignored_parameters += len(request.ignored)
        images = (prompt.images,) if prompt.images else ()
        words = {"stop_strings": request.stop} if request.stop else {}
        samples = (self.sample(prompt.tokens, max_new_tokens, *images, **words) for _ in range(request.num_answers))
        tasks = [asyncio.ensure_future(sample) for sample in samples]
        try:
            completions = await asyncio.gather(*tasks)
            for completion in completions:
                _check(completion)
        except Exception as error:
            self.fail(error)
            raise
        finally:
            for task in tasks:
                task.cancel()
        replies = [self._record(prompt, completion, request) for completion in completions]
        self._undelivered.update((reply.node, messages) for reply in replies)
        self._note_received(prompt.parent)
        return replies

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the length of a call's prompt; raises as `answer`."""
        messages = await self._images.read(request.messages)
        self._require_open()
        return len(self._plan(request, messages).tokens)

    def messages_of(self, reply: ModelReply) -> tuple[ChatMessage, ...]:
        """Return the messages of an undelivered answer's call, whose images are kept once for all calls."""
        return self._undelivered[reply.node]

    def deliver(self, replies: list[ModelReply]) -> None:
        if not self.closed:
            for reply in replies:
                self.tree.nodes[reply.node].delivered = True
                self._note_received(reply.node)
                self._undelivered.pop(reply.node, None)

    def _note_received(self, number: int) -> None:
        """Make an answer that the agent has the end of `conversation`, unless a newer one is."""
        messages = self._undelivered.get(number)
        if messages is not None and (self._last is None or number > self._last[0]):
            self._last = number, messages

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.failed.set()

    def reward(self, value: float) -> None:
        self.rewards.append(Reward(len(self.tree.nodes), value))

    def close(self) -> Captured:
        """Reject further calls; return the capture."""
        self.closed = True
        captured = capture(self.tree, self.rewards)
        counts = {**captured.metrics, "ignored_parameters": float(self.ignored_parameters)}
        return Captured(captured.segments, captured.turns, counts)

    def _require_open(self) -> None:
        if self.closed:
            raise InvalidCallError("the episode of this key is over", "episode_over")

    def _admit(self, request: ModelRequest) -> None:
        if not 1 <= request.num_answers <= MAX_ANSWERS_PER_CALL:
            raise InvalidCallError(
                f"n is {request.num_answers}; 1 to {MAX_ANSWERS_PER_CALL} answers can be asked for in one call"
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise InvalidCallError(f"max_tokens is {request.max_tokens}; it must be 1 or more")
        self._num_requested += request.num_answers
        if self._num_requested > self.bounds.max_calls:
            raise InvalidCallError(
                f"an episode may ask for {self.bounds.max_calls} answers (max_calls)", "too_many_calls"
            )

    def _plan(self, request: ModelRequest, messages: tuple[ChatMessage, ...]) -> Prompt:
        if request.prompt is None:
            tools = request.tools if request.reads_calls or self.template.reads_calls else ()
            prompt = self.tree.plan_chat(messages, tools, request.prefill)
            check_episode_images(self.tree, prompt)
            return prompt
        if isinstance(request.prompt, str):
            prompt = self.tree.plan_text(request.prompt, has_start=request.has_start)
        else:
            self._require_known(request.prompt)
            prompt = self.tree.plan_tokens(request.prompt)
        if not prompt.tokens:
            raise InvalidCallError("the prompt is empty")
        return prompt

    def _require_known(self, token_ids: tuple[int, ...]) -> None:
        num_tokens = self.template.num_tokens
        if unknown := [token for token in token_ids if token >= num_tokens and token not in self._extra_ids]:
            raise InvalidCallError(f"token {unknown[0]} is not in the policy's vocabulary of {num_tokens}")

    def _record(self, prompt: Prompt, completion: Completion, request: ModelRequest) -> ModelReply:
        num_kept, text, stop_word = self._until_stop(completion, request.stop)
        if stop_word:
            completion = replace(completion, finish_reason=FinishReason.STOP)
        tools = request.tools if request.reads_calls else ()
        message, whole = (
            # unique ids identify the answer in a later request's history
            self.template.message_of(each, tools=tools).with_call_ids(len(self.tree.nodes))
            for each in (text, prompt.prefill + text)
        )
        node = self.tree.record(prompt, whole, completion, num_kept)
        self._extra_ids.update(token for token in completion.token_ids if token >= self.template.num_tokens)
        cut = completion.finish_reason is FinishReason.LENGTH
        reason = "tool_calls" if message.tool_calls else "length" if cut else "stop"
        ids = completion.token_ids[:num_kept]
        texts = tuple(self.template.token_text(token) for token in ids) if request.wants_logprobs else ()
        return ModelReply(
            node,
            message,
            ids,
            completion.logprobs[:num_kept],
            texts,
            reason,
            stop_word,
            prompt_ids=prompt.tokens,
        )

    def _until_stop(self, completion: Completion, stop: tuple[str, ...]) -> tuple[int, str, str]:
        """Return (retained tokens, text, stop word)."""
        ids = completion.token_ids
        end = _stop_strings_of(self.template, stop).find_end(ids) if stop else None
        text = self.template.text_of(ids[:end])
        if end is None:
            return len(ids), text, ""
        whole = self.template.whole_text(ids[:end])
        _, word = min((at, word) for word in stop if (at := whole.find(word)) >= 0)
        return end, text.partition(word)[0], word


@lru_cache(64)
def _stop_strings_of(template: ChatTemplate, stop: tuple[str, ...]) -> StopStrings:
    """Return a call's stop words, with what is known of the tokens by earlier calls."""
    return StopStrings(template.whole_text, stop)


def _check(completion: Completion) -> None:
    """Require finite logprobs and versions matching the tokens."""
    count, covered = len(completion.token_ids), 0
    for span in completion.versions:
        if span.start != covered or span.end <= span.start:
            raise ValueError(f"version spans {completion.versions} of {count} tokens")
        covered = span.end
    if not count or covered != count or len(completion.logprobs) != count:
        raise ValueError(f"{count} tokens, {len(completion.logprobs)} logprobs, versions for {covered}")
    if not all(map(math.isfinite, completion.logprobs)):
        raise ValueError("a logprob that is not finite")

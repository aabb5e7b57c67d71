"""Episodes that stay in vLLM between their turns (streaming input), so that a turn sends its new tokens alone.

Invariants: keys and values of a session are of one salt, that is, of one run's version: a request under another begins
anew, with its whole prompt. Waiting sessions and running requests together fit into the engine's slots and KV cache:
the least recently used session is closed where they would not, so that no request ever waits for one.
"""

# pyright: basic
import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from offbeat.services.messages.types import Completion, FinishReason, GenerateRequest, VersionSpan


class AbortedError(Exception):
    """The engine aborted a request."""


class CacheGroups(NamedTuple):
    """Groups of layers that take blocks of their own for a sequence, from the same memory."""

    growing: int = 1
    """Those that take a block per `block_size` tokens."""
    num_state_blocks: int = 0
    """Blocks of recurrent layers' states, whatever the sequence's length."""


KEYS_ALONE = CacheGroups()


@dataclass
class Capacity:
    """Requests and tokens that the engine holds, and those that it can hold; all of a block's count."""

    max_requests: int
    max_tokens: int
    requests: int = 0
    tokens: int = 0

    def has_room(self, tokens: int) -> bool:
        return self.requests < self.max_requests and self.tokens + tokens <= self.max_tokens

    def add(self, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens

    def remove(self, tokens: int) -> None:
        self.requests -= 1
        self.tokens -= tokens


@dataclass(frozen=True, slots=True)
class SessionTurn:
    request: GenerateRequest
    salt: str
    parameters: Any
    adapter: Any = None

    @property
    def episode(self) -> str:
        return self.request.episode


class EngineSession:
    """An episode's request in the engine.

    kept: tokens whose keys and values the engine holds; the last sampled one has none yet.
    """

    def __init__(self, llm: Any, turn: SessionTurn) -> None:
        self.kept: tuple[int, ...] = ()
        self._salt = turn.salt
        self._chunks: asyncio.Queue[Any] = asyncio.Queue()
        self._outputs: AsyncGenerator[Any, None] = llm.generate(
            self._inputs(), turn.parameters, turn.request.request_id, lora_request=turn.adapter
        )
        self._num_sampled = 0

    async def _inputs(self) -> AsyncGenerator[Any, None]:
        while True:
            yield await self._chunks.get()

    def continues_in(self, turn: SessionTurn) -> bool:
        prompt, count = turn.request.prompt, len(self.kept)
        return self._salt == turn.salt and len(prompt) > count and tuple(prompt[:count]) == self.kept

    async def sample(self, turn: SessionTurn) -> Completion:
        """Sample a turn; after an error the session has ended."""
        from vllm.engine.protocol import StreamingInput
        from vllm.inputs import tokens_input

        new = tokens_input(list(turn.request.prompt[len(self.kept) :]), cache_salt=turn.salt)
        self._chunks.put_nowait(StreamingInput(new, turn.parameters))
        ids: list[int] = []
        logprobs: list[float] = []
        cached = len(self.kept)
        async for output in self._outputs:
            cached = cached or output.num_cached_tokens or 0
            (answer,) = output.outputs
            if answer.token_ids:
                ids += answer.token_ids
                logprobs += answer.logprobs.logprobs
            if answer.finish_reason is not None:
                return self._complete(turn.request, ids, logprobs, answer, cached)
        raise AbortedError

    def _complete(
        self, request: GenerateRequest, ids: list[int], logprobs: list[float], answer: Any, cached: int
    ) -> Completion:
        if answer.finish_reason == "abort":
            raise AbortedError
        start = self._num_sampled
        spans = (span for span in answer.weight_versions if span.end > start)  # of all turns
        versions = tuple(VersionSpan(max(0, span.start - start), span.end - start, int(span.version)) for span in spans)
        self._num_sampled += len(ids)
        self.kept = (*request.prompt, *ids[:-1])
        reason = FinishReason.STOP if answer.finish_reason == "stop" else FinishReason.LENGTH
        return Completion(request.request_id, tuple(ids), tuple(logprobs), versions, reason, cached_tokens=cached)

    async def close(self) -> None:
        await self._outputs.aclose()


class Sessions:
    """Waiting sessions of an engine."""

    def __init__(self, llm: Any, max_num_seqs: int, groups: CacheGroups = KEYS_ALONE) -> None:
        cache = llm.vllm_config.cache_config
        self._llm = llm
        self._block_size: int = cache.block_size
        self.groups = groups
        self.capacity = Capacity(max_num_seqs, (cache.num_gpu_blocks - 1) * cache.block_size)  # the first is vLLM's
        self._waiting: OrderedDict[str, EngineSession] = OrderedDict()
        """By episode, the least recently used first."""
        self._is_open = True
        self.num_continued = 0
        """Turns that computed their new tokens alone."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kept_share(self) -> float:
        """Share of the KV cache that waiting sessions hold."""
        tokens = sum(self._whole_blocks(len(session.kept)) for session in self._waiting.values())
        return tokens / self.capacity.max_tokens

    @contextmanager
    def running(self, request: GenerateRequest) -> Iterator[None]:
        """Count a request that runs, for which `make_room` was called."""
        tokens = self._size(request)
        self.capacity.add(tokens)
        try:
            yield
        finally:
            self.capacity.remove(tokens)

    async def make_room(self, request: GenerateRequest) -> None:
        """Close waiting sessions beside which the request would not fit."""
        while self._waiting and not self.capacity.has_room(self._size(request)):
            await self._take(next(iter(self._waiting))).close()

    async def generate(self, turn: SessionTurn) -> Completion:
        """Sample a turn of an episode, whose session waits for the next one; raises as vLLM, or `AbortedError`."""
        session = self._take(turn.episode) if turn.episode in self._waiting else None
        if session is not None and not session.continues_in(turn):
            await session.close()
            session = None
        await self.make_room(turn.request)
        with self.running(turn.request):
            self.num_continued += session is not None
            session = session or EngineSession(self._llm, turn)
            completion = await session.sample(turn)
        await self._keep(turn.episode, session)
        return completion

    async def close_all(self) -> None:
        """Close waiting sessions, and until `reopen` those of running turns after them."""
        self._is_open = False
        for episode in list(self._waiting):
            await self._take(episode).close()

    def reopen(self) -> None:
        self._is_open = True

    async def _keep(self, episode: str, session: EngineSession) -> None:
        tokens = self._whole_blocks(len(session.kept))
        if not self._is_open or episode in self._waiting or not self.capacity.has_room(tokens):
            await session.close()
            return
        self.capacity.add(tokens)
        self._waiting[episode] = session

    def _take(self, episode: str) -> EngineSession:
        session = self._waiting.pop(episode)
        self.capacity.remove(self._whole_blocks(len(session.kept)))
        return session

    def _size(self, request: GenerateRequest) -> int:
        return self._whole_blocks(len(request.prompt) + request.sampling.max_new_tokens)

    def _whole_blocks(self, tokens: int) -> int:
        blocks = -(-tokens // self._block_size) * self.groups.growing + self.groups.num_state_blocks
        return blocks * self._block_size

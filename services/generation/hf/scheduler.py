"""Continuous batching.

Invariants: a sequence holds a row from its first pass to its end; the versions of its tokens are those of the passes
that sampled them.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from offbeat.services.chat.stops import StopStrings
from offbeat.services.generation.engine import MostLikely
from offbeat.services.generation.hf.rows import CHUNK, CacheRow, RowStore
from offbeat.services.messages.types import Completion, FinishReason, GenerateRequest, VersionSpan

MAX_TOKENS_PER_PASS = 2048
"""Of prompts; a longer prompt takes several passes, between which others sample."""


@dataclass(slots=True, eq=False)
class RunningSequence:
    request: GenerateRequest
    limit: int
    """Maximum tokens to sample."""
    tokens: list[int]
    """Of prompt and answer."""
    adapter: str = ""
    """Name; empty: the base model."""
    row: CacheRow | None = None
    is_stale: bool = False
    """Its row is of older weights."""
    cached_tokens: int = 0
    """Prompt tokens with cached keys and values."""
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[VersionSpan] = field(default_factory=list[VersionSpan])
    num_top: int = 0
    """Most likely tokens to report by sampled token."""
    top: list[MostLikely] = field(default_factory=list[MostLikely])
    stops: StopStrings | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.logprobs)

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.tokens) - self.num_sampled :]

    def add(self, token: int, logprob: float, version: int) -> None:
        place = self.num_sampled
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1].version == version:
            self.versions[-1] = self.versions[-1]._replace(end=place + 1)
        else:
            self.versions.append(VersionSpan(place, place + 1, version))

    def finish_reason(self) -> FinishReason | None:
        if self.tokens[-1] in self.request.sampling.stop_token_ids or self._has_stop_string():
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_sampled >= self.limit else None

    def _has_stop_string(self) -> bool:
        if self.stops is None:
            return False
        return self.stops.is_end(self.tokens[len(self.request.prompt) - self.request.num_answered :])

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            self.request.request_id,
            tuple(self.answer),
            tuple(self.logprobs),
            tuple(self.versions),
            reason,
            cached_tokens=self.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """The next `count` tokens of a sequence."""

    sequence: RunningSequence
    row: CacheRow
    count: int

    @property
    def tokens(self) -> Sequence[int]:
        return self.sequence.tokens[self.row.computed : self.row.computed + self.count]

    @property
    def is_last(self) -> bool:
        """Return whether the pass samples the sequence's next token."""
        return self.row.computed + self.count == len(self.sequence.tokens)


class Scheduler:
    def __init__(self, rows: RowStore, max_running: int, copy_prefix: Callable[[int, int, int], None]) -> None:
        """copy_prefix: (row, other row, number of tokens)."""
        self._rows = rows
        self._max_running = max_running
        self._copy_prefix = copy_prefix
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []
        self.reused_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def has_unstarted(self) -> bool:
        """Return whether a sequence that could run has sampled nothing."""
        return any(not each.num_sampled for each in self._running) or (
            bool(self._waiting) and self._rows.num_free > 0 and len(self._running) < self._max_running
        )

    def sequences(self) -> list[RunningSequence]:
        return [*self._running, *self._waiting]

    def add(self, sequence: RunningSequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: RunningSequence) -> None:
        """Remove a sequence; keep its row if of the current weights."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        row, sequence.row = sequence.row, None
        if row is None:
            return
        if sequence.is_stale:
            self._rows.free(row)
        else:
            self._rows.keep(row, sequence.tokens)

    def plan(self) -> list[PlannedChunk]:
        """Start waiting sequences and choose the next pass's tokens."""
        self._start_waiting()
        left, chunks = MAX_TOKENS_PER_PASS, list[PlannedChunk]()
        for sequence in self._running:
            assert sequence.row is not None
            count = len(sequence.tokens) - sequence.row.computed
            if count > 1:
                count = min(count, left)
                left -= count
            if count:
                chunks.append(PlannedChunk(sequence, sequence.row, count))
        return chunks

    def change_weights(self, *, recompute: bool, adapter: str | None = None) -> None:
        """Hide rows of older weights, or of an adapter's, from new prompts.

        recompute: restart running sequences, too.
        """
        self._rows.drop_idle(adapter)
        for sequence in (each for each in self._running if adapter in (None, each.adapter)):
            assert sequence.row is not None
            if recompute:
                sequence.row.computed = 0
            elif sequence.row.computed:
                sequence.is_stale = True
        self._rows.hide(each.row for each in self._running if each.is_stale and each.row is not None)

    def _start_waiting(self) -> None:
        held_back: list[RunningSequence] = []
        while self._waiting and len(self._running) < self._max_running and self._rows.num_free:
            sequence = self._waiting.popleft()
            prompt = array("i", sequence.tokens)
            match = self._rows.find(prompt, sequence.adapter)
            if match is not None and match.length - match.usable >= CHUNK:
                held_back.append(sequence)  # another sequence computes this prefix right now
                continue
            sequence.row, copied = self._rows.take(prompt, match, sequence.adapter)
            if copied and match is not None:
                self._copy_prefix(match.row.number, sequence.row.number, copied)
            sequence.cached_tokens = sequence.row.computed
            self.reused_tokens += sequence.cached_tokens
            self._running.append(sequence)
        self._waiting.extendleft(reversed(held_back))

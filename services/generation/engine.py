"""Interface of engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from offbeat.services.messages.types import Completion, GenerateRequest


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Of a weight update, s."""

    pause_s: float
    """From the pause request until the engine runs again."""
    load_s: float


class SessionCounts(NamedTuple):
    """Counts of episodes that stay in the engine between their turns."""

    waiting: int = 0
    """Episodes whose next turn the engine waits for."""
    continued: int = 0
    """Turns since the start that computed their new tokens alone."""


class KvLoad(NamedTuple):
    """Load of the KV cache; zeros if the engine does not tell."""

    usage: float = 0.0
    """Share that running requests hold, averaged over seconds."""
    preemptions: int = 0
    """Requests since the start that lost keys and values to others."""
    recent_preemptions: int = 0
    """The same, of the last 30 s."""
    tokens: int = 0
    """Tokens that the cache holds."""


class MostLikely(NamedTuple):
    """Most likely tokens of a position, best first."""

    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()


class TopCompletion(NamedTuple):
    """top: by sampled token, under the sampled distribution."""

    completion: Completion
    top: Sequence[MostLikely] = ()


class PromptScores(NamedTuple):
    """Logprobs of a prompt's tokens but the first, and the most likely tokens in their places."""

    logprobs: Sequence[float]
    top: Sequence[MostLikely] = ()


class PolicyEngine(Protocol):
    async def generate(self, request: GenerateRequest, version: int) -> Completion:
        """Sample one turn under `version`; refused requests yield `error`.

        Raises:
            RetryableError: the engine died.
        """
        ...

    async def stage(self, path: Path) -> None:
        """Prepare a version while sampling, as far as possible."""
        ...

    async def load(self, path: Path, version: int) -> LoadTimes:
        """Switch to the staged version; any error but `WeightsRefusedError` leaves the engine unusable."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Let `generate` return the tokens so far, with `FinishReason.ABORT`; ignore unknown ids."""
        ...

    async def sleep(self) -> None:
        """Give up device memory; no request runs until `wake`."""
        ...

    async def wake(self) -> None:
        """Take memory back, with the weights of before and no keys and values."""
        ...

    def session_counts(self) -> SessionCounts: ...

    def kv_load(self) -> KvLoad: ...

    async def check(self) -> None:
        """Raise `RetryableError` if the engine is dead."""
        ...

    def close(self) -> None: ...


class TenantEngine(Protocol):
    """Engine that serves one run after another, or several at once."""

    def salted(self, salt: str) -> PolicyEngine:
        """Return the engine for a run; keys and values of others are not reused."""
        ...

    async def release(self, salt: str) -> None:
        """Free what a run holds that has no more requests."""
        ...

    async def check(self) -> None:
        """Raise `RetryableError` if the engine is dead."""
        ...

    def close(self) -> None: ...

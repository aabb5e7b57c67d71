import math
from collections.abc import Callable, Mapping, Set
from typing import Any, Generic, Protocol

from typing_extensions import TypeVar

from offbeat.envs.dataset.env import last_group
from offbeat.envs.dataset.final_answer import last_boxed
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.sample import GroupSample, RewardSample
from offbeat.services.threads import DaemonThreads, HungError

MAX_HUNG_THREADS = 64
"""Number at which the process is to be replaced."""


SampleT = TypeVar("SampleT", bound=RewardSample | GroupSample, default=RewardSample)
"""An episode, or with values of list[float] a group."""
ValueT = TypeVar("ValueT", bound=float | list[float], default=float)
_SampleT_contra = TypeVar("_SampleT_contra", contravariant=True, default=RewardSample)
_ValueT_co = TypeVar("_ValueT_co", covariant=True, default=float)


class RewardFunction(Protocol[_SampleT_contra, _ValueT_co]):
    """A single attempt, without timeout, retry and cache."""

    async def score(self, sample: _SampleT_contra) -> _ValueT_co:
        """Raises RewardError."""
        ...

    async def close(self) -> None: ...


GroupFunction = RewardFunction[GroupSample, list[float]]
AnyFunction = RewardFunction | GroupFunction


class ThreadedFunction(Generic[SampleT, ValueT]):
    """Synchronous function in threads; one that hangs keeps its thread."""

    def __init__(self, score: Callable[[SampleT], ValueT], *, num_threads: int, timeout_s: float) -> None:
        self._score = score
        self._threads = DaemonThreads(num_threads)
        self._timeout_s = timeout_s

    @property
    def num_hung(self) -> int:
        return self._threads.num_hung

    async def score(self, sample: SampleT) -> ValueT:
        if self.num_hung >= MAX_HUNG_THREADS:
            raise RewardError(Failure.TIMEOUT, f"{self.num_hung} earlier calls hang")
        try:
            return await self._threads.run(lambda: self._score(sample), self._timeout_s)
        except HungError as error:
            raise RewardError(Failure.TIMEOUT, f"not over in {self._timeout_s:g} s") from error

    async def close(self) -> None:
        self._threads.close()


def count_hung(function: object) -> int:
    """Return the threads whose call timed out and has not returned."""
    return function.num_hung if isinstance(function, ThreadedFunction) else 0


def require_truth(sample: RewardSample) -> Any:
    """Return the ground truth; raises RewardError without any."""
    if sample.ground_truth is None:
        raise RewardError(Failure.BAD_ROW, "the row has no ground_truth")
    return sample.ground_truth


def find_answer(text: str, pattern: str | None) -> str | None:
    r"""Return the last `\boxed{}`, else a pattern's last match, or None."""
    boxed = last_boxed(text)
    return last_group(pattern, text) if boxed is None and pattern is not None else boxed


def read_number(value: Any, source: str) -> float:
    """Return a finite number, also of a bool; raises RewardError."""
    try:
        if isinstance(value, str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RewardError(Failure.MALFORMED, f"{source}: expected a number, got {repr(value)[:80]}") from None
    if not math.isfinite(number):
        raise RewardError(Failure.MALFORMED, f"{source}: the score is {number}")
    return number


def read_numbers(value: Any, count: int, source: str) -> list[float]:
    """Return as many finite numbers as a group has members; raises RewardError."""
    expected = f"{source}: expected a list of {count} numbers, one for each member"
    is_list = hasattr(value, "__len__") and hasattr(value, "__iter__")  # also an array or a tensor
    if not is_list or isinstance(value, str | bytes | Mapping | Set):  # neither is in the group's order
        raise RewardError(Failure.MALFORMED, f"{expected}, got {repr(value)[:80]}")
    if len(value) != count:
        raise RewardError(Failure.MALFORMED, f"{expected}, got {len(value)}")
    return [read_number(each, f"{source}[{place}]") for place, each in enumerate(value)]

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.services.reward import caller as module
from offbeat.services.reward.caller import RewardCaller
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.sample import RewardSample
from tests.services.reward.samples import config_of, sample


class Script:
    """Function with given answers, and a count of its calls."""

    def __init__(self, *answers: float | Exception | Callable[[], Any]) -> None:
        self._answers = list(answers)
        self.num_calls = self.num_running = self.most_running = 0

    async def score(self, sample: RewardSample) -> float:
        del sample
        self.num_calls += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0.01)
            if callable(answer):
                return await answer()
        finally:
            self.num_running -= 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None: ...


def caller_of(function: Script, **settings: Any) -> RewardCaller:
    return RewardCaller(config_of("regex", pattern="a", **settings), function)


async def test_attempts_are_repeated_until_one_gives_a_score():
    function = Script(RewardError(Failure.MALFORMED, "?"), RewardError(Failure.UNAVAILABLE, "busy"), 0.5)
    caller = caller_of(function)
    assert await caller.score(sample("a")) == 0.5
    assert function.num_calls == 3
    assert caller.failures == {"reward_malformed": 1, "reward_unavailable": 1}


async def test_the_last_attempts_failure_names_the_reward():
    function = Script(RewardError(Failure.MALFORMED, "no score"))
    caller = caller_of(function, max_attempts=2)
    with pytest.raises(RewardError, match="reward_malformed: reward r: no score"):
        await caller.score(sample("a"))
    assert function.num_calls == 2


async def test_an_unavailable_service_is_retried_for_a_time(monkeypatch: pytest.MonkeyPatch):
    now_s = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    function = Script(RewardError(Failure.UNAVAILABLE, "down"))
    with pytest.raises(RewardError, match="down"):
        await caller_of(function, max_attempts=1, max_retry_s=0.5).score(sample("a"))
    assert function.num_calls == 3
    assert 0.3 <= now_s <= 0.5


@pytest.mark.parametrize("failure", [Failure.ERROR, Failure.BAD_ROW])
async def test_what_no_attempt_mends_is_tried_once(failure: Failure):
    function = Script(RewardError(failure, "no"))
    with pytest.raises(RewardError):
        await caller_of(function).score(sample("a"))
    assert function.num_calls == 1


async def test_a_hanging_attempt_is_cancelled():
    function = Script(asyncio.Event().wait)
    with pytest.raises(RewardError) as raised:
        await caller_of(function, timeout_s=0.05, max_attempts=2).score(sample("a"))
    assert raised.value.failure is Failure.TIMEOUT
    assert (function.num_calls, function.num_running) == (2, 0)


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), ValueError("oops"), TimeoutError()])
async def test_what_is_no_finite_number_is_no_score(answer: float | Exception):
    with pytest.raises(RewardError):
        await caller_of(Script(answer), max_attempts=1).score(sample("a"))


async def test_more_callers_than_places_wait():
    function = Script(1.0)
    caller = caller_of(function, max_concurrent=3)
    assert await asyncio.gather(*(caller.score(sample(str(i))) for i in range(10))) == [1.0] * 10
    assert function.most_running == 3


async def test_equal_samples_share_a_call():
    function = Script(0.25)
    caller = caller_of(function, cache_size=2)
    same = [sample("a", row={"x": [1], "y": 2}), sample("a", row={"y": 2, "x": [1]})]
    assert await asyncio.gather(*(caller.score(each) for each in same)) == [0.25, 0.25]
    assert await caller.score(same[0]) == 0.25
    assert function.num_calls == 1
    for response in ("b", "c"):  # the oldest of more than two is forgotten
        await caller.score(sample(response))
    assert function.num_calls == 3
    assert await caller.score(sample("a", truth=1)) == 0.25
    assert function.num_calls == 4


async def test_failures_are_not_cached():
    function = Script(RewardError(Failure.ERROR, "once"), 1.0)
    caller = caller_of(function, cache_size=2)
    with pytest.raises(RewardError):
        await caller.score(sample("a"))
    assert await caller.score(sample("a")) == 1.0


async def test_a_cancelled_caller_leaves_the_call_to_others():
    function = Script(1.0)
    caller = caller_of(function, cache_size=2)
    first, second = (asyncio.create_task(caller.score(sample("a"))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1.0
    assert (function.num_calls, first.cancelled()) == (1, True)


async def test_a_sample_without_encoding_fails_its_row():
    with pytest.raises(RewardError) as raised:
        await caller_of(Script(1.0), cache_size=1).score(sample("a", row={"x": object()}))
    assert raised.value.failure is Failure.BAD_ROW

import asyncio
import threading
import time

import pytest

from offbeat.services.reward.caller import RewardCaller
from offbeat.services.reward.client import ServedReward
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.factory import make_scorer
from offbeat.services.reward.function import ThreadedFunction
from offbeat.services.reward.sample import RewardSample
from tests.services.reward.samples import config_of, sample, score


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"So \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"<think>\boxed{3}</think> It is \boxed{12}", 12, 1.0),
        (r"<think>It is \boxed{12}</think> I don't know", "12", 0.0),
        (r"<think>It is \boxed{12}", "12", 0.0),
        (r"\boxed{12} or \boxed{13}", "12", 0.0),
        (r"\boxed{12, 13}", "12", 0.0),
        (r"\boxed{", "12", 0.0),
        (r"\boxed{0.00001}", 1e-05, 1.0),
        (r"\boxed{10^{-5}}", 1e-05, 1.0),
        (r"\boxed{10000000000000000}", 1e16, 1.0),
        (r"\boxed{0.00002}", 1e-05, 0.0),
        ("", "12", 0.0),
        ("12", "12", 0.0),
    ],
)
def test_the_last_box_after_the_thoughts_counts(response: str, truth: object, expected: float):
    assert score("math_rule", response, truth) == expected


def test_a_pattern_finds_answers_without_a_box():
    settings = {"answer_pattern": r"####\s*(.*)$"}
    assert score("math_rule", "2 + 2\n#### 4", "4", **settings) == 1.0
    assert score("math_rule", "2 + 2\n#### 5", "4", **settings) == 0.0


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^{9}}}", "10**10**10", r"\int_0^1 " * 40, r"\frac{1}{" * 30, "1" * 200, "((((" * 50]
)
def test_an_answer_too_costly_to_evaluate_is_wrong_at_once(answer: str):
    began = time.monotonic()
    assert score("math_rule", rf"\boxed{{{answer}}}", "7") == 0.0
    assert time.monotonic() - began < 20


async def test_answers_wait_for_a_costly_one_outside_of_their_time(monkeypatch: pytest.MonkeyPatch):
    """One process makes the comparisons, whatever the number of threads; nothing else takes time."""
    process, now_s = threading.Lock(), 0.0

    def compare(_: RewardSample) -> float:
        nonlocal now_s
        with process:
            now_s += 0.05
        return 1.0

    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    config = config_of("math_rule", timeout_s=2.0, max_attempts=1)
    function = ThreadedFunction(compare, num_threads=config.max_concurrent, timeout_s=config.timeout_s)
    caller = RewardCaller(config, function)
    assert await asyncio.gather(*(caller.score(sample(str(number))) for number in range(50))) == [1.0] * 50
    await caller.close()


def test_a_row_without_ground_truth_is_no_zero():
    with pytest.raises(RewardError, match="no ground_truth") as raised:
        score("math_rule", r"\boxed{1}", None)
    assert raised.value.failure is Failure.BAD_ROW


async def test_each_replica_has_a_call_of_a_worker(monkeypatch: pytest.MonkeyPatch):
    config = RewardsConfig(rewards=(config_of("math_rule", num_replicas=3),))
    running, most = 0, 0

    async def answer(_: ServedReward, __: RewardSample) -> float:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    monkeypatch.setattr(ServedReward, "score", answer)
    scorer = make_scorer(config, run_id="r")
    await asyncio.gather(*(scorer.score_one(config.rewards[0].name, sample(str(number))) for number in range(12)))
    await scorer.close()
    assert most == 3

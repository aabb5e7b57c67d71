from typing import Any

import pytest
from pydantic import ValidationError

from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.errors import RewardError
from offbeat.services.reward.factory import make_scorer
from tests.services.reward.samples import sample

FUNCTIONS = "tests.services.reward.functions"
HAS_A = {"name": "has_a", "kind": "regex", "pattern": "a"}
HAS_B = {"name": "has_b", "kind": "regex", "pattern": "b"}
LENGTH = {"name": "length", "kind": "function", "path": f"{FUNCTIONS}:length"}


def rewards(*entries: dict[str, Any], **settings: Any) -> RewardsConfig:
    return RewardsConfig.model_validate({"rewards": entries, **settings}, strict=False)


async def score(config: RewardsConfig, response: str, tag: str = "") -> tuple[dict[str, float], float]:
    scorer = make_scorer(config, local=True)
    try:
        values = await scorer.score(sample(response, tag=tag))
        return values, scorer.combine(values)
    finally:
        await scorer.close()


async def test_rewards_stay_apart_and_their_weighted_sum_is_the_score():
    config = rewards({**HAS_A, "weight": 2.0}, {**LENGTH, "weight": -0.5})
    assert await score(config, "abc") == ({"has_a": 1.0, "length": 3.0}, 0.5)


async def test_a_product_needs_all():
    config = rewards(HAS_A, LENGTH, combine="product")
    assert (await score(config, "abc"))[1] == 3.0
    assert (await score(config, "xyz"))[1] == 0.0


async def test_a_gate_is_a_condition_and_no_summand():
    config = rewards({**HAS_A, "threshold": 0.5}, {**LENGTH, "weight": 2.0}, combine="gate")
    assert await score(config, "abc") == ({"has_a": 1.0, "length": 3.0}, 6.0)
    assert await score(config, "xyz") == ({"has_a": 0.0, "length": 3.0}, 0.0)
    only_gates = rewards({**HAS_A, "threshold": 0.5}, combine="gate")
    assert (await score(only_gates, "a"))[1] == 1.0


async def test_a_tags_rewards_alone_are_called():
    config = rewards({**HAS_A, "tags": ["x", "y"]}, {**HAS_B, "tags": ["y"]})
    assert await score(config, "ab", "x") == ({"has_a": 1.0}, 1.0)
    assert await score(config, "ab", "y") == ({"has_a": 1.0, "has_b": 1.0}, 2.0)
    with pytest.raises(RewardError, match="no_reward: no reward scores tag 'z'"):
        await score(config, "ab", "z")


async def test_a_failed_reward_fails_the_sample():
    config = rewards(HAS_A, {"name": "bad", "kind": "function", "path": f"{FUNCTIONS}:fail"})
    scorer = make_scorer(config)
    with pytest.raises(RewardError, match=r"reward_error: reward bad: .*raised KeyError"):
        await scorer.score(sample("a"))
    await scorer.close()


@pytest.mark.parametrize(
    ("entries", "settings", "message"),
    [
        ([HAS_A, HAS_A], {}, "'has_a' occurs twice"),
        ([HAS_A], {"combine": "gate"}, "needs a reward with a threshold"),
        ([{**HAS_A, "threshold": 0.5}], {}, "needs combine: gate"),
        ([{**HAS_A, "weight": 2.0}], {"combine": "product"}, "has no effect with combine: product"),
        ([], {}, "name at least one"),
        ([{"name": "a", "kind": "maths"}], {}, "expected tags"),
        ([{"name": "a b", "kind": "ifeval"}], {}, "match pattern"),
        ([{**HAS_A, "patern": "a"}], {}, "not permitted"),
    ],
)
def test_configurations_without_sense_are_refused(entries: list[Any], settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        rewards(*entries, **settings)


def test_every_tag_needs_a_reward_and_every_rewards_tag_exists():
    config = rewards({**HAS_A, "tags": ["x"]})
    config.check_tags(["x"])
    with pytest.raises(ValueError, match="no reward scores tag 'y'"):
        config.check_tags(["x", "y"])
    with pytest.raises(ValueError, match="there is no tag 'x'; there is y"):
        rewards({**HAS_A, "tags": ["x"]}, HAS_B).check_tags(["y"])

"""Values of a group's members: win rates, pairs, ranks, and functions of a whole group."""

from collections import Counter
from typing import Any

import pytest

from offbeat.services.reward.comparison import draw_pairs, win_rates
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.factory import build_group_function, make_scorer
from offbeat.services.reward.kinds.group_verdicts import share_beaten, shuffle
from offbeat.services.reward.sample import GroupSample, as_member, decode_group, decode_member, encode_sample
from tests.services.reward.samples import config_of, group_of, sample

FUNCTIONS = "tests.services.reward.functions"
SHORT = {"name": "short", "kind": "function", "scope": "group", "path": f"{FUNCTIONS}:shortness"}
GAP = {"name": "gap", "kind": "function", "scope": "group", "path": f"{FUNCTIONS}:gap_to_best"}
LENGTH = {"name": "length", "kind": "function", "path": f"{FUNCTIONS}:length"}


def rewards(*entries: dict[str, Any], **settings: Any) -> RewardsConfig:
    return RewardsConfig.model_validate({"rewards": entries, **settings}, strict=False)


async def compare(config: RewardsConfig, group: GroupSample) -> list[dict[str, float]]:
    scorer = make_scorer(config, local=True)
    try:
        return await scorer.score_group(group)
    finally:
        await scorer.close()


def test_a_win_rate_is_the_mean_of_a_members_comparisons():
    assert win_rates(3, {(0, 1): 1.0, (0, 2): 1.0, (1, 2): 0.0}) == [1.0, 0.0, 0.5]
    assert win_rates(3, {(0, 1): 0.5, (0, 2): 0.5, (1, 2): 0.5}) == [0.5, 0.5, 0.5]
    assert win_rates(2, {(1, 0): 0.75}) == [0.25, 0.75]
    everyone = {pair: 0.25 * (sum(pair) % 5) for pair in draw_pairs(6, None, 0)}
    assert sum(win_rates(6, everyone)) == pytest.approx(6 / 2), "what one wins, another loses"


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("num_partners", [1, 2, 3, 4, None])
def test_each_member_has_as_many_partners_as_told(count: int, num_partners: int | None):
    pairs = draw_pairs(count, num_partners, seed=7)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs), "no pair twice"
    assert all(one != other for one, other in pairs)
    partners = Counter(member for pair in pairs for member in pair)
    wanted = min(num_partners or count, count - 1)
    assert sorted(partners) == list(range(count))
    extra = count % 2 and wanted % 2  # half a pair too few
    assert sorted(partners.values()) == [wanted] * (count - extra) + [wanted + 1] * extra


def test_partners_follow_from_the_groups_number():
    assert draw_pairs(8, 2, seed=3) == draw_pairs(8, 2, seed=3)
    assert len({tuple(draw_pairs(8, 2, seed=number)) for number in range(20)}) == 20
    assert draw_pairs(3, None, 1) == draw_pairs(3, 2, 5) == [(0, 1), (0, 2), (1, 2)]


def test_a_rank_is_worth_the_share_of_the_others_that_it_beats():
    assert share_beaten([[2], [1], [3]]) == {2: 1.0, 1: 0.5, 3: 0.0}
    assert share_beaten([[1, 2, 3]]) == {1: 0.5, 2: 0.5, 3: 0.5}
    assert share_beaten([[4], [1, 2], [3]]) == {4: 1.0, 1: 0.5, 2: 0.5, 3: 0.0}
    assert share_beaten([[1, 2], [3]]) == {1: 0.75, 2: 0.75, 3: 0.0}


def test_a_shuffle_is_a_permutation_that_the_seed_decides():
    assert sorted(shuffle(6, 3)) == list(range(6))
    assert shuffle(6, 3) == shuffle(6, 3)
    assert len({tuple(shuffle(6, seed)) for seed in range(20)}) > 15


async def test_a_function_gives_each_member_a_number():
    config = rewards({**SHORT, "args": {"scale": 2.0}}, LENGTH, GAP)
    values = await compare(config, group_of("ab", "abcd"))
    assert values == [{"short": 1.0, "gap": -2.0}, {"short": 0.5, "gap": 0.0}]


async def test_a_function_sees_the_own_reward_and_a_group_of_one():
    better = GroupSample([as_member(sample("a"), {}, 3.0), as_member(sample("b"), {}, 1.0)])
    assert await compare(rewards(GAP), better) == [{"gap": 0.0}, {"gap": -2.0}]
    assert await compare(rewards(SHORT), group_of("ab")) == [{"short": 0.5}]


async def test_a_tags_rewards_alone_compare_its_groups():
    config = rewards({**SHORT, "tags": ["x"]}, {**GAP, "tags": ["y"]})
    assert await compare(config, group_of("ab", tag="x")) == [{"short": 0.5}]
    assert await compare(config, group_of("ab", tag="y")) == [{"gap": 0.0}]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("few", "expected a list of 2 numbers, one for each member, got 1"),
        ("number", "expected a list of 2 numbers, one for each member, got 1.0"),
        ("text", "expected a list of 2 numbers, one for each member, got 'ab'"),
        ("mapping", "expected a list of 2 numbers, one for each member, got {0: 0.5, 1: 0.25}"),
        ("set", "expected a list of 2 numbers, one for each member, got {"),
        ("nan", r"answers_of_group\[1\]: the score is nan"),
    ],
)
async def test_another_result_of_a_function_is_a_failure(first: str, message: str):
    config = rewards({**SHORT, "path": f"{FUNCTIONS}:answers_of_group"})
    with pytest.raises(RewardError, match=message) as raised:
        await compare(config, group_of(first, "b"))
    assert raised.value.failure is Failure.ERROR


async def test_scores_of_episodes_leave_out_what_compares_them():
    scorer = make_scorer(rewards(SHORT, LENGTH), local=True)
    assert (scorer.names("x"), scorer.group_names("x")) == (["length"], ["short"])
    assert await scorer.score(sample("abc")) == {"length": 3.0}
    await scorer.close()
    scorer = make_scorer(rewards(SHORT), local=True)
    assert await scorer.score(sample("abc")) == {}
    assert scorer.combine({}) == 0.0
    await scorer.close()


@pytest.mark.parametrize(
    ("settings", "combine", "expected"),
    [({"weight": 2.0}, "weighted", 3.0 + 2 * 0.5), ({}, "product", 1.5), ({"threshold": 0.6}, "gate", 0.0)],
)
def test_values_of_both_scopes_are_combined(settings: dict[str, Any], combine: str, expected: float):
    scorer = make_scorer(rewards({**SHORT, **settings}, LENGTH, combine=combine), local=True)
    assert scorer.combine({"length": 3.0, "short": 0.5}) == expected


def test_samples_of_a_group_travel_unchanged():
    group = group_of("a", "b", seed=4, truth="t", tag="x", row={"k": [1, 2]})
    assert decode_group(encode_sample(group)) == group
    assert decode_member(encode_sample(group.members[0])) == group.members[0]


def test_what_comes_after_a_shared_prompt_is_part_of_the_answer():
    def member(*texts: str):
        roles = ("user", "assistant")
        prompt = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts[:-1])]
        return as_member(sample("<think>hm</think>" + texts[-1]).__class__(prompt, texts[-1]), {}, 0.0)

    group = GroupSample([member("Q", "one", "why", "A"), member("Q", "two", "how", "B")])
    assert group.prompt == [{"role": "user", "content": "Q"}]
    assert group.answers[0] == "[assistant]\none\n\n[user]\nwhy\n\n[assistant]\nA"
    assert group_of("<think>x</think>a", "b").answers == ["a", "b"]


def test_other_kinds_compare_no_groups():
    with pytest.raises(ValueError, match="regex has no scope: group"):
        build_group_function(config_of("regex", pattern="a"))

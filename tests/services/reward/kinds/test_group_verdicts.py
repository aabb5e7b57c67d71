"""Judges that compare the answers of a group, behind a real HTTP server that reads the question."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from pydantic import ValidationError

from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.factory import make_scorer
from tests.services.reward.kinds.conftest import Service
from tests.services.reward.kinds.test_llm_judge import chat
from tests.services.reward.samples import ADAPTER, group_of

API = {"name": "better", "kind": "llm_judge", "scope": "group", "url": "http://a/v1", "model": "m"}


def shown(prompt: str, name: str = r"response_[ab]|response-\d+") -> list[str]:
    """The answers of a question, in their order."""
    return [match[2] for match in re.finditer(rf"<((?:{name})-[0-9a-f]{{8}})>\n(.*?)\n</\1>", prompt, re.DOTALL)]


def prefers(key: Callable[[str], float]) -> Callable[[str], str]:
    """The verdict about a question's answers by a number of each; equal ones tie."""

    def verdict(prompt: str) -> str:
        values = [key(text) for text in shown(prompt)]
        if "Ranking:" not in prompt:
            winner = "TIE" if values[0] == values[1] else "AB"[values[1] > values[0]]
            return f"Well.\nVerdict: {winner}"
        order = sorted(range(len(values)), key=lambda place: -values[place])
        text = str(order[0] + 1)
        for before, place in pairwise(order):
            text += f" {'=' if values[before] == values[place] else '>'} {place + 1}"
        return f"Ranking: {text}"

    return verdict


async def judge(service: Service, verdict: Callable[[str], str], *responses: str, seed: int = 0, **settings: Any):
    service.answer = lambda body: chat(verdict(body["messages"][-1]["content"]))
    entry = {**API, "url": service.url.removesuffix("/score") + "/v1", **settings}
    config = RewardsConfig.model_validate({"rewards": [entry]}, strict=False)
    scorer = make_scorer(config, local=True)
    try:
        values = await scorer.score_group(group_of(*responses, seed=seed))
        return [each["better"] for each in values], scorer.take_failures()
    finally:
        await scorer.close()


def asked(service: Service) -> set[str]:
    """The different questions: a call whose connection was lost under load is repeated."""
    return {request["messages"][-1]["content"] for request in service.requests}


async def test_pairs_give_win_rates(service: Service):
    rates, failures = await judge(service, prefers(len), "a", "ccc", "bb", "dd")
    assert rates == [0.0, 1.0, 0.5, 0.5]
    assert "better/reward_malformed" not in failures
    assert len(asked(service)) == 2 * 6, "each pair in both orders"


async def test_a_judge_of_the_first_place_finds_all_equal(service: Service):
    rates, _ = await judge(service, lambda _: "Verdict: A", "a", "bb", "ccc")
    assert rates == [0.5, 0.5, 0.5]


async def test_equal_answers_tie_without_a_call(service: Service):
    rates, _ = await judge(service, prefers(len), "a", "a", "bb")
    assert rates == [0.25, 0.25, 1.0]
    assert len(asked(service)) == 2, "of the pairs with bb, one is judged and the other is equal to it"


async def test_partners_bound_the_calls(service: Service):
    responses = [letter * n for n, letter in enumerate("abcdefgh", start=1)]
    rates, _ = await judge(service, prefers(len), *responses, num_partners=2, seed=3)
    assert len(asked(service)) == 2 * 8
    assert (rates[0], rates[-1]) == (0.0, 1.0)
    assert {*rates} <= {0.0, 0.5, 1.0}
    assert rates == (await judge(service, prefers(len), *responses, num_partners=2, seed=3))[0]


@pytest.mark.parametrize("seed", range(4))
async def test_a_ranking_is_read_back_whatever_the_order_shown(service: Service, seed: int):
    rates, _ = await judge(service, prefers(len), "a", "dddd", "bb", "ccc", "eeeee", compare="ranking", seed=seed)
    assert rates == [0.0, 0.75, 0.25, 0.5, 1.0]
    assert len(asked(service)) == 1


async def test_the_order_shown_is_that_of_the_seed(service: Service):
    orders = {}
    for seed in (1, 1, 2, 3):
        await judge(service, prefers(len), "a", "bb", "ccc", "dddd", compare="ranking", seed=seed)
        order = shown(service.requests[-1]["messages"][-1]["content"])
        assert orders.setdefault(seed, order) == order
    assert len({tuple(each) for each in orders.values()}) > 1


async def test_ranks_may_be_equal(service: Service):
    rates, _ = await judge(service, lambda _: "**Ranking: 1 = 2 = 3.**", "a", "b", "c", compare="ranking")
    assert rates == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    "answer",
    [
        "Ranking: 1 > 2",
        "Ranking: 1 > 2 > 2",
        "Ranking: 1 > 2 > 3 > 4",
        "Ranking: 0 > 1 > 2",
        "Ranking: 1, 2, 3",
        "1 > 2 > 3",
        "Ranking: 1 > 2 > 3\nGood luck!",
        "Ranking: 1 > 2 >",
    ],
)
async def test_another_form_of_a_ranking_is_a_failure(service: Service, answer: str):
    with pytest.raises(RewardError) as raised:
        await judge(service, lambda _: answer, "a", "b", "c", compare="ranking", max_attempts=2)
    assert raised.value.failure is Failure.MALFORMED
    assert len(service.requests) == 2


async def test_a_malformed_verdict_is_asked_again_alone(service: Service):
    answers = iter(["hm", *["Verdict: TIE"] * 20])
    rates, failures = await judge(service, lambda _: next(answers), "a", "b", "c")
    assert rates == [0.5, 0.5, 0.5]
    assert failures == {"better/reward_malformed": 1}
    assert len(service.requests) <= 2 * 3 + 2


async def test_one_answer_alone_is_compared_with_none(service: Service):
    for compare in ("pairs", "ranking"):
        assert await judge(service, prefers(len), "a", compare=compare) == ([0.5], {})
    assert service.requests == []


async def test_a_template_is_filled(service: Service):
    template = "Asked: {prompt}\nBest of {responses}? Reference: {ground_truth}"
    await judge(service, prefers(len), "aa", "b", compare="ranking", template=template, seed=1)
    prompt = service.requests[-1]["messages"][-1]["content"]
    assert sorted(shown(prompt)) == ["aa", "b"]
    assert "Why?" in prompt
    assert "(none)" in prompt


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "{response}"}, r"template has no \{response_a\}"),
        ({"template": "{responses}"}, r"template has no \{response_a\}"),
        ({"compare": "ranking", "template": "{response_a} {response_b}"}, r"template has no \{responses\}"),
        ({"verdict": "yes_no"}, "verdict has no effect with scope: group"),
        ({"max_score": 5}, "max_score has no effect with scope: group"),
        ({"compare": "ranking", "num_partners": 2}, "num_partners has no effect with compare: ranking"),
        ({"num_partners": 0}, "greater than or equal to 1"),
        ({"scope": "episode", "compare": "ranking"}, "compare has no effect with scope: episode"),
        ({"scope": "episode", "num_partners": 2}, "num_partners has no effect with scope: episode"),
        ({"scope": "all"}, "'episode' or 'group'"),
    ],
)
def test_settings_without_an_effect_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        ADAPTER.validate_python({**API, **settings}, strict=False)

"""Verdicts of a judge that compares the members of a group: form of its answer, and a value for each member.

Invariant: a value is the share of the other answers that the member beats, a tie counting half.
"""

import random
import re
from collections.abc import Sequence

from offbeat.services.reward.kinds.judge_verdicts import (
    DATA_NOTE,
    Question,
    Verdict,
    ask_in_both_orders,
    describe,
    fill,
    last_line,
    malformed,
    pair_template,
    read_winner,
)
from offbeat.services.reward.kinds.model_config import LlmJudgeConfig
from offbeat.services.reward.sample import GroupSample

RANKING_QUESTION = """Compare answers to a conversation.

Conversation:
{prompt}

Answers:
{responses}

Which answers are better: more correct, complete and helpful?"""


def build_group_verdict(config: LlmJudgeConfig) -> Verdict[GroupSample, list[float]]:
    return PairVerdict(config) if config.compare == "pairs" else RankingVerdict(config)


class PairVerdict:
    """Verdict about a group of two, asked in both orders."""

    def __init__(self, config: LlmJudgeConfig) -> None:
        self._template = pair_template(config)

    def ask(self, sample: GroupSample) -> Sequence[Question]:
        one, other = sample.answers
        return ask_in_both_orders(self._template, describe(sample.prompt, sample.members[0].ground_truth), one, other)

    def read(self, answer: str, question: Question, sample: GroupSample) -> list[float]:
        del sample
        first = read_winner(answer, question)
        return [first, 1.0 - first]


class RankingVerdict:
    """Ranking of all members in one answer, shown in an order that the sample's seed decides."""

    def __init__(self, config: LlmJudgeConfig) -> None:
        how = (
            "The answers are numbered from 1. End with a line of its own, `Ranking: ` and the numbers of all answers from "
            "the best to the worst, with `>` between two of them, or `=` if they are equally good, as in "
            "`Ranking: 2 > 1 = 3`."
        )
        self._template = f"{config.template or RANKING_QUESTION}\n\n{DATA_NOTE} {how}"

    def ask(self, sample: GroupSample) -> Sequence[Question]:
        answers = sample.answers
        shown = [answers[place] for place in shuffle(len(answers), sample.seed)]
        fields = describe(sample.prompt, sample.members[0].ground_truth)
        return [Question(fill(self._template, {**fields, "responses": shown}))]

    def read(self, answer: str, question: Question, sample: GroupSample) -> list[float]:
        del question
        order = shuffle(len(sample.members), sample.seed)
        listed = last_line(answer, r"ranking: *(\d+(?: *[>=] *\d+)*)", "Ranking: 2 > 1 = 3")
        tiers = [[int(number) for number in re.findall(r"\d+", tier)] for tier in listed.split(">")]
        if sorted(number for tier in tiers for number in tier) != list(range(1, len(order) + 1)):
            raise malformed(f"it does not rank each of the answers 1 to {len(order)} once", answer)
        shown = share_beaten(tiers)
        values = [0.0] * len(order)
        for number, place in enumerate(order, start=1):
            values[place] = shown[number]
        return values


def shuffle(count: int, seed: int) -> list[int]:
    """Return the order in which a group's members are shown: their places, shuffled."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def share_beaten(tiers: Sequence[Sequence[int]]) -> dict[int, float]:
    """Return the share of the others that each beats, a tie counting half. tiers: from the best."""
    count = sum(len(tier) for tier in tiers)
    values: dict[int, float] = {}
    num_worse = count
    for tier in tiers:
        num_worse -= len(tier)
        values.update(dict.fromkeys(tier, (num_worse + (len(tier) - 1) / 2) / (count - 1)))
    return values

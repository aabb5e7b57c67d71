"""Judges whose model is an engine of the mesh: every form of verdict, and answers that are none."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.generation.config import EngineStrategy, GenerationConfig
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.kinds.judge_model import judge_arguments
from offbeat.services.reward.kinds.judge_verdicts import build_verdict
from offbeat.services.reward.kinds.llm_judge import LlmJudge
from offbeat.services.reward.kinds.model_config import LlmJudgeConfig
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.services.reward.judge_models import Lesson, write_judge
from tests.services.reward.samples import config_of, sample

pytestmark = pytest.mark.slow

SAMPLE = sample("ours", "theirs", row={"rubric": ["polite"]})
TAUGHT: dict[str, tuple[tuple[str, ...], float]] = {
    "score": (("Score: 7",), 0.7),
    "yes_no": (("Verdict: NO",), 0.0),
    "pairwise": (("Verdict: A", "Verdict: TIE"), 0.75),
    "rubric": (("Criterion 1: 4",), 0.4),
}
"""Verdict -> answer to each of its questions, and the value."""
UNREADABLE = "Compare it yourself {response}"


def judge_config(folder: Path, **settings: Any) -> LlmJudgeConfig:
    own = {"model_args": {"model_name_or_path": str(folder)}, "generating_args": {"max_new_tokens": 8}}
    return config_of("llm_judge", **own, kv_cache_gib=0.25, **settings)


def questions(config: LlmJudgeConfig) -> list[str]:
    return [question.prompt for question in build_verdict(config).ask(SAMPLE)]


def test_an_engines_arguments_are_the_users(tmp_path: Path) -> None:
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=1), ["a"])
    for given, expected in (({}, "auto"), ({"load_format": "runai_streamer", "max_model_len": 64}, "runai_streamer")):
        strategy = EngineStrategy.model_validate({"strategy_config": given})
        arguments = judge_arguments(GenerationConfig(strategy_args=strategy), tmp_path)
        assert (arguments["load_format"], arguments.get("max_model_len")) == (expected, given.get("max_model_len"))


async def test_a_judge_reads_its_own_models_answers(tmp_path: Path) -> None:
    """All judges ask one engine."""
    configs = {verdict: judge_config(tmp_path, verdict=verdict) for verdict in TAUGHT}
    babbling = judge_config(tmp_path, template=UNREADABLE)
    lessons = [Lesson(question, "well well") for question in questions(babbling)]
    for verdict, (answers, _) in TAUGHT.items():
        lessons += map(Lesson, questions(configs[verdict]), answers)
    write_judge(tmp_path, lessons)
    judge = LlmJudge(babbling, build_verdict(babbling))
    await judge.start()
    try:
        with pytest.raises(RewardError, match=r"its last line is not `Score: N`: .*'well well'") as raised:
            await judge.score(SAMPLE)
        assert raised.value.failure is Failure.MALFORMED
        judges = {verdict: LlmJudge(config, build_verdict(config)) for verdict, config in configs.items()}
        for each in judges.values():
            each._client = judge._client
        values = await asyncio.gather(*(each.score(SAMPLE) for each in judges.values()))
        assert dict(zip(judges, values, strict=True)) == {name: value for name, (_, value) in TAUGHT.items()}
        await judge.check()
        with pytest.raises(RewardError, match="more than the judge's context") as raised:
            await judge.score(sample("long " * 3000))
        assert raised.value.failure is Failure.BAD_ROW
    finally:
        await judge.close()

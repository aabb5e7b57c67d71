"""Rewards that can't be built, found before a run starts."""

from collections.abc import Iterator

from offbeat.services.generation.vllm.engine_arguments import engine_argument_names
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.factory import build_function
from offbeat.services.reward.kinds.config import LlmJudgeConfig, RewardModelConfig


def find_problems(config: RewardsConfig) -> Iterator[tuple[int, str]]:
    """Yield index and message of rewards that lack a package, function, token, folder or isolation.

    Imports the user's functions; models are not loaded.
    """
    for index, reward in enumerate(config.rewards):
        folder = reward.model_name_or_path if isinstance(reward, RewardModelConfig | LlmJudgeConfig) else None
        if folder is not None and not (folder / "config.json").is_file():
            yield index, f"no model in {folder}: expected a folder with config.json"
            continue
        if isinstance(reward, RewardModelConfig):
            continue
        if isinstance(reward, LlmJudgeConfig) and (unknown := _unknown_arguments(reward)):
            yield index, f"strategy_config: vLLM has no argument {unknown[0]!r}"
            continue
        try:
            build_function(reward)
        except ValueError as error:
            yield index, str(error)


def _unknown_arguments(judge: LlmJudgeConfig) -> list[str]:
    known = engine_argument_names()
    return [name for name in judge.strategy_config.model_extra or {} if known and name not in known]

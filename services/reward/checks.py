"""Rewards that can't be built, found before a run starts."""

from collections.abc import Iterator

from offbeat.services.generation.vllm.engine_arguments import engine_argument_names
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.factory import build_function, build_group_function
from offbeat.services.reward.kinds.model_config import LlmJudgeConfig, RewardModelConfig


def find_problems(config: RewardsConfig) -> Iterator[tuple[str, str]]:
    """Yield index or `INDEX.KEY`, and message, of rewards that lack a package, function, token, folder or isolation.

    Imports the user's functions; models are not loaded.
    """
    for index, reward in enumerate(config.rewards):
        folder = reward.model_folder if isinstance(reward, RewardModelConfig | LlmJudgeConfig) else None
        if folder is not None and not (folder / "config.json").is_file():
            yield f"{index}.model_args.model_name_or_path", f"no model in {folder}: expected a folder with config.json"
            continue
        if isinstance(reward, RewardModelConfig):
            continue
        if isinstance(reward, LlmJudgeConfig) and (unknown := _unknown_arguments(reward)):
            yield f"{index}.strategy_args.strategy_config.{unknown[0]}", "vLLM has no such engine argument"
            continue
        try:
            (build_group_function if reward.is_of_group else build_function)(reward)
        except (ValueError, OSError) as error:
            yield str(index), str(error)


def _unknown_arguments(judge: LlmJudgeConfig) -> list[str]:
    known = engine_argument_names()
    return [name for name in judge.strategy_args.strategy_config.model_extra or {} if known and name not in known]

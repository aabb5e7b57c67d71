"""Rewards that can't be built, found before a run starts."""

from collections.abc import Iterator

from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.factory import build_function
from offbeat.services.reward.kinds.config import RewardModelConfig


def find_problems(config: RewardsConfig) -> Iterator[tuple[int, str]]:
    """Yield index and message of rewards that lack a package, function, token, folder or isolation.

    Imports the user's functions; models are not loaded.
    """
    for index, reward in enumerate(config.rewards):
        if isinstance(reward, RewardModelConfig):
            if not (reward.model_name_or_path / "config.json").is_file():
                yield index, f"no model in {reward.model_name_or_path}: expected a folder with config.json"
            continue
        try:
            build_function(reward)
        except ValueError as error:
            yield index, str(error)

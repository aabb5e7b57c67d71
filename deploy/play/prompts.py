"""Answers to a dataset's rows without a mesh (`pipeline: rlvr`)."""

from dataclasses import dataclass

from offbeat.deploy.config.run import RunConfig
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import EpisodeKind, Trajectory
from offbeat.services.reward.factory import make_scorer
from offbeat.services.rollout.data.prompts import PromptSource
from offbeat.services.rollout.rewards import EpisodeRewards
from offbeat.services.rollout.tasks import Task


@dataclass(frozen=True, slots=True)
class AnsweredRows:
    """Rows of a run and their rewards, computed in this process."""

    prompts: PromptSource
    rewards: EpisodeRewards | None

    def task(self, kind: EpisodeKind, number: int, group_size: int) -> Task:
        """Return an episode's task; raises ValueError without validation rows."""
        if kind is EpisodeKind.TRAIN:
            return self.prompts.train_task(number // group_size)
        if self.prompts.validation is None:
            raise ValueError("data.val_dataset_name: there are no validation rows: set it, or take --split train")
        return self.prompts.eval_task(number // group_size, greedy=True)

    async def score(self, trajectory: Trajectory, kind: EpisodeKind) -> Trajectory:
        """Raises RewardError."""
        return trajectory if self.rewards is None else await self.rewards.add(trajectory, kind)

    async def close(self) -> None:
        if self.rewards is not None:
            await self.rewards.close()


def open_answered(config: RunConfig, seed: int, chat: ChatFormat) -> AnsweredRows | None:
    """Open a run's rows, on an event loop; None for envs. Raises ValueError."""
    if not config.plays_prompts or config.data is None:
        return None
    train, val = (each.tags_of(config.custom_envs) for each in (config.train_env_manager, config.val_env_manager))
    prompts = PromptSource(config.data, train, val, seed=seed)
    scoring = config.scoring
    if scoring is None:
        return AnsweredRows(prompts, None)
    return AnsweredRows(prompts, EpisodeRewards(scoring, config.data, prompts, make_scorer(scoring, local=True), chat))

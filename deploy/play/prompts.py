"""A run's rows and rewards without a mesh."""

from dataclasses import dataclass

from offbeat.deploy.config.run import RunConfig
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import EpisodeKind
from offbeat.services.reward.factory import make_scorer
from offbeat.services.rollout.data.prompts import PromptSource
from offbeat.services.rollout.rewards import DatasetColumns, EpisodeRewards
from offbeat.services.rollout.tasks import Task


@dataclass(frozen=True, slots=True)
class AnsweredRows:
    """Rows of `pipeline: rlvr`."""

    prompts: PromptSource

    def task(self, kind: EpisodeKind, number: int, group_size: int) -> Task:
        """Return an episode's task; raises ValueError without validation rows."""
        if kind is EpisodeKind.TRAIN:
            return self.prompts.train_task(number // group_size)
        if self.prompts.validation is None:
            raise ValueError("data.val_dataset_name: there are no validation rows: set it, or take --split train")
        return self.prompts.eval_task(number // group_size, greedy=True)


def open_answered(config: RunConfig, seed: int) -> AnsweredRows | None:
    """Open a run's rows; None for envs. Raises ValueError."""
    if not config.plays_prompts or config.data is None:
        return None
    train, val = (each.tags_of(config.custom_envs) for each in (config.train_env_manager, config.val_env_manager))
    return AnsweredRows(PromptSource(config.data, train, val, seed=seed))


def open_rewards(
    config: RunConfig, rows: AnsweredRows | None, chat: ChatFormat, group_size: int
) -> EpisodeRewards | None:
    """Build a run's rewards in this process, on an event loop, for groups of one without those that compare; None without
    any. Raises ValueError.
    """
    scoring = config.scoring
    if scoring is None:
        return None
    columns = None if rows is None or config.data is None else DatasetColumns(config.data, rows.prompts)
    return EpisodeRewards(scoring, make_scorer(scoring, local=True, compares=group_size > 1), chat, columns)

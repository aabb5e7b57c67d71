"""Rewards of finished episodes, between the last token and submit.

Invariant: an episode without a value of each reward of its tag fails by reason, unless an error ended it.
"""

from collections.abc import Mapping

from msgspec import structs

from offbeat.envs.dataset.files import read_field
from offbeat.envs.dataset.prompt import RowPrompt
from offbeat.envs.prompts import ROW_IMAGE
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import EpisodeKind, StopReason, Trajectory
from offbeat.services.reward.config import COLUMN, RewardsConfig
from offbeat.services.reward.function import MAX_HUNG_THREADS
from offbeat.services.reward.kinds.config import RewardConfig
from offbeat.services.reward.sample import RewardSample
from offbeat.services.reward.scorer import RewardScorer
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.prompts import PromptSource

SUCCESS = "success"


class EpisodeRewards:
    def __init__(
        self, config: RewardsConfig, data: DataConfig, prompts: PromptSource, scorer: RewardScorer, chat: ChatFormat
    ) -> None:
        self._config = config
        self._chat = chat
        self._data = data
        self._prompts = prompts
        self._scorer = scorer

    async def add(self, trajectory: Trajectory, kind: EpisodeKind) -> Trajectory:
        """Return a copy with the score on its last turn, and each reward as a metric; unscored without a last answer.

        Raises:
            RewardError: a reward failed.
        """
        if not trajectory.turns:
            return trajectory
        if trajectory.stop_reason is StopReason.ERROR:  # its last answer is what made the env or agent fail
            failure = {SUCCESS: 0.0} if self._first(trajectory.tag).is_share else {}
            return structs.replace(trajectory, metrics={**trajectory.metrics, **failure})
        values = await self._scorer.score(self._sample(trajectory, kind))
        *earlier, last = trajectory.turns
        scored = last._replace(reward=last.reward + self._scorer.combine(values))
        columns = {f"{COLUMN}{name}": value for name, value in values.items()}
        success = self._success(trajectory.tag, values)
        metrics = {**trajectory.metrics, **columns, **({} if success is None else {SUCCESS: success})}
        return structs.replace(trajectory, turns=(*earlier, scored), metrics=metrics)

    @property
    def num_hung(self) -> int:
        return self._scorer.num_hung

    @property
    def is_worn_out(self) -> bool:
        """Return whether hanging threads require a new process."""
        return self.num_hung >= MAX_HUNG_THREADS

    def take_failures(self) -> dict[str, int]:
        """Return and reset the attempts without a value, by `reward/reason`."""
        return self._scorer.take_failures()

    async def close(self) -> None:
        await self._scorer.close()

    def _sample(self, trajectory: Trajectory, kind: EpisodeKind) -> RewardSample:
        system, first, *texts = trajectory.text
        row = self._prompts.row(kind, trajectory.seed)
        stored = self._prompts.prompt(kind, trajectory.seed)
        images = tuple(image.png for image in trajectory.segments[0].images[: stored.num_images])
        if images:
            first = first.replace(self._chat.image_tokens.mark, ROW_IMAGE)
        prompt = RowPrompt(system or None, (*stored.turns[:-1], first, *texts[:-1]), images).messages()
        last, data = trajectory.turns[-1], self._data
        used = (data.messages_key, data.prompt_key, data.images_key, data.ground_truth_key, data.tag_key)
        rest = {key: value for key, value in row.items() if key not in used}
        truth = read_field(row, data.ground_truth_key)
        response = self._chat.opened_thought + texts[-1]
        return RewardSample(prompt, response, last.end - last.start, truth, trajectory.tag, rest)

    def _success(self, tag: str, values: Mapping[str, float]) -> float | None:
        """Return whether the first reward of the tag is 1; None for unbounded values."""
        first = self._first(tag)
        return float(values[first.name] >= 1) if first.is_share else None

    def _first(self, tag: str) -> RewardConfig:
        return self._config.of_tag(tag)[0]

"""Rewards of finished episodes, between the last token and submit.

Invariant: an episode without a value of each reward of its tag fails by reason, unless an error ended it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from offbeat.envs.dataset.files import read_field
from offbeat.envs.registry import GROUND_TRUTH
from offbeat.services.buffer.members import Addition
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import EpisodeKind, StopReason, Trajectory
from offbeat.services.reward.config import COLUMN, RewardsConfig
from offbeat.services.reward.function import MAX_HUNG_THREADS
from offbeat.services.reward.kinds.config import RewardConfig
from offbeat.services.reward.sample import GroupMember, GroupSample, RewardSample, as_member
from offbeat.services.reward.scorer import RewardScorer
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.prompts import PromptSource
from offbeat.services.rollout.episodes.transcript import Transcript

SUCCESS = "success"


class DatasetColumns:
    """Rows that episodes answer, as rewards read them."""

    def __init__(self, config: DataConfig, prompts: PromptSource) -> None:
        self._config = config
        self._prompts = prompts

    def read(self, kind: EpisodeKind, row: int) -> tuple[Any, dict[str, Any]]:
        """Return a row's ground truth, and the columns besides it and the prompt."""
        config = self._config
        content = self._prompts.row(kind, row)
        used = (config.messages_key, config.prompt_key, config.images_key, config.ground_truth_key, config.tag_key)
        return read_field(content, config.ground_truth_key), {k: v for k, v in content.items() if k not in used}


class ScoredEpisode(NamedTuple):
    trajectory: Trajectory
    member: GroupMember | None = None
    """What rewards of its group are to compare before the trajectory has its score; None: it has it."""


class EpisodeRewards:
    def __init__(
        self, config: RewardsConfig, scorer: RewardScorer, chat: ChatFormat, columns: DatasetColumns | None = None
    ) -> None:
        """columns: of the rows that all episodes answer; None: episodes of envs, which may give a row."""
        self._config = config
        self._chat = chat
        self._columns = columns
        self._scorer = scorer

    def begin(self, tag: str) -> Transcript | None:
        """Return what an episode of the tag is to fill for `add`; None: no reward scores it."""
        return Transcript() if self._columns is not None or self._config.of_tag(tag) else None

    async def add(self, trajectory: Trajectory, kind: EpisodeKind, transcript: Transcript) -> ScoredEpisode:
        """Return a copy with the score on its last turn, and each reward as a metric; unscored without a last answer.

        The score of a training episode whose tag has rewards of a group waits for these, which `compare` gives.

        Raises:
            RewardError: a reward failed.
        """
        if not trajectory.turns:
            return ScoredEpisode(trajectory)
        if trajectory.stop_reason is StopReason.ERROR:  # its last answer is what made the env or agent fail
            failure = self._success(trajectory, transcript, {})
            return ScoredEpisode(structs.replace(trajectory, metrics={**trajectory.metrics, **failure}))
        sample = self._sample(trajectory, kind, transcript)
        values = await self._scorer.score(sample)
        metrics = {**trajectory.metrics, **_columns(values), **self._success(trajectory, transcript, values)}
        if kind is EpisodeKind.TRAIN and self._scorer.group_names(trajectory.tag):
            member = as_member(sample, values, trajectory.reward)
            return ScoredEpisode(structs.replace(trajectory, metrics=metrics), member)
        *earlier, last = trajectory.turns
        scored = last._replace(reward=last.reward + self._scorer.combine(values))
        return ScoredEpisode(structs.replace(trajectory, turns=(*earlier, scored), metrics=metrics))

    async def compare(self, members: Sequence[GroupMember], number: int) -> list[Addition]:
        """Return what each member's trajectory lacks: the whole score, and the group's rewards as metrics.

        number: of the group, which seeds what is random.

        Raises:
            RewardError: a reward failed.
        """
        compared = await self._scorer.score_group(GroupSample(members, number))
        return [
            Addition(self._scorer.combine({**member.rewards, **values}), _columns(values))
            for member, values in zip(members, compared, strict=True)
        ]

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

    def _sample(self, trajectory: Trajectory, kind: EpisodeKind, transcript: Transcript) -> RewardSample:
        last = trajectory.turns[-1]
        response = (self._chat.opened_thought if transcript.is_chat else "") + transcript.response
        if self._columns is not None:
            truth, row = self._columns.read(kind, trajectory.seed)
        else:
            row = {key: value for key, value in transcript.row.items() if key != GROUND_TRUTH}
            truth = transcript.row.get(GROUND_TRUTH)
        return RewardSample(transcript.prompt, response, last.end - last.start, truth, trajectory.tag, row)

    def _success(self, trajectory: Trajectory, transcript: Transcript, values: Mapping[str, float]) -> dict[str, float]:
        """Return whether the tag's first reward is 1, if its values are bounded; an env's own success counts before it.

        An env may report success at its end alone, so that an episode which did not get there has none but the env's.
        """
        first = self._first(trajectory.tag)
        is_cut = trajectory.stop_reason is not StopReason.TERMINATED or transcript.has_left_env
        is_bounded = first.is_share and not first.is_of_group
        is_envs = self._columns is None and (is_cut or SUCCESS in trajectory.metrics)
        return {SUCCESS: float(values.get(first.name, 0.0) >= 1)} if is_bounded and not is_envs else {}

    def _first(self, tag: str) -> RewardConfig:
        return self._config.of_tag(tag)[0]


def _columns(values: Mapping[str, float]) -> dict[str, float]:
    return {f"{COLUMN}{name}": value for name, value in values.items()}

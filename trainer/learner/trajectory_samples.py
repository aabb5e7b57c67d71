from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from offbeat.envs.parsing import WHOLE_PATTERN, ActionParser
from offbeat.services.messages.types import Group, Trajectory
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.text_samples import TextSample, cut_middle
from offbeat.trainer.trackers.base import LoggedSteps

MAX_PROMPT_CHARS = 2000
MAX_ANSWER_CHARS = 400
MAX_ANSWERS = 12
WHOLE_ANSWER = ActionParser[Any](WHOLE_PATTERN, {})


class TrajectorySampler:
    """Excerpts of logged steps."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Any],
        custom_envs: Mapping[str, CustomEnv],
        count: int,
        logged: LoggedSteps,
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Any = None
        self._parsers = {tag: _parser(env) for tag, env in custom_envs.items()}
        self._count = count
        self._logged = logged

    def sample(self, step: int, groups: Iterable[Group]) -> tuple[TextSample, ...]:
        """Return excerpts, from the lowest to the highest score, of a logged step."""
        if not self._count or step not in self._logged:
            return ()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories if trajectory.segments]
        return tuple(self._excerpt(step, trajectory) for trajectory in choose_by_score(trajectories, self._count))

    def _excerpt(self, step: int, trajectory: Trajectory) -> TextSample:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        first = trajectory.segments[0].tokens
        prompt = first[: trajectory.turns[0].start] if trajectory.turns else first
        answers = [
            self._tokenizer.decode(
                trajectory.segments[turn.segment].tokens[turn.start : turn.end].tolist(), skip_special_tokens=True
            ).strip()
            for turn in trajectory.turns[:MAX_ANSWERS]
        ]
        parse = self._parsers.get(trajectory.tag, WHOLE_ANSWER)
        versions = trajectory.version_range()
        return TextSample(
            step=step,
            version=versions[0] if versions else -1,
            tag=trajectory.tag,
            score=trajectory.reward,
            prompt=cut_middle(self._tokenizer.decode(prompt.tolist()), MAX_PROMPT_CHARS),
            answers=tuple(cut_middle(answer, MAX_ANSWER_CHARS) for answer in answers),
            actions=tuple(cut_middle(parse(answer).content, MAX_ANSWER_CHARS) for answer in answers),
        )


def choose_by_score(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Return `count` trajectories at even distances by score; the best for one."""
    ordered = sorted(trajectories, key=lambda trajectory: trajectory.reward)
    count = min(count, len(ordered))
    if count < 2:
        return ordered[len(ordered) - count :]
    return [ordered[i * (len(ordered) - 1) // (count - 1)] for i in range(count)]


def _parser(env: CustomEnv) -> ActionParser[Any]:
    pattern = env.env_config.get("action_pattern")
    try:
        return ActionParser(pattern, {}) if isinstance(pattern, str) else WHOLE_ANSWER
    except ValueError:  # of a user's env, which may give the key another meaning
        return WHOLE_ANSWER

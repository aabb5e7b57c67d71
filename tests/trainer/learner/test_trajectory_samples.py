"""Text samples of trained trajectories."""

from dataclasses import replace
from pathlib import Path

from offbeat.services.rollout.config import CustomEnv
from offbeat.trainer.learner.trajectory_samples import TrajectorySampler, choose_by_score
from offbeat.trainer.trackers.base import LoggedSteps
from tests.fakes import make_group, make_trajectory
from tests.trainer.learner.harness import LearnerHarness, NumberTokenizer, learner_config


class AnswerTokenizer(NumberTokenizer):
    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        numbers = super().decode(tokens)
        return f"I go <answer> {numbers}</answer>" if skip_special_tokens else f"<s>{numbers}"


def sampler(count: int = 2, every: int = 1, pattern: str | None = None) -> TrajectorySampler:
    env = CustomEnv(env_type="frozen_lake", env_config={"action_pattern": pattern} if pattern else {})
    return TrajectorySampler(AnswerTokenizer, {"tag": env}, count, LoggedSteps(every, 10))


def test_a_sample_shows_what_was_asked_answered_and_done():
    group = make_group(3, rewards=(0.0, 0.25), version=2)
    (sample,) = sampler(1, pattern="<answer>(.*?)</answer>").sample(5, [group])
    tokens = group.trajectories[1].segments[0].tokens.tolist()
    first, second = (" ".join(map(str, tokens[start : start + 2])) for start in (3, 7))
    assert sample.prompt == "<s>" + " ".join(map(str, tokens[:3]))
    assert sample.answers == (f"I go <answer> {first}</answer>", f"I go <answer> {second}</answer>")
    assert sample.actions == (first, second)
    assert (sample.score, sample.tag, sample.step, sample.version) == (0.25, "tag", 5, 2)


def test_without_a_pattern_the_answer_is_the_action():
    (sample,) = sampler(1).sample(1, [make_group(0)])
    assert sample.actions == sample.answers


def test_samples_go_from_the_lowest_to_the_highest_score():
    trajectories = [make_trajectory(0, i, reward=reward) for i, reward in enumerate((0.5, 0.1, 0.9, 0.3, 0.7))]
    for count, rewards in ((0, []), (1, [0.9]), (2, [0.1, 0.9]), (3, [0.1, 0.5, 0.9]), (9, [0.1, 0.3, 0.5, 0.7, 0.9])):
        assert [trajectory.reward for trajectory in choose_by_score(trajectories, count)] == rewards


def test_only_logged_steps_are_sampled_and_the_last_is_one():
    made = sampler(every=4)
    assert [step for step in range(1, 11) if made.sample(step, [make_group(0)])] == [4, 8, 10]
    assert sampler(count=0).sample(4, [make_group(0)]) == ()


def test_a_long_trajectory_gives_a_short_sample():
    long = make_trajectory(num_turns=500)
    (sample,) = sampler(1).sample(1, [replace(make_group(0), trajectories=(long,))])
    assert len(sample.answers) == len(sample.actions) == 12


def test_the_learner_records_samples_of_every_nth_step_and_metrics_of_all(tmp_path: Path):
    for every, expected in ((1, [1, 2, 3, 4, 5, 6]), (4, [4, 6])):
        harness = LearnerHarness(tmp_path / str(every), learner_config(logging_steps=every, logging_samples=3))
        learner, _ = harness.learner()
        assert learner.run()
        steps = [record for record in harness.sink.records if record.source == "learner" and record.step is not None]
        assert [record.step for record in steps] == [1, 2, 3, 4, 5, 6]
        assert [record.step for record in steps if record.samples] == expected
        assert {len(record.samples) for record in steps if record.samples} == {3}

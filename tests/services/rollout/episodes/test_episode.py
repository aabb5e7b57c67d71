from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from offbeat.envs.frozen_lake import FrozenLakeConfig, FrozenLakeEnv
from offbeat.envs.frozen_lake.demos import careful_wandering
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.errors import EpisodeError
from offbeat.services.messages.codec import decode_trajectory, encode_trajectory
from offbeat.services.messages.types import (
    Completion,
    FinishReason,
    Sampling,
    StopReason,
    Trajectory,
    VersionSpan,
)
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.runners import EnvSpec, InlineEnv
from offbeat.services.rollout.episodes.episode import EpisodeMetrics, EpisodePlan, play
from tests.fakes_rollout import HERE, train_episode

Script = Callable[[int, tuple[int, ...], int], Completion]
"""(turn, prompt, most new tokens) -> completion"""


def saying(tokenizer: Tokenizer, *answers: str) -> Script:
    """Says these words, ends each turn, and starts again; versions grow from turn to turn."""

    def complete(turn: int, _: tuple[int, ...], max_new_tokens: int) -> Completion:
        answer = tokenizer.encode(answers[turn % len(answers)] + "<|im_end|>").ids
        ids = tuple(answer[:max_new_tokens])
        logprobs = tuple(-0.25 * (turn + 1) for _ in ids)
        finish_reason = FinishReason.STOP if len(ids) == len(answer) else FinishReason.LENGTH
        return Completion("r", ids, logprobs, (VersionSpan(0, len(ids), turn),), finish_reason)

    return complete


class Player:
    """Plays one episode with a scripted policy and keeps the prompts that it was shown."""

    def __init__(self, chat: ChatFormat, script: Script) -> None:
        self._chat = chat
        self._script = script
        self.prompts: list[tuple[int, ...]] = []
        self.max_new_tokens: list[int] = []

    async def sample(self, prompt: Sequence[int], max_new_tokens: int) -> Completion:
        self.prompts.append(tuple(prompt))
        self.max_new_tokens.append(max_new_tokens)
        return self._script(len(self.prompts) - 1, self.prompts[-1], max_new_tokens)

    async def play(
        self,
        seed: int = 1,
        *,
        sequence_length: int = 512,
        keep_text: bool = False,
        max_new_tokens: int = 64,
        **rules: Any,
    ) -> Trajectory:
        settings = {"env_type": "frozen_lake", "max_steps": 12, "max_tokens_per_step": 4, "execution": "inline"}
        env = CustomEnv(**{**settings, **rules})
        runner = InlineEnv(EnvSpec(env.env_type, env.env_config, 1, 1))
        traits = await runner.start()
        sampling = Sampling(max_new_tokens=max_new_tokens, stop_token_ids=self._chat.stop_ids)
        plan = EpisodePlan(train_episode(5, 2), "Lake", seed, env, sequence_length, sampling, keep_text, "w")
        return await play(plan, runner, traits, self.sample, self._chat)


def render_chatml(messages: list[dict[str, str]]) -> str:
    """ChatML written apart from the template's own."""
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def conversation_of(answers: list[str], seed: int = 1) -> tuple[list[dict[str, str]], list[float]]:
    """What FrozenLake itself says to these answers."""
    env, rewards = FrozenLakeEnv(), []
    observation, _ = env.reset(seed=seed)
    messages = [{"role": "system", "content": env.system_prompt}]
    for answer in answers:
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": answer}]
        observation, reward, *_ = env.step(answer)
        rewards.append(reward)
    return messages, rewards


WAY = ["Right", "Right", "Down", "Down", "Right", "Down"]


async def test_the_recorded_tokens_are_the_template_of_the_whole_conversation(chat: ChatFormat, tokenizer: Tokenizer):
    got = await Player(chat, saying(tokenizer, *WAY)).play()
    messages, rewards = conversation_of(WAY)
    segment = got.segments[0]
    assert segment.tokens.tolist() == tokenizer.encode(render_chatml(messages)).ids
    assert [turn.reward for turn in got.turns] == rewards
    assert (got.stop_reason, got.reward, got.metrics["success"]) == (StopReason.TERMINATED, 1.0, 1.0)
    sampled = segment.tokens[segment.loss_mask].tolist()
    assert tokenizer.decode(sampled, skip_special_tokens=False) == " ".join(f"{answer} <|im_end|>" for answer in WAY)


async def test_each_sampled_token_keeps_its_own_logprob_and_version(chat: ChatFormat, tokenizer: Tokenizer):
    got = await Player(chat, saying(tokenizer, *WAY)).play()
    segment = got.segments[0]
    versions = segment.token_versions()
    for number, turn in enumerate(got.turns):
        assert versions[turn.start : turn.end].tolist() == [number] * 2
        assert segment.logprobs[turn.start : turn.end].tolist() == [-0.25 * (number + 1)] * 2
        assert segment.loss_mask[turn.start : turn.end].all()
    assert int(segment.loss_mask.sum()) == 12
    assert not segment.logprobs[~segment.loss_mask].any()


async def test_a_turn_under_two_versions_keeps_both(chat: ChatFormat, tokenizer: Tokenizer):
    def complete(*_: object) -> Completion:
        ids = tuple(tokenizer.encode("Up<|im_end|>").ids)
        return Completion("r", ids, (-1.0, -2.0), (VersionSpan(0, 1, 4), VersionSpan(1, 2, 5)))

    got = await Player(chat, complete).play(max_steps=1)
    assert got.version_range() == (4, 5)
    assert [span.version for span in got.segments[0].versions] == [4, 5]


async def test_each_prompt_is_all_tokens_before_the_answer(chat: ChatFormat, tokenizer: Tokenizer):
    player = Player(chat, saying(tokenizer, *WAY))
    tokens = (await player.play()).segments[0].tokens.tolist()
    for prompt in player.prompts:
        assert list(prompt) == tokens[: len(prompt)]
        assert tokens[len(prompt) - 1] == tokenizer.token_to_id("assistant")


async def test_demonstrations_are_in_the_rollouts_format(chat: ChatFormat, tokenizer: Tokenizer):
    messages = careful_wandering(FrozenLakeEnv(FrozenLakeConfig()), np.random.default_rng(0))
    seed = int(np.random.default_rng(0).integers(2**31))
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    got = await Player(chat, saying(tokenizer, *answers)).play(seed, max_steps=len(answers))
    assert got.segments[0].tokens.tolist() == tokenizer.encode(render_chatml(messages)).ids


async def test_a_truncated_answer_gets_an_untrained_end_token(chat: ChatFormat, tokenizer: Tokenizer):
    got = await Player(chat, saying(tokenizer, "Right Right Right Right Right")).play(max_steps=2)
    segment, (first, second) = got.segments[0], got.turns
    assert first.end - first.start == 4
    assert segment.tokens[first.end] == chat.end_id
    assert not segment.loss_mask[first.end]
    assert second.end == len(segment.tokens)
    messages, _ = conversation_of(["Right Right Right Right"] * 2)
    assert segment.tokens.tolist() == tokenizer.encode(render_chatml(messages)).ids[:-1]
    assert got.metrics["action_is_valid"] == 0.0
    assert got.metrics["truncated_ratio"] == 1.0
    assert got.reward == pytest.approx(-0.2)


@pytest.mark.parametrize("manager", ["TrajEnvManager", "StepEnvManager"])
async def test_an_episode_is_truncated_if_its_last_answer_is(chat: ChatFormat, tokenizer: Tokenizer, manager: str):
    """The env of one turn ends the task whatever it gets: the answer's own finish reason must be recorded."""
    env = {"env_type": HERE + "CountingEnv", "env_config": {"length": 1}, "env_manager_cls": manager}
    long, short = "Right Right Right Right Right", "Left"
    cut = await Player(chat, saying(tokenizer, long)).play(**env)
    assert (cut.stop_reason, cut.is_truncated) == (StopReason.TERMINATED, True)
    assert decode_trajectory(encode_trajectory(cut)).turns[0].is_truncated
    assert not (await Player(chat, saying(tokenizer, short)).play(**env)).is_truncated
    env["env_config"] = {"length": 2}
    recovered = await Player(chat, saying(tokenizer, long, short)).play(**env)
    assert [turn.is_truncated for turn in recovered.turns] == [True, False]
    assert (recovered.is_truncated, recovered.metrics["truncated_ratio"]) == (False, 0.5)


async def test_an_episode_ends_after_max_steps(chat: ChatFormat, tokenizer: Tokenizer):
    got = await Player(chat, saying(tokenizer, "Left")).play(max_steps=5)
    assert (got.stop_reason, len(got.turns), got.metrics["num_actions"]) == (StopReason.MAX_STEPS, 5, 5.0)


@pytest.mark.parametrize("sequence_length", range(50, 90))
async def test_no_sequence_is_longer_than_allowed(chat: ChatFormat, tokenizer: Tokenizer, sequence_length: int):
    player = Player(chat, saying(tokenizer, "Left"))
    got = await player.play(sequence_length=sequence_length)
    assert got.stop_reason is StopReason.MAX_LENGTH
    assert len(got.segments[0].tokens) <= sequence_length
    assert got.segments[0].tokens.size == got.turns[-1].end
    assert min(player.max_new_tokens) >= 1
    # It stopped no earlier than it had to: one more prompt (17 tokens with the turn's end) would leave no room.
    assert len(got.segments[0].tokens) + 17 >= sequence_length
    decode_trajectory(encode_trajectory(got))


async def test_a_first_prompt_without_room_is_a_trajectory_without_turns(chat: ChatFormat, tokenizer: Tokenizer):
    got = await Player(chat, saying(tokenizer, "Left")).play(sequence_length=20)
    assert (got.stop_reason, got.turns, got.reward, got.version_range()) == (StopReason.MAX_LENGTH, (), 0, None)
    decode_trajectory(encode_trajectory(got))


@pytest.mark.parametrize(("per_step", "expected"), [(2, 2), (1000, 64)])
async def test_the_lowest_limit_on_new_tokens_counts(
    chat: ChatFormat, tokenizer: Tokenizer, per_step: int, expected: int
):
    player = Player(chat, saying(tokenizer, "Left"))
    await player.play(max_tokens_per_step=per_step, max_steps=1)
    assert player.max_new_tokens == [expected]


async def test_templates_shape_the_prompts(chat: ChatFormat, tokenizer: Tokenizer):
    player = Player(chat, saying(tokenizer, "Left"))
    template = "{step} . {actions_left} {observation}"
    got = await player.play(agent_system_template="Avoid O", agent_template=template, max_steps=3, keep_text=True)
    assert [text[:5] for text in got.text[1::2]] == ["1 . 3", "2 . 2", "3 . 1"]
    assert got.text[0] == "Avoid O"
    first = tokenizer.encode("<|im_start|>system\nAvoid O<|im_end|><|im_start|>user 1 . 3").ids
    assert list(player.prompts[0][: len(first)]) == first


async def test_text_is_recorded_only_on_request(chat: ChatFormat, tokenizer: Tokenizer):
    messages, _ = conversation_of(["Left", "Left"])
    trajectory = await Player(chat, saying(tokenizer, "Left")).play(keep_text=True, max_steps=2)
    assert list(trajectory.text) == [m["content"] for m in messages]
    assert (await Player(chat, saying(tokenizer, "Left")).play(max_steps=2)).text == ()


async def test_turns_that_answer_the_same_observation_share_a_state_hash(chat: ChatFormat, tokenizer: Tokenizer):
    got = await Player(chat, saying(tokenizer, "Left")).play(max_steps=4)
    first, *later = [turn.state_hash for turn in got.turns]
    assert len(set(later)) == 1
    assert first not in later


async def test_a_trajectory_describes_its_episode(chat: ChatFormat, tokenizer: Tokenizer):
    got = await Player(chat, saying(tokenizer, "Left")).play(3)
    assert (got.group_id, got.index, got.attempt, got.tag, got.seed) == ("run-5", 2, 0, "Lake", 3)
    decode_trajectory(encode_trajectory(got))


@pytest.mark.parametrize(
    "broken",
    [
        Completion("r"),
        Completion("r", (1, 2), (-1.0,), (VersionSpan(0, 2, 0),)),
        Completion("r", (1, 2), (-1.0, -1.0), (VersionSpan(0, 1, 0),)),
        Completion("r", (1, 2), (-1.0, -1.0), (VersionSpan(1, 2, 0),)),
        Completion("r", (1, 2), (-1.0, -1.0), ()),
        Completion("r", (1, 2), (-1.0, float("nan")), (VersionSpan(0, 2, 0),)),
    ],
)
async def test_a_completion_whose_parts_do_not_belong_together_fails_the_episode(chat: ChatFormat, broken: Completion):
    with pytest.raises(EpisodeError) as failed:
        await Player(chat, lambda *_: broken).play()
    assert failed.value.reason == "generation_invalid"


async def test_metrics_are_put_together_by_the_envs_rules(chat: ChatFormat, tokenizer: Tokenizer):
    got = await Player(chat, saying(tokenizer, "Left")).play(env_type=HERE + "CountingEnv", env_config={"length": 3})
    assert got.metrics == {
        "total": 6.0,
        "first_step": 1.0,
        "highest": 3.0,
        "action_is_valid": pytest.approx(1 / 3),
        "success": 1.0,
        "num_actions": 3.0,
        "response_length": 2.0,
        "truncated_ratio": 0.0,
    }


def test_an_aggregation_that_does_not_exist_is_named():
    with pytest.raises(EpisodeError, match="'median' of 'speed' is none of mean, sum, first"):
        EpisodeMetrics({"speed": "median"})


def test_a_metric_with_a_slash_in_its_own_name_keeps_its_aggregation():
    """A seat's metric has the aggregation of the name after the slash, another one the default."""
    metrics = EpisodeMetrics({"tool/calls": "sum", "moves": "max"}, ("white",))
    for value in (1.0, 2.0):
        metrics.add({"tool/calls": value, "white/moves": value, "white/success": value, "search/success": value})
    assert metrics.values() == {"tool/calls": 3.0, "white/moves": 2.0, "white/success": 2.0, "search/success": 1.5}

"""Demonstrations with images equal what a rollout with the same answers records."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
import torch

from offbeat.envs.frozen_lake import WORDS, FrozenLakeConfig, FrozenLakeEnv
from offbeat.envs.frozen_lake.demos import careful_wandering
from offbeat.services.chat.append_only import ChatFormat, load_chat_format
from offbeat.services.chat.vision import encode_png
from offbeat.services.messages.types import (
    Completion,
    PromptImage,
    Sampling,
    Trajectory,
    VersionSpan,
)
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.runners import EnvSpec, InlineEnv
from offbeat.services.rollout.episodes.episode import EpisodePlan, play
from offbeat.trainer.config.actor_train import ModelArgs, TrainingArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.config.warm_start import WarmStartConfig
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.warm_start.demonstrations import (
    ChatMessageDict,
    Demonstration,
    pack_demonstrations,
)
from offbeat.trainer.warm_start.factory import make_demonstrator
from offbeat.trainer.warm_start.train import warm_start
from offbeat.trainer.warm_start.vision_demonstrations import make_vision_demonstrator
from tests.fakes_rollout import train_episode
from tests.trainer.plain_engine import PlainEngine

ENV = CustomEnv(
    env_type="frozen_lake",
    max_steps=4,
    max_tokens_per_step=2,
    agent_template="{image} {step} of {actions_left}",
    env_config={"size": 3, "p": 0.8, "render_mode": "rgb_array"},
)
WARM = WarmStartConfig(
    demos="offbeat.envs.frozen_lake.demos:careful_wandering", tag="lake", steps=6, episodes_per_step=4
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    write_tiny_policy(path, TinyPolicyConfig(num_hidden_layers=1, vision=TinyVisionConfig(depth=1)), WORDS)
    return path


@pytest.fixture(scope="module")
def chat(folder: Path) -> ChatFormat:
    return load_chat_format(folder)


def make_env(**changes: object) -> CustomEnv:
    return ENV.model_copy(update=changes)


def roll_out(chat: ChatFormat, env: CustomEnv, seed: int, answers: list[str], length: int) -> Trajectory:
    """Run an episode in which the policy gives these answers."""
    remaining = iter(answers)

    async def sample(_: tuple[int, ...], room: int, __: tuple[PromptImage, ...] = ()) -> Completion:
        ids = (*chat.encode(next(remaining)), chat.end_id)[:room]
        return Completion("r", ids, (-1.0,) * len(ids), (VersionSpan(0, len(ids), 0),))

    async def episode() -> Trajectory:
        runner = InlineEnv(EnvSpec(env.env_type, env.env_config, 1, 1))
        traits = await runner.start()
        plan = EpisodePlan(train_episode(0), "lake", seed, env, length, Sampling(max_new_tokens=8), False, "w")
        return await play(plan, runner, traits, sample, chat)

    return asyncio.run(episode())


def demonstrated_walk(seed: int, env: CustomEnv) -> tuple[int, list[str], FrozenLakeEnv]:
    """Return the env's seed, the answers and the env of the demonstration from `default_rng(seed)`."""
    env_instance = FrozenLakeEnv(FrozenLakeConfig.model_validate(env.env_config))
    messages = careful_wandering(env_instance, np.random.default_rng(seed), max_turns=env.max_steps)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    return int(np.random.default_rng(seed).integers(2**31)), answers, env_instance


@pytest.mark.parametrize(
    "env",
    [
        ENV,
        make_env(agent_template="{image}"),
        make_env(agent_template="{image} or {image} {observation}", agent_system_template="Walk to G ."),
        make_env(env_manager_cls="StepEnvManager", history_length=2, agent_template="{history} {image}"),
        make_env(env_manager_cls="StepConcatEnvManager", agent_template="{observation} {image}"),
        make_env(max_tokens_per_step=1),
    ],
)
def test_demonstrations_equal_a_rollout_with_the_same_answers(chat: ChatFormat, env: CustomEnv) -> None:
    demonstrate = make_demonstrator(WARM, env, chat, max_tokens=512)
    num_images = 0
    for seed in range(4):
        env_seed, answers, _ = demonstrated_walk(seed, env)
        demos = demonstrate(np.random.default_rng(seed))
        segments = roll_out(chat, env, env_seed, answers, 512).segments
        assert len(demos) == len(segments)
        for demo, segment in zip(demos, segments, strict=True):
            assert demo.tokens.tolist() == segment.tokens.tolist()
            assert demo.learned.tolist() == np.flatnonzero(segment.loss_mask).tolist()
            assert demo.images == segment.images
            num_images += len(demo.images)
    assert num_images >= 8


def test_each_image_is_the_frame_before_its_answer(chat: ChatFormat) -> None:
    (demo,) = make_demonstrator(WARM, ENV, chat, max_tokens=512)(np.random.default_rng(3))
    seed, answers, _ = demonstrated_walk(3, ENV)
    env = FrozenLakeEnv(FrozenLakeConfig(size=3, p=0.8, render_mode="rgb_array"))
    env.reset(seed=seed)
    assert len(demo.images) == len(answers) > 1
    for image, answer in zip(demo.images, answers, strict=True):
        frame = env.render()
        assert isinstance(frame, np.ndarray)
        assert image.png == encode_png(frame)
        env.step(answer)


def test_packing_keeps_images_on_their_own_tokens(chat: ChatFormat) -> None:
    demonstrate, rng = make_demonstrator(WARM, ENV, chat, max_tokens=512), np.random.default_rng(0)
    demos = [demo for _ in range(3) for demo in demonstrate(rng)]
    x = pack_demonstrations(demos)
    pad = chat.image_tokens.reader.image_token_id
    covered = torch.cat([torch.arange(p.start, p.start + p.count) for p in x.images])
    assert covered.tolist() == (x.tokens == pad).nonzero()[:, 0].tolist()
    assert [p.png for p in x.images] == [p.png for demo in demos for p in demo.images]
    assert not set(covered.tolist()) & set(x.positions.tolist())


class Lamp(gymnasium.Env[str, str]):
    """Env that is white if the answer is Up and black if it is Down."""

    def __init__(self) -> None:
        self.render_mode = "rgb_array"
        self.lit = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.lit = bool(self.np_random.integers(2))
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(action == ("Down", "Up")[self.lit]), True, False, {}

    def render(self) -> npt.NDArray[np.uint8]:
        return np.full((32, 32, 3), 255 * self.lit, dtype=np.uint8)


def answer_the_frame(env: Lamp, rng: np.random.Generator) -> list[ChatMessageDict]:
    env.reset(seed=int(rng.integers(2**31)))
    answer = ("Down", "Up")[env.lit]
    env.step(answer)
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]


def test_the_policy_learns_to_read_images(folder: Path, chat: ChatFormat) -> None:
    env = make_env(env_type=f"{__name__}:Lamp", env_config={}, agent_template="{image}")
    learner = PlainEngine(load_policy(folder, ModelArgs(), seed=1))
    demonstrate = make_vision_demonstrator(answer_the_frame, env, chat, max_tokens=64)

    def loss_after(steps: int) -> float:
        config = WARM.model_copy(update={"steps": steps, "episodes_per_step": 8, "learning_rate": 1e-3})
        loss = warm_start(learner, config, demonstrate, seed=1, limits=TrainingArgs(), progress=lambda *_: None)
        assert loss is not None
        return loss

    assert loss_after(1) > 2.0
    assert loss_after(60) < 0.05  # a policy without image input reaches ln(2) / 2 at best


@pytest.mark.parametrize("manager", ["TrajEnvManager", "StepEnvManager"])
def test_long_demonstrations_are_truncated_as_a_rollout_is(chat: ChatFormat, manager: str) -> None:
    env = make_env(env_manager_cls=manager, agent_template="{image}")
    env_seed, answers, _ = demonstrated_walk(3, env)
    for length in (28, 40, 47, 48, 49):
        demos = make_demonstrator(WARM, env, chat, max_tokens=length)(np.random.default_rng(3))
        segments = roll_out(chat, env, env_seed, answers, length).segments
        assert [demo.tokens.tolist() for demo in demos] == [segment.tokens.tolist() for segment in segments]
        assert max(len(demo.tokens) for demo in demos) <= length
    with pytest.raises(ValueError, match="first prompt alone takes 27 tokens"):
        make_demonstrator(WARM, env, chat, max_tokens=20)(np.random.default_rng(3))


def walk(env: FrozenLakeEnv, rng: np.random.Generator, answers: tuple[str, ...]) -> list[ChatMessageDict]:
    env.reset(seed=int(rng.integers(2**31)))
    messages: list[ChatMessageDict] = []
    for answer in answers:
        messages += [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        env.step(answer)
    return messages


def demonstrate_once(
    chat: ChatFormat, demos: Callable[..., list[ChatMessageDict]], env: CustomEnv = ENV
) -> list[Demonstration]:
    return make_vision_demonstrator(demos, env, chat, max_tokens=512)(np.random.default_rng(0))


def test_only_the_steps_after_the_last_reset_count(chat: ChatFormat) -> None:
    def twice(env: FrozenLakeEnv, rng: np.random.Generator) -> list[ChatMessageDict]:
        walk(env, rng, ("Up", "Up", "Up"))
        return walk(env, rng, ("Up", "Left"))

    (demo,) = demonstrate_once(chat, twice)
    assert len(demo.images) == 2
    assert chat.answer(tuple(demo.tokens[demo.learned].tolist())) == "Up Left"


def test_answers_that_were_not_passed_to_the_env_are_rejected(chat: ChatFormat) -> None:
    def invent_answer(env: FrozenLakeEnv, rng: np.random.Generator) -> list[ChatMessageDict]:
        walk(env, rng, ("Up", "Left"))
        return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Down"}]

    with pytest.raises(ValueError, match=r"passed to env\.step since the last reset: returned \['Down'\]"):
        demonstrate_once(chat, invent_answer)


@pytest.mark.parametrize(
    ("answers", "message"), [(("jump",), "'jump' is '' in the policy's"), (("Up Up Left",), "takes 3 tokens")]
)
def test_answers_that_the_policy_can_not_sample_are_rejected(
    chat: ChatFormat, answers: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        demonstrate_once(chat, lambda env, rng: walk(env, rng, answers))


def test_env_without_frames_is_rejected(chat: ChatFormat) -> None:
    with pytest.raises(ValueError, match="render_mode rgb_array"):
        demonstrate_once(chat, careful_wandering, make_env(env_config={"size": 3}))


def test_policy_without_image_input_is_rejected(tmp_path: Path) -> None:
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=1), WORDS)
    with pytest.raises(ValueError, match="renders no images"):
        demonstrate_once(load_chat_format(tmp_path), careful_wandering)

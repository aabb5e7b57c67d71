"""The real engine and the learner's model agree on every token about images, before and after an update."""

import asyncio
import base64
import gc
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from offbeat.services.chat.append_only import ChatFormat, load_chat_format
from offbeat.services.chat.vision import ImageProcessor, encode_png
from offbeat.services.generation.config import EngineModelArgs, GenerationConfig
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.codec import decode_trajectory, encode_trajectory, request_id
from offbeat.services.messages.types import (
    Completion,
    EpisodeKind,
    EpisodeTask,
    GenerateRequest,
    Group,
    PromptImage,
    Sampling,
    Segment,
    Trajectory,
)
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.factory import make_scorer
from offbeat.services.rollout.agents.episode import AgentRuntime, play_with_agent, runtime_for
from offbeat.services.rollout.config import AgentRunner, CustomEnv
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.prompts import PromptSource
from offbeat.services.rollout.envs.runners import EnvSpec, InlineEnv
from offbeat.services.rollout.episodes.episode import EpisodePlan, play
from offbeat.services.rollout.episodes.transcript import Transcript
from offbeat.services.rollout.rewards import DatasetColumns, EpisodeRewards
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.training.data_step import make_trainer
from offbeat.trainer.training.optimizer_step import StepModels
from tests.fakes import train_on
from tests.families import write_vision_policy
from tests.trainer.plain_engine import PlainEngine

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("engine_forks"),
]

FLOAT_NOISE = 5e-5
CONFIG = GenerationConfig(model_args=EngineModelArgs(dtype="float32", image_input=True), kv_cache_gib=0.25)
WORDS = tuple(f"w{i}" for i in range(20))


@pytest.fixture(scope="module", params=("qwen2_vl", "qwen3_vl", "qwen3_vl_moe"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    write_vision_policy(folder, request.param, WORDS)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[VllmEngine]:
    engine = await VllmEngine.start(CONFIG, folder, sequence_length=256, seed=1)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        await asyncio.sleep(0)
        gc.collect()


def random_image(seed: int, rows: int, columns: int) -> bytes:
    return encode_png(np.random.default_rng(seed).integers(0, 256, (32 * rows, 32 * columns, 3), dtype=np.uint8))


def request_of(name: str, pad: int, *pngs: tuple[bytes, int]) -> GenerateRequest:
    """Images with words between them."""
    prompt, images = [2, 9], list[PromptImage]()
    for png, count in pngs:
        images.append(PromptImage(len(prompt) + 1, count, png))
        prompt += [4, *[pad] * count, 5, 12, 13]
    return GenerateRequest(name, (*prompt, 3, 2, 10), Sampling(max_new_tokens=24), images=tuple(images))


def mismatch(policy: PackedPolicy, request: GenerateRequest, completion: Completion) -> float:
    """Largest difference between the engine's logprobs and the learner's."""
    assert not completion.error, completion.error
    tokens = torch.tensor(request.prompt + completion.token_ids)
    positions = torch.arange(len(request.prompt), len(tokens))
    x = PackedInput.of(tokens, torch.tensor([0, len(tokens)]), positions, images=request.images)
    with torch.no_grad():
        return float((policy(x).logprobs - torch.tensor(completion.logprobs)).abs().max())


async def test_the_engine_sees_what_the_learner_sees_under_each_version(
    engine: VllmEngine, folder: Path, tmp_path: Path
) -> None:
    reader = ImageProcessor(folder)
    policies = [load_policy(folder, ModelArgs(image_input=True), seed) for seed in (0, 1)]
    pngs = [(png, reader.count(png)) for png in (random_image(1, 2, 3), random_image(2, 4, 4), random_image(3, 5, 1))]
    requests = [
        request_of("one", reader.image_token_id, pngs[0]),
        request_of("two", reader.image_token_id, pngs[1], pngs[2]),
        request_of("again", reader.image_token_id, pngs[0], pngs[0]),
    ]
    for version, policy in enumerate(policies):
        path = tmp_path / f"{version}.safetensors"
        save_file({name: weight.detach().clone() for name, weight in policy.model.named_parameters()}, path)
        await engine.stage(path)
        await engine.load(path, version)
        answers = await asyncio.gather(*(engine.generate(request, version) for request in requests))
        # the prefix cache and the vision tower's cache hold nothing of the other version
        for request, answer in zip(requests, answers, strict=True):
            assert mismatch(policy, request, answer) < FLOAT_NOISE
            assert mismatch(policies[1 - version], request, answer) > 0.01


async def test_an_image_that_the_prompt_does_not_fit_is_refused(engine: VllmEngine, folder: Path) -> None:
    reader = ImageProcessor(folder)
    request = request_of("odd", reader.image_token_id, (random_image(1, 2, 2), 5))
    assert "an image of 4 tokens is given 5" in (await engine.generate(request, 0)).error


async def test_rows_with_images_are_answered_and_trained_for_two_steps(
    engine: VllmEngine, folder: Path, tmp_path: Path
) -> None:
    """Each step's answers are sampled by its weights, as the learner computes them; another image is another answer."""
    chat, trained = load_chat_format(folder), PlainEngine(load_policy(folder, ModelArgs(image_input=True), seed=3))
    images = [f"data:image/png;base64,{base64.b64encode(random_image(n, 1 + n, 2)).decode()}" for n in range(2)]
    rows = [{"prompt": "w1 w2", "images": [image], "tag": "see"} for image in images]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(dataset_name=tmp_path / "rows.jsonl")
    prompts = PromptSource(data, ("see",), ("see",), seed=0)
    # an answer has five scores, 0 to 4: eight equal ones, which have no gradient, do not come by chance
    patterns = [{"name": f"place-{n}", "kind": "regex", "pattern": rf"^(\S+\s+){{{n}}}w\d?[02468]\b"} for n in range(4)]
    scoring = RewardsConfig.model_validate({"rewards": patterns}, strict=False)
    rewards = EpisodeRewards(scoring, make_scorer(scoring, local=True), chat, DatasetColumns(data, prompts))
    tree = {"pipeline": "rlvr", "data": {"dataset_name": data.dataset_name}, "adv_estimator": "grpo"}
    args = {"learning_rate": 1e-3, "max_tokens_per_microbatch": 512}
    config = LearnerConfig.model_validate({**tree, "actor_train": {"training_args": args}})
    trainer = make_trainer(config, StepModels(trained), Ranks(0, 0, 1, torch.device("cpu")))
    before = [tensor.clone() for _, tensor in trained.tensors()]
    for version in range(2, 4):
        path = tmp_path / f"{version}.safetensors"
        save_file({name: weight.detach().clone() for name, weight in trained.module.model.named_parameters()}, path)
        await engine.stage(path)
        await engine.load(path, version)
        groups = [await answer_row(engine, chat, prompts, rewards, data, row, version) for row in range(2)]
        for number, group in enumerate(groups):
            (image,) = group.trajectories[0].segments[0].images
            assert image.count == 2 * (1 + number)
            for each in group.trajectories:
                assert behavior_mismatch(trained.module, each) < FLOAT_NOISE
        gauges = train_on(trainer, groups, version)
        assert gauges["actor/grad_norm"].value > 0
    weights = zip(trained.tensors(), before, strict=True)
    assert [name for (name, tensor), first in weights if torch.equal(tensor, first)] == []
    await rewards.close()


async def answer_row(
    engine: VllmEngine,
    chat: ChatFormat,
    prompts: PromptSource,
    rewards: EpisodeRewards,
    data: DataConfig,
    row: int,
    version: int,
) -> Group:
    """Eight scored answers."""
    env = CustomEnv(env_type="prompt", max_steps=1, max_tokens_per_step=4, execution="inline").with_rows(data)
    prompt, sampling = (
        await prompts.read(EpisodeKind.TRAIN, row),
        Sampling(max_new_tokens=4, stop_token_ids=chat.stop_ids),
    )

    async def play_one(index: int) -> Trajectory:
        runner = InlineEnv(EnvSpec(env.env_type, env.env_config, 1, 1))
        traits = await runner.start()
        name = f"rows-{version}-{row}-{index}"

        async def sample(tokens: Sequence[int], most: int, images: tuple[PromptImage, ...] = ()) -> Completion:
            request = GenerateRequest(name, tuple(tokens), replace(sampling, max_new_tokens=most), images=images)
            return await engine.generate(request, version)

        task = EpisodeTask(EpisodeKind.TRAIN, str(row), row, index, 0, 0)
        transcript = Transcript()
        plan = EpisodePlan(task, "see", row, env, 256, sampling, True, "w", prompt, transcript=transcript)
        played = await play(plan, runner, traits, sample, chat)
        return (await rewards.add(played, EpisodeKind.TRAIN, transcript)).trajectory

    played = await asyncio.gather(*(play_one(index) for index in range(8)))
    return Group(f"{row}-0", str(row), row, "see", version, 0, tuple(played))


async def test_an_agents_images_are_sampled_and_trained(engine: VllmEngine, folder: Path, tmp_path: Path) -> None:
    """An agent's process sends them by OpenAI's client, after a turn without any, which stays in the engine."""
    trained = PlainEngine(load_policy(folder, ModelArgs(image_input=True), seed=4))
    path = tmp_path / "4.safetensors"
    save_file({name: weight.detach().clone() for name, weight in trained.module.model.named_parameters()}, path)
    await engine.stage(path)
    await engine.load(path, 4)
    rules = {"max_steps": 4, "max_tokens_per_step": 6, "execution": "inline"}
    runner = AgentRunner(path="tests.played_agents:shows_images", num_agents=4)
    env = CustomEnv(env_type="frozen_lake", agent_runner=runner, **rules)
    runtime = runtime_for({"See": env}, folder, image_input=True)
    assert runtime is not None
    try:
        played = [await play_by_agent(engine, env, runtime, index) for index in range(6)]
    finally:
        await runtime.close()
    for each in played:
        assert [len(segment.images) for segment in each.segments] == [2, 1]
        assert [turn.segment for turn in each.turns] == [0, 0, 0, 1]
        assert each.segments[0].images[0].png != each.segments[1].images[0].png
        assert behavior_mismatch(trained.module, each) < FLOAT_NOISE
    assert engine.sessions.num_continued == 0, "no turn with images is of a session"
    args = {"learning_rate": 1e-3, "max_tokens_per_microbatch": 512}
    config = LearnerConfig.model_validate({"adv_estimator": "grpo", "actor_train": {"training_args": args}})
    trainer = make_trainer(config, StepModels(trained), Ranks(0, 0, 1, torch.device("cpu")))
    tower = {name: weight.clone() for name, weight in trained.tensors() if "visual" in name}
    group = Group("0-0", "0", 0, "See", 4, 0, tuple(decode_trajectory(encode_trajectory(each)) for each in played))
    assert train_on(trainer, [group], 4)["actor/grad_norm"].value > 0
    assert tower
    assert any((weight != tower[name]).any() for name, weight in trained.tensors() if name in tower)


async def play_by_agent(engine: VllmEngine, env: CustomEnv, runtime: AgentRuntime, index: int) -> Trajectory:
    template, name, numbers = runtime.templates[None], f"agent-{index}", itertools.count()
    sampling = Sampling(max_new_tokens=6, stop_token_ids=template.stop_ids)

    async def sample(tokens: Sequence[int], most: int, images: tuple[PromptImage, ...] = ()) -> Completion:
        turn = request_id(name, next(numbers), continues=True)
        limited = replace(sampling, max_new_tokens=most)
        request = GenerateRequest(turn, tuple(tokens), limited, images=images, episode=name, continues=True)
        return await engine.generate(request, 4)

    inline = InlineEnv(EnvSpec(env.env_type, env.env_config, 1, 1))
    traits = await inline.start()
    task = EpisodeTask(EpisodeKind.TRAIN, "0", 0, index, 0, 0)
    plan = EpisodePlan(task, "See", 0, env, 256, sampling, True, "w")
    assert env.agent_runner is not None
    return await play_with_agent(plan, env.agent_runner, inline, traits, sample, runtime)


def behavior_mismatch(policy: PackedPolicy, trajectory: Trajectory) -> float:
    return max(segment_mismatch(policy, segment) for segment in trajectory.segments)


def segment_mismatch(policy: PackedPolicy, segment: Segment) -> float:
    mask = torch.from_numpy(segment.loss_mask)
    tokens = torch.from_numpy(segment.tokens.astype(np.int64))
    x = PackedInput.of(tokens, torch.tensor([0, len(tokens)]), mask.nonzero()[:, 0], images=segment.images)
    with torch.no_grad():
        return float((policy(x).logprobs - torch.from_numpy(segment.logprobs)[mask]).abs().max())

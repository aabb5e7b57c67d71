"""Prompts with images: played as a rollout, counted, and shown to rewards."""

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from offbeat.services.chat.append_only import ChatFormat, load_chat_format
from offbeat.services.chat.vision import encode_png
from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import (
    Completion,
    EpisodeKind,
    PromptImage,
    Sampling,
    StopReason,
    Trajectory,
    VersionSpan,
)
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.factory import make_scorer
from offbeat.services.reward.sample import RewardSample
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.prompts import PromptSource
from offbeat.services.rollout.envs.runners import EnvSpec, InlineEnv
from offbeat.services.rollout.episodes.episode import EpisodePlan, play
from offbeat.services.rollout.episodes.transcript import Transcript
from offbeat.services.rollout.rewards import DatasetColumns, EpisodeRewards
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.fakes_rollout import train_episode

WORDS = ("which", "is", "darker", "Left", "Right", "these", "ok")
IMAGE = {"type": "image"}
SEEN: list[RewardSample] = []


def keep(sample: RewardSample) -> float:
    SEEN.append(sample)
    return 1.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_tiny_policy(folder, TinyPolicyConfig(num_hidden_layers=1, vision=TinyVisionConfig(depth=1)), WORDS)
    return folder


@pytest.fixture(scope="module")
def chat(policy: Path) -> ChatFormat:
    return load_chat_format(policy)


def picture(seed: int, side: int = 64) -> bytes:
    return encode_png(np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8))


def url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def says(chat: ChatFormat, text: str) -> Any:
    async def sample(prompt: Sequence[int], most: int, images: tuple[PromptImage, ...] = ()) -> Completion:
        assert prompt.count(chat.image_tokens.reader.image_token_id) == sum(image.count for image in images)
        ids = (*chat.encode(text), chat.end_id)[:most]
        return Completion("r", ids, (-1.0,) * len(ids), (VersionSpan(0, len(ids), 0),))

    return sample


async def answer(path: Path, chat: ChatFormat, row: int = 0, **data: Any) -> Trajectory:
    """Play a row and score it."""
    config = DataConfig(dataset_name=path, **data)
    prompts = PromptSource(config, ("see",), ("see",), seed=0)
    env = CustomEnv(env_type="prompt", max_steps=1, max_tokens_per_step=4, execution="inline").with_rows(config)
    runner = InlineEnv(EnvSpec(env.env_type, env.env_config, 1, 1))
    traits = await runner.start()
    prompt = await prompts.read(EpisodeKind.TRAIN, row)
    task, transcript = train_episode(5, 2), Transcript()
    sampling, most = Sampling(max_new_tokens=4), config.prompt_length
    plan = EpisodePlan(task, "see", row, env, 64, sampling, True, "w", prompt, most, transcript)
    played = await play(plan, runner, traits, says(chat, "Left"), chat)
    reward = {"name": "kept", "kind": "function", "path": f"{__name__}:keep"}
    scoring = RewardsConfig.model_validate_json(json.dumps({"rewards": [reward]}))
    columns = DatasetColumns(config, prompts)
    rewards = EpisodeRewards(scoring, make_scorer(scoring, local=True), chat, columns)
    try:
        return (await rewards.add(played, EpisodeKind.TRAIN, transcript)).trajectory
    finally:
        await rewards.close()


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("form", ["path", "data URL", "bytes"])
async def test_a_rows_images_are_in_the_prompt_and_the_trajectory(form: str, chat: ChatFormat, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(picture(1))
    row = {"prompt": "which is darker", "ground_truth": "Left"}
    if form == "bytes":
        path = tmp_path / "rows.parquet"
        Dataset.from_list([{**row, "images": [{"bytes": picture(1), "path": None}]}]).to_parquet(path)
    else:
        image = "one.png" if form == "path" else url(picture(1))
        path = write(tmp_path / "rows.jsonl", {**row, "images": [image]})
    played = await answer(path, chat)
    (segment,) = played.segments
    (image,) = segment.images
    mark = chat.image_tokens.mark
    expected, images = chat.image_tokens.place(chat.first_prompt("", f"{mark}which is darker"), (picture(1),))
    assert tuple(segment.tokens[: len(expected)]) == expected
    assert (segment.images, image.png, image.count) == (images, picture(1), 4)
    assert played.text == ("", f"{mark}which is darker", "Left")
    assert played.reward == 1.0
    sample = SEEN.pop()
    assert sample.prompt == [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": url(picture(1))}},
                {"type": "text", "text": "which is darker"},
            ],
        }
    ]
    assert (sample.ground_truth, dict(sample.row)) == ("Left", {})


async def test_images_of_earlier_messages_keep_their_places(chat: ChatFormat, tmp_path: Path) -> None:
    def user(*parts: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": p} if p else IMAGE for p in parts]}

    messages = [user("these", "", ""), {"role": "assistant", "content": "ok"}, user("", " which is darker")]
    images = [url(picture(seed, side)) for seed, side in ((1, 64), (2, 96), (3, 32))]
    played = await answer(write(tmp_path / "rows.jsonl", {"messages": messages, "images": images}), chat)
    (segment,) = played.segments
    assert [image.count for image in segment.images] == [4, 9, 1]
    assert [image.png for image in segment.images] == [picture(1), picture(2, 96), picture(3, 32)]
    tokens, start = segment.tokens.tolist(), segment.images[2].start
    assert [chat.token_text(token) for token in tokens[start - 2 : start]] == ["user", "<|vision_start|>"]
    sample = SEEN.pop()
    parts = [part for message in (sample.prompt[0], sample.prompt[2]) for part in message["content"]]
    assert [part["image_url"]["url"] for part in parts if part["type"] == "image_url"] == images
    assert sample.prompt[1] == {"role": "assistant", "content": "ok"}


async def test_an_images_tokens_count_in_the_prompts_length(chat: ChatFormat, tmp_path: Path) -> None:
    rows = ({"prompt": "which", "images": url(picture(1, side))} for side in (64, 192))
    path = write(tmp_path / "rows.jsonl", *rows)
    short, long = [await answer(path, chat, row, prompt_length=20) for row in (0, 1)]
    assert len(short.turns) == 1
    assert (long.turns, long.stop_reason, long.reward) == ((), StopReason.MAX_LENGTH, 0.0)


async def test_an_unusable_image_is_reported_with_its_file_and_line(chat: ChatFormat, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "which", "images": ["none.png"]}, {"prompt": "which"})
    with pytest.raises(EpisodeError, match=r"rows.jsonl:1: images\[0\]: .*none.png can't be read") as caught:
        await answer(path, chat)
    assert caught.value.reason == "bad_row"
    assert (await answer(path, chat, 1)).segments[0].images == ()


def test_a_policy_without_image_input_fails_the_episode(tmp_path: Path) -> None:
    write_tiny_policy(tmp_path / "blind", TinyPolicyConfig(num_hidden_layers=1), WORDS)
    path = write(tmp_path / "rows.jsonl", {"prompt": "which", "images": [url(picture(1))]})
    with pytest.raises(EpisodeError, match="bad_image: "):
        asyncio.run(answer(path, load_chat_format(tmp_path / "blind")))


async def test_images_of_an_env_are_in_the_conversation_that_rewards_read(chat: ChatFormat) -> None:
    rules = {"max_steps": 2, "max_tokens_per_step": 4, "execution": "inline"}
    env = CustomEnv(env_type="frozen_lake", agent_template="see {image} of {observation}", **rules)
    runner = InlineEnv(EnvSpec(env.env_type, {"render_mode": "rgb_array", "size": 2}, 1, 1))
    traits, transcript = await runner.start(), Transcript()
    plan = EpisodePlan(
        train_episode(5, 2), "lake", 3, env, 512, Sampling(max_new_tokens=4), True, "w", transcript=transcript
    )
    played = await play(plan, runner, traits, says(chat, "Left"), chat)
    shown = [message["content"] for message in transcript.prompt if message["role"] == "user"]
    assert [[part["type"] for part in parts] for parts in shown] == [["text", "image_url", "text"]] * len(played.turns)
    assert [parts[1]["image_url"]["url"] for parts in shown] == [url(image.png) for image in played.segments[0].images]
    assert [parts[0]["text"] for parts in shown] == ["see "] * len(played.turns)
    assert all(parts[2]["text"].startswith(" of ") for parts in shown)

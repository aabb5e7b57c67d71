"""Images from an env to a trajectory: placeholders written out, each turn sent with all that was seen before."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from offbeat.envs.frozen_lake import WORDS, FrozenLakeConfig, FrozenLakeEnv
from offbeat.services.chat.append_only import ChatFormat, load_chat_format
from offbeat.services.chat.vision import ImageProcessor, encode_png
from offbeat.services.errors import CodecError, EpisodeError
from offbeat.services.messages.codec import (
    decode_requests,
    decode_trajectory,
    encode_requests,
    encode_trajectory,
)
from offbeat.services.messages.images import MAX_IMAGE_BYTES, PNG
from offbeat.services.messages.types import (
    Completion,
    GenerateRequest,
    PromptImage,
    Sampling,
    Trajectory,
    VersionSpan,
)
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.process_env import ProcessEnv
from offbeat.services.rollout.envs.runners import EnvSpec, InlineEnv
from offbeat.services.rollout.episodes.episode import EpisodePlan, play
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.models.tiny import (
    IMAGE,
    VISION_END,
    VISION_START,
    write_tiny_policy,
)
from tests.fakes_rollout import train_episode

SEEN = {"render_mode": "rgb_array"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    write_tiny_policy(folder, TinyPolicyConfig(vision=TinyVisionConfig()), WORDS)
    return folder


@pytest.fixture(scope="module")
def chat(folder: Path) -> ChatFormat:
    return load_chat_format(folder)


class Walker:
    """Says the same word each time, and keeps what it was sent."""

    def __init__(self, chat: ChatFormat, word: str) -> None:
        self.ids = (*chat.encode(word), chat.end_id)
        self.sent: list[tuple[tuple[int, ...], tuple[PromptImage, ...]]] = []

    async def __call__(self, prompt: Sequence[int], most: int, images: tuple[PromptImage, ...] = ()) -> Completion:
        self.sent.append((tuple(prompt), images))
        ids = self.ids[:most]
        return Completion("r", ids, (-1.0,) * len(ids), (VersionSpan(0, len(ids), 0),))


async def walked(chat: ChatFormat, template: str, **config: str) -> tuple[Walker, Trajectory]:
    walker = Walker(chat, "Up")
    env = CustomEnv(
        env_type="frozen_lake",
        max_steps=3,
        max_tokens_per_step=2,
        execution="inline",
        agent_system_template="Walk .",
        agent_template=template,
        env_config={**SEEN, **config},
    )
    runner = InlineEnv(EnvSpec(env.env_type, env.env_config, 1, 1))
    traits = await runner.start()
    plan = EpisodePlan(train_episode(5, 2), "Lake", 1, env, 512, Sampling(max_new_tokens=4), False, "w")
    return walker, await play(plan, runner, traits, walker, chat)


def test_the_template_defines_how_an_image_is_rendered(chat: ChatFormat) -> None:
    assert chat.image_tokens.mark == VISION_START + IMAGE + VISION_END


async def test_each_turn_sends_all_images_and_the_trajectory_keeps_them(chat: ChatFormat, folder: Path) -> None:
    walker, got = await walked(chat, "{image} {observation}")
    (segment,) = got.segments
    pad = chat.encode(IMAGE)[0]
    env = FrozenLakeEnv(FrozenLakeConfig(render_mode="rgb_array"))
    env.reset(seed=1)
    frame = env.render()
    assert isinstance(frame, np.ndarray)
    assert [len(images) for _, images in walker.sent] == [1, 2, 3]
    assert segment.images == walker.sent[-1][1]
    assert segment.images[0].png == encode_png(frame)
    for image in segment.images:
        assert image.count == 16 == ImageProcessor(folder).count(image.png)  # one token for each cell
        span = segment.tokens[image.start : image.start + image.count]
        assert (span == pad).all()
        assert segment.tokens[image.start - 1] == chat.encode(VISION_START)[0]
    assert int((segment.tokens == pad).sum()) == 48
    assert walker.sent[-1][0] + walker.ids == tuple(segment.tokens.tolist())
    assert decode_trajectory(encode_trajectory(got)).segments[0].images == segment.images


async def test_another_image_is_another_state(chat: ChatFormat) -> None:
    _, got = await walked(chat, "{image}")
    _, text = await walked(chat, "{observation}")
    assert len({turn.state_hash for turn in got.turns}) == len({turn.state_hash for turn in text.turns})
    assert not {turn.state_hash for turn in got.turns} & {turn.state_hash for turn in text.turns}


async def test_an_env_in_a_process_shows_the_same_image() -> None:
    spec = EnvSpec("frozen_lake", SEEN, 30, 30)
    inline, apart = InlineEnv(spec), ProcessEnv(spec)
    try:
        for runner in (inline, apart):
            await runner.start()
            await runner.reset(4)
        assert await inline.image() == await apart.image()
    finally:
        await apart.close()


async def test_an_env_that_renders_no_image_fails_the_episode_by_name() -> None:
    runner = InlineEnv(EnvSpec("frozen_lake", {}, 1, 1))
    await runner.start()
    await runner.reset(1)
    with pytest.raises(EpisodeError, match=r"image_error: .*render_mode rgb_array"):
        await runner.image()


def test_a_placeholder_in_an_observations_own_words_is_refused(chat: ChatFormat) -> None:
    ids = chat.first_prompt("", f"{chat.image_tokens.mark} {IMAGE}")
    with pytest.raises(EpisodeError, match="2 placeholders for 1 images"):
        chat.image_tokens.place(ids, (PNG,))


def test_requests_keep_their_images_and_refuse_large_and_misplaced_ones() -> None:
    def request(*images: PromptImage) -> GenerateRequest:
        return GenerateRequest("r", (1, 2, 3, 4), Sampling(), 0, images)

    fine = request(PromptImage(0, 1, PNG + b"a"), PromptImage(2, 2, PNG))
    assert decode_requests(encode_requests([fine])) == [fine]
    for odd in (
        PromptImage(3, 2, PNG),
        PromptImage(-1, 1, PNG),
        PromptImage(0, 0, PNG),
        PromptImage(0, 1, b"GIF"),
        PromptImage(0, 1, PNG + bytes(MAX_IMAGE_BYTES)),
    ):
        with pytest.raises(CodecError, match="image"):
            decode_requests(encode_requests([request(odd)]))
    with pytest.raises(CodecError, match="in order"):
        decode_requests(encode_requests([request(PromptImage(2, 1, PNG), PromptImage(0, 1, PNG))]))


def test_only_a_digest_of_a_counted_image_is_cached(folder: Path):
    reader, rng = ImageProcessor(folder), np.random.default_rng(0)
    images = [encode_png(rng.integers(256, size=(32, 32, 3), dtype=np.uint8)) for _ in range(3)]
    counts = [reader.count(png) for png in images]
    assert [reader.count(png) for png in images] == counts
    assert [len(kept) for kept in reader._counts] == [16, 16, 16]

"""`play`, `rollout` and `inspect` with a vision policy."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from typer.testing import CliRunner, Result

from offbeat.deploy.cli.app import app
from offbeat.deploy.play.agents import load_chat
from offbeat.deploy.play.openai_agent import parse_conversation
from offbeat.deploy.play.parquet import RecordedTokens, read_parquet
from offbeat.envs.frozen_lake import WORDS, FrozenLakeConfig, FrozenLakeEnv
from offbeat.services.chat.vision import encode_png
from offbeat.services.messages.types import PromptImage
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from tests.families import VISION_FAMILIES, write_vision_policy

pytestmark = pytest.mark.slow

RUN = """
exp_name: lake
output_dir: {folder}/run
custom_envs:
  Lake:
    env_type: frozen_lake
    max_steps: 3
    max_tokens_per_step: 2
    execution: inline
    agent_system_template: Walk to G .
    agent_template: "{{image}} Left"
    env_config: {{size: 3, render_mode: rgb_array}}
train_env_manager: {{num_env_groups: 8, group_size: 4}}
rollout_batch_size: 8
pretrain: {folder}/sees
sequence_length: 256
"""


def offbeat(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def vision_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `sees`, an untrained vision policy, and `run.yaml`, a run on FrozenLake with images."""
    folder = tmp_path_factory.mktemp("vision_folder")
    write_vision_policy(folder / "sees", request.param, (*WORDS, "Walk", "to"))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder / "sees"))
    model.save_pretrained(folder / "sees")
    (folder / "run.yaml").write_text(RUN.format(folder=folder))
    return folder


@pytest.fixture(scope="module")
def recorded(vision_folder: Path) -> list[RecordedTokens]:
    out = vision_folder / "r.parquet"
    done = offbeat("rollout", vision_folder / "run.yaml", "--episodes", 6, "--group-size", 2, "--out", out)
    assert done.exit_code == 0, done.output
    assert "mean of 6 episodes" in done.output
    assert "pass@2 " in done.output
    assert "could not be played" not in done.output
    return read_parquet(out)


def test_recorded_vision_logprobs_equal_the_learners(vision_folder: Path, recorded: list[RecordedTokens]):
    """The images are inserted where the recorded file says."""
    learner = load_policy(vision_folder / "sees", ModelArgs(image_input=True), seed=1)
    for episode in recorded:
        shown = zip(episode.image_starts, episode.image_tokens, episode.images, strict=True)
        tokens, mask = torch.tensor(episode.tokens), torch.tensor(episode.loss_mask)
        with torch.inference_mode():
            output = learner(
                PackedInput.of(
                    tokens,
                    torch.tensor([0, len(tokens)]),
                    mask.nonzero()[:, 0],
                    images=tuple(PromptImage(*image) for image in shown),
                )
            )
        assert len(episode.images) == len(episode.turn_ends)
        torch.testing.assert_close(torch.tensor(episode.logprobs)[mask], output.logprobs, atol=1e-4, rtol=1e-4)


def test_recorded_images_equal_those_of_the_env(recorded: list[RecordedTokens]):
    for episode in recorded:
        env = FrozenLakeEnv(FrozenLakeConfig(size=3, render_mode="rgb_array", split="held_out"))
        env.reset(seed=episode.seed)
        answers = [message["content"] for message in episode.messages if message["role"] == "assistant"]
        for png, answer in zip(episode.images, answers, strict=True):
            frame = env.render()
            assert isinstance(frame, np.ndarray)
            assert png == encode_png(frame)
            env.step(answer)


def test_inspect_shows_a_mark_for_each_image(vision_folder: Path, recorded: list[RecordedTokens]):
    done = offbeat("inspect", vision_folder / "r.parquet", "--episode", 0)
    assert done.exit_code == 0, done.output
    assert done.output.count("[image: 9 tokens, ") == len(recorded[0].images)
    tokens = zip(recorded[0].token_texts, recorded[0].loss_mask, strict=True)
    assert done.output.count("<|image_pad|>") == sum(text == "<|image_pad|>" and mask for text, mask in tokens)


def test_vision_policy_plays_and_the_page_shows_its_images(vision_folder: Path, tmp_path: Path):
    page = tmp_path / "lake.html"
    done = offbeat("play", vision_folder / "run.yaml", "--agent", "policy", vision_folder / "sees", "--render", page)
    assert done.exit_code == 0, done.output
    assert re.search(r"<\|vision_start\|>' \[image: 9 x \d+:'<\|image_pad\|>'\] \d+:'<\|vision_end", done.output)
    assert done.output.count("completion ") == done.output.count("[image: 9 x ")
    assert page.read_text().count("data:image/png") == done.output.count("completion ") + 1


def test_template_shows_the_images_of_an_env_by_name(vision_folder: Path, tmp_path: Path):
    common = ("play", "frozen_lake", "size=3", "--template", "{image} Left", "--max-steps", 2)
    done = offbeat(*common, "--agent", "policy", vision_folder / "sees", "--render", tmp_path / "x.gif")
    assert done.exit_code == 0, done.output
    assert "[image: 9 x " in done.output
    assert (tmp_path / "x.gif").read_bytes()[:4] == b"GIF8"
    random = offbeat(*common, "--agent", "random")
    assert random.exit_code == 0, random.output
    assert "bytes of PNG" in random.output


def test_model_behind_endpoint_receives_the_images():
    chat = load_chat(None)
    mark, pngs = chat.image_tokens.mark, (b"first", b"second")
    first = chat.first_prompt("Walk.", f"see {mark} now")
    ids, (shown,) = chat.image_tokens.place(first, pngs[:1])
    ids += (*chat.encode("Up"), chat.end_id)
    following, (second,) = chat.image_tokens.place(chat.next_prompt(mark), pngs[1:2])
    images = (shown, PromptImage(len(ids) + second.start, second.count, pngs[1]))
    system, user, answer, later = parse_conversation(chat, ids + following, images)
    assert (system["content"], answer) == ("Walk.", {"role": "assistant", "content": "Up"})
    assert [part["type"] for part in user["content"]] == ["text", "image_url", "text"]
    assert (user["content"][0]["text"], user["content"][2]["text"]) == ("see ", " now")
    (alone,) = later["content"]
    assert base64.b64decode(alone["image_url"]["url"].removeprefix("data:image/png;base64,")) == b"second"
    assert json.dumps(system)


def test_text_policy_for_images_is_rejected_in_one_line(folder: Path, vision_folder: Path):
    for command in (
        ("play", "frozen_lake", "--template", "{image}", "--agent", folder / "policy"),
        ("rollout", vision_folder / "run.yaml", "--agent", folder / "policy"),
    ):
        done = offbeat(*command)
        assert done.exit_code == 2, done.output
        assert "renders no images" in done.output
        assert "Traceback" not in done.output

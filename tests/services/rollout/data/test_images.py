"""Rows with images: their tokens are a rollout's, and the policy learns from the pixels."""

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.chat.vision import encode_png
from offbeat.services.errors import EpisodeError
from offbeat.services.messages.codec import decode_trajectory, encode_trajectory
from offbeat.services.messages.types import Group, Trajectory
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.training.data_step import DataTrainer
from offbeat.trainer.training.optimizer_step import StepModels
from tests.trainer.plain_engine import PlainEngine

WORDS = ("where", "is", "it", "Left", "Up", "look", "and")
IMAGE = {"type": "image"}
ASK = {"role": "user", "content": [IMAGE, {"type": "text", "text": "where is it"}]}
ANSWER = {"role": "assistant", "content": "Left"}
ALONE = Ranks(0, 0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_tiny_policy(folder, TinyPolicyConfig(num_hidden_layers=1, vision=TinyVisionConfig(depth=1)), WORDS)
    return folder


def picture(seed: int, side: int = 64) -> bytes:
    return encode_png(np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8))


def read(
    policy: Path, folder: Path, row: dict[str, Any], pipeline: str = "sft", index: int = 0, **settings: Any
) -> Trajectory:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = DataConfig(dataset_name=folder / "rows.jsonl", **settings)
    return DataSource(config, pipeline, policy, seed=0, max_tokens=64).trajectory(0, index, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one.png").write_bytes(picture(1))
    (tmp_path / "two.png").write_bytes(picture(2, 96))
    return tmp_path


def test_the_tokens_of_a_row_are_those_of_a_rollout(policy: Path, folder: Path) -> None:
    trajectory = read(policy, folder, {"messages": [ASK, ANSWER], "images": ["one.png"]})
    chat = load_chat_format(policy)
    prompt = chat.first_prompt("", f"{chat.image_tokens.mark}where is it")
    ids, images = chat.image_tokens.place(prompt, (picture(1),))
    (segment,) = trajectory.segments
    assert tuple(segment.tokens[: len(ids)]) == ids
    assert segment.images == images
    assert tuple(segment.tokens[len(ids) :]) == (*chat.encode("Left"), chat.end_id)
    assert np.flatnonzero(segment.loss_mask).tolist() == list(range(len(ids), len(segment.tokens)))
    assert encode_trajectory(decode_trajectory(encode_trajectory(trajectory))) == encode_trajectory(trajectory)


def test_images_of_several_turns_are_in_the_columns_order(policy: Path, folder: Path) -> None:
    again = {"role": "user", "content": [{"type": "text", "text": "and"}, IMAGE]}
    row = {"messages": [ASK, ANSWER, again, {"role": "assistant", "content": "Up"}], "images": ["one.png", "two.png"]}
    (segment,) = read(policy, folder, row).segments
    assert [image.count for image in segment.images] == [4, 9]
    assert [image.png for image in segment.images] == [picture(1), picture(2, 96)]
    assert int(segment.loss_mask.sum()) == 4
    with pytest.raises(EpisodeError, match="completion can't learn an image"):
        read(policy, folder, row, train_on="completion")
    cut = DataSource(
        DataConfig(dataset_name=folder / "rows.jsonl", too_long="truncate"), "sft", policy, seed=0, max_tokens=25
    ).trajectory(0, 0, 0)
    assert [image.count for image in cut.segments[0].images] == [4]
    assert len(cut.segments[0].tokens) == 20, "up to the image that does not fit"
    encode_trajectory(cut)


def test_an_image_is_a_path_bytes_or_a_data_url(policy: Path, folder: Path) -> None:
    out = io.BytesIO()
    Image.open(io.BytesIO(picture(1))).save(out, format="JPEG")
    (folder / "one.jpg").write_bytes(out.getvalue())
    url = f"data:image/png;base64,{base64.b64encode(picture(1)).decode()}"
    for value in (["one.jpg"], [{"path": "one.jpg", "bytes": None}], [url], "one.png"):
        (image,) = read(policy, folder, {"messages": [ASK, ANSWER], "images": value}).segments[0].images
        assert image.count == 4
    assert image.png == picture(1)


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
def test_an_image_column_of_datasets_is_read_as_it_is_stored(policy: Path, folder: Path, name: str) -> None:
    """`datasets` would decode it."""
    datasets = pytest.importorskip("datasets")
    stored = {"bytes": picture(1), "path": None}
    table = datasets.Dataset.from_list([{"prompt": [ASK], "response": "Left", "one": stored, "images": [stored]}])
    table = table.cast_column("one", datasets.Image()).cast_column("images", datasets.Sequence(datasets.Image()))
    table.to_parquet(folder / "rows.parquet")
    table.save_to_disk(folder / "saved")
    for key in ("one", "images"):
        config = DataConfig(dataset_name=folder / name, images_key=key)
        (segment,) = DataSource(config, "sft", policy, seed=0, max_tokens=64).trajectory(0, 0, 0).segments
        assert [image.png for image in segment.images] == [picture(1)]


def test_an_image_column_of_datasets_names_files_of_its_folder_alone(policy: Path, folder: Path) -> None:
    (folder / "inner").mkdir()
    datasets = pytest.importorskip("datasets")
    row = {"prompt": [ASK], "response": "Left", "images": {"bytes": None, "path": str(folder / "one.png")}}
    table = datasets.Dataset.from_list([row]).cast_column("images", datasets.Image())
    sources: list[DataSource] = []
    for place in (folder, folder / "inner"):
        table.to_parquet(place / "rows.parquet")
        config = DataConfig(dataset_name=place / "rows.parquet")
        sources.append(DataSource(config, "sft", policy, seed=0, max_tokens=64))
    assert sources[0].trajectory(0, 0, 0).segments[0].images[0].png == picture(1)
    with pytest.raises(EpisodeError, match="outside the dataset's folder"):
        sources[1].trajectory(0, 0, 0)


SIDE = 30_000
HUGE_BMP = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 54, 0, 0, 54, 40, SIDE, SIDE, 1, 24, 0, 0, 0, 0, 0, 0)
HEADER = b"IHDR" + struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
HUGE_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\r" + HEADER + struct.pack(">II", zlib.crc32(HEADER), 0) + b"IDAT"


def data_url(image: bytes) -> str:
    return f"data:image;base64,{base64.b64encode(image).decode()}"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [ASK, ANSWER]}, "0 images for 1 image parts"),
        ({"messages": [ASK, ANSWER], "images": ["one.png", "two.png"]}, "2 images for 1 image parts"),
        ({"messages": [ASK, ANSWER], "images": ["three.png"]}, "three.png can't be read: No such file"),
        ({"messages": [ASK, ANSWER], "images": ["../secret.png"]}, "outside the dataset's folder"),
        ({"messages": [ASK, ANSWER], "images": ["a\0b"]}, "is no path"),
        ({"messages": [ASK, ANSWER], "images": [data_url(HUGE_BMP)]}, "Image size (900000000 pixels)"),
        ({"messages": [ASK, ANSWER], "images": [data_url(HUGE_PNG)]}, "Image size (900000000 pixels)"),
        ({"messages": [ASK, ANSWER], "images": ["rows.jsonl"]}, "cannot identify image"),
        ({"messages": [ASK, ANSWER], "images": 1}, "expected an image or a list of them, got int"),
        (
            {"messages": [ASK, ANSWER], "images": ["data:image/png;base64,A?"]},
            "a data URL (data:image/png;base64) can't be read",
        ),
        ({"messages": [ASK, ANSWER], "images": ["data:image/png,A"]}, "is not in base64"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}, ANSWER]}, "a part of a content is"),
    ],
)
def test_images_that_do_not_fit_are_reported_with_the_line(
    row: dict[str, Any], problem: str, policy: Path, folder: Path
) -> None:
    with pytest.raises(EpisodeError, match=r"rows\.jsonl:1: ") as caught:
        read(policy, folder, row)
    assert problem in str(caught.value)


def test_a_policy_without_image_input_is_reported(folder: Path) -> None:
    write_tiny_policy(folder / "blind", TinyPolicyConfig(num_hidden_layers=1), WORDS)
    row = {"messages": [{"role": "user", "content": "where"}, ANSWER], "images": ["one.png"]}
    with pytest.raises(EpisodeError, match="the policy has no image input"):
        read(folder / "blind", folder, row)


def step(policy: Path, pipeline: str, trajectories: list[tuple[Trajectory, ...]]) -> float:
    args = {"learning_rate": 0.0, "max_tokens_per_microbatch": 1000}
    tree = {"pipeline": pipeline, "data": {"dataset_name": policy}, "actor_train": {"training_args": args}}
    engine = PlainEngine(load_policy(policy, ModelArgs(), seed=1))
    reference = FrozenModel(load_policy(policy, ModelArgs(), seed=2), ALONE) if pipeline == "dpo" else None
    groups = tuple(Group(f"{n}-0", str(n), n, pipeline, 0, 0, members) for n, members in enumerate(trajectories))
    trainer = DataTrainer(LearnerConfig.model_validate(tree), StepModels(engine, None, reference), ALONE)
    return trainer.train(StepBatch(0, groups, groups))["loss"].value


@pytest.mark.parametrize("pipeline", ["sft", "dpo"])
def test_the_loss_depends_on_the_pixels_and_not_on_the_packing(pipeline: str, policy: Path, folder: Path) -> None:
    row: dict[str, Any] = (
        {"messages": [ASK, ANSWER]} if pipeline == "sft" else {"prompt": [ASK], "chosen": "Left", "rejected": "Up"}
    )
    size = 1 if pipeline == "sft" else 2
    read_with = [
        tuple(read(policy, folder, {**row, "images": [name]}, pipeline, index) for index in range(size))
        for name in ("one.png", "two.png")
    ]
    apart = [step(policy, pipeline, [members]) for members in read_with]
    assert abs(apart[0] - apart[1]) > 1e-5
    assert step(policy, pipeline, read_with) == pytest.approx(sum(apart) / 2, abs=1e-5)

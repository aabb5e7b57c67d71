"""A policy that sees: packed tokens with images against transformers' own forward of one sequence at a time."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from offbeat.services.chat.vision import ImageProcessor, encode_png, stack_images
from offbeat.services.messages.types import PromptImage
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput, Packing
from offbeat.trainer.models.tiny import VISION_TOKENS, vocabulary, write_tiny_policy
from offbeat.trainer.models.vision import PackedVisionPolicy, rope_positions
from tests.families import VISION_FAMILIES, write_vision_policy

SEEING = ModelArgs(image_input=True)
WORDS = ("P", "G", "Left", "Down", "Right", "Up")


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    write_vision_policy(folder, request.param, WORDS)
    return folder


@pytest.fixture(scope="module")
def policy(folder: Path) -> PackedVisionPolicy:
    policy = load_policy(folder, SEEING, seed=1)
    assert isinstance(policy, PackedVisionPolicy)
    return policy


def image(seed: int, rows: int, columns: int) -> bytes:
    """A PNG of rows x columns tokens."""
    pixels = np.random.default_rng(seed).integers(0, 256, (32 * rows, 32 * columns, 3), dtype=np.uint8)
    return encode_png(pixels)


class Sequences:
    """Two sequences with two images and one, and one without any, and what transformers says about each alone."""

    def __init__(self, folder: Path) -> None:
        self.reader = ImageProcessor(folder)
        self.pad = self.reader.image_token_id
        self.pngs = [[image(1, 2, 3), image(2, 3, 1)], [image(3, 4, 4)], []]
        self.sequences = [
            [12, 4, *[self.pad] * 6, 5, 13, 14, 15, *[self.pad] * 3, 12, 16, 14],
            [*[self.pad] * 16, 12, 13, self.pad, 14],  # the policy itself has sampled a placeholder's id
            [12, 13, 14, 15],
        ]
        self.starts = [[2, 12], [0], []]

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """In the packed row."""
        out: list[PromptImage] = []
        before = 0
        for tokens, pngs, starts in zip(self.sequences, self.pngs, self.starts, strict=True):
            out += [PromptImage(before + at, self.reader.count(png), png) for png, at in zip(pngs, starts, strict=True)]
            before += len(tokens)
        return tuple(out)

    def packed(self) -> PackedInput:
        lengths = torch.tensor([0, *map(len, self.sequences)]).cumsum(0)
        tokens = torch.tensor([token for sequence in self.sequences for token in sequence])
        positions = torch.tensor([n for n in range(len(tokens)) if n not in lengths.tolist()])
        return PackedInput.of(tokens, lengths, positions, images=self.images)

    def inputs(self, number: int) -> dict[str, Any]:
        """As transformers wants one of them; what the policy sampled is no image."""
        kinds = torch.zeros(1, len(self.sequences[number]), dtype=torch.int)
        for png, at in zip(self.pngs[number], self.starts[number], strict=True):
            kinds[0, at : at + self.reader.count(png)] = 1
        tokens = torch.tensor([self.sequences[number]])
        if not self.pngs[number]:
            return {"input_ids": tokens}
        patches, grids = stack_images([self.reader.pixels(png) for png in self.pngs[number]])
        pixels = {"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.from_numpy(grids)}
        return {"input_ids": tokens, "mm_token_type_ids": kinds, **pixels}


def test_positions_equal_those_of_transformers(folder: Path, policy: PackedVisionPolicy) -> None:
    data = Sequences(folder)
    grids = [data.reader.pixels(png).grid for pngs in data.pngs for png in pngs]
    x = data.packed()
    got = rope_positions(x.packing, data.images, grids, data.reader.merge)
    parts = []
    for number, sequence in enumerate(data.sequences):
        given = data.inputs(number)
        if data.pngs[number]:
            parts.append(
                policy.model.model.get_rope_index(
                    given["input_ids"], given["mm_token_type_ids"], given["image_grid_thw"]
                )[0][:, 0]
            )
        else:
            parts.append(torch.arange(len(sequence)).expand(3, -1))
    assert torch.equal(got[0], x.packing.position_ids)
    assert torch.equal(got[1:, 0], torch.cat(parts, dim=1))


def test_packed_image_sequences_match_transformers(folder: Path, policy: PackedVisionPolicy) -> None:
    data = Sequences(folder)
    data.sequences[1][18] = 12  # transformers itself would take a sampled placeholder for an image
    plain = load_policy(folder, ModelArgs(image_input=True, attn_implementation="sdpa"), seed=1).model
    with torch.no_grad():
        got = policy(data.packed()).logprobs
        expected = []
        for number, sequence in enumerate(data.sequences):
            logits = plain(**data.inputs(number)).logits[0, :-1].log_softmax(-1)
            expected.append(logits.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0])
    assert torch.allclose(got, torch.cat(expected), atol=2e-5)


def test_a_sampled_placeholder_token_is_an_ordinary_token(folder: Path, policy: PackedVisionPolicy) -> None:
    data = Sequences(folder)
    assert torch.isfinite(policy(data.packed()).logprobs).all()


def test_logprobs_depend_on_images_and_the_tower_gets_gradients(folder: Path, policy: PackedVisionPolicy) -> None:
    data = Sequences(folder)
    x = data.packed()
    logprobs_before = policy(x).logprobs
    data.pngs[1] = [image(4, 4, 4)]
    other = policy(data.packed()).logprobs
    borders = [0, *np.cumsum([len(sequence) - 1 for sequence in data.sequences])]
    # of another sequence, experts are given other tokens, and so compute by other kernels
    changed = [not torch.allclose(logprobs_before[a:b], other[a:b], rtol=0, atol=1e-5) for a, b in pairwise(borders)]
    assert changed == [False, True, False]
    logprobs_before.sum().backward()
    untouched = [name for name, weight in policy.named_parameters() if weight.grad is None or not weight.grad.any()]
    policy.zero_grad()
    assert untouched == []


@pytest.mark.parametrize("target", ["all-linear", "q_proj,v_proj"])
def test_adapters_are_of_the_language_model(folder: Path, policy: PackedVisionPolicy, target: str) -> None:
    adapted = load_policy(folder, ModelArgs(image_input=True, lora_target=target), seed=1)
    x = Sequences(folder).packed()
    torch.testing.assert_close(adapted(x).logprobs, policy(x).logprobs, rtol=0, atol=0)
    adapted(x).logprobs.sum().backward()
    trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert trained
    assert all(".lora_" in name and "visual" not in name for name in trained)
    assert all(weight.grad is not None for name, weight in adapted.named_parameters() if name in trained)


def test_adapters_of_the_tower_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="qkv"):
        load_policy(folder, ModelArgs(image_input=True, lora_target="qkv"), seed=1)


def test_text_policy_rejects_images(tmp_path: Path) -> None:
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=1), WORDS)
    policy = load_policy(tmp_path, SEEING, seed=1)
    x = PackedInput.of(
        torch.tensor([1, 2, 3]), torch.tensor([0, 3]), torch.tensor([2]), images=(PromptImage(0, 1, image(1, 1, 1)),)
    )
    with pytest.raises(ValueError, match="no image input"):
        policy(x)


def test_text_alone_has_the_same_position_on_every_axis() -> None:
    packing = Packing.of(torch.tensor([0, 3, 5]))
    assert rope_positions(packing, (), (), 2)[:, 0].tolist() == [[0, 1, 2, 0, 1]] * 4


@pytest.mark.parametrize("change", [{"depth": 1}, {"embed_dim": 128}, {"num_heads": 1}, {"patch_size": 8}])
def test_each_setting_of_the_tower_is_written(tmp_path: Path, change: dict[str, int]) -> None:
    write_tiny_policy(tmp_path / "unchanged", TinyPolicyConfig(num_hidden_layers=2, vision=TinyVisionConfig()), WORDS)
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=2, vision=TinyVisionConfig(**change)), WORDS)
    ((key, value),) = change.items()
    before, after = (
        json.loads((path / "config.json").read_text())["vision_config"] for path in (tmp_path / "unchanged", tmp_path)
    )
    assert {name for name in after if after[name] != before[name]} == {key}
    assert after[key] == value
    png = image(1, 2, 2)
    assert ImageProcessor(tmp_path).count(png) == (16 if key == "patch_size" else 4)


def test_vision_tower_with_invalid_heads_is_rejected() -> None:
    with pytest.raises(ValidationError, match="not a multiple of 24"):
        TinyVisionConfig(num_heads=6)


def test_only_vision_policies_have_image_tokens() -> None:
    assert not set(VISION_TOKENS) & set(vocabulary(WORDS))

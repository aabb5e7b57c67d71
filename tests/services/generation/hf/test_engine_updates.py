"""Exchanges of weights in the engine by transformers: each token has the logprob of the weights that it is recorded with."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from offbeat.services.errors import WeightsError
from offbeat.services.messages.types import Completion, GenerateRequest
from tests.integration.policy_weights import mismatch, random_policy
from tests.services.generation.hf.policies import (
    FLOAT_NOISE,
    PROMPT,
    Policies,
    Start,
    config_of,
    with_arguments,
)

pytestmark = pytest.mark.slow


async def test_running_requests_keep_their_cache_and_continue_under_new_weights(start: Start) -> None:
    policies = await start()
    later: list[torch.Tensor] = []
    for request, completion in await run_through_updates(policies):
        before, *after = by_span(policies, request, completion)
        assert before.max() < FLOAT_NOISE
        later += after
    assert torch.cat(later).mean() > 1e-3, "keys and values of the prefix stay old: that is what `keep` means"
    before = policies.reused
    prompt = (await policies.play([PROMPT], max_new_tokens=1))[0][0].prompt
    assert policies.reused == before, f"a prompt of {len(prompt)} tokens found keys and values of mixed weights"


async def test_recompute_makes_every_token_match_its_version(start: Start) -> None:
    policies = await start(config_of(on_weight_update="recompute"))
    for request, completion in await run_through_updates(policies):
        for difference in by_span(policies, request, completion):
            assert difference.max() < FLOAT_NOISE


async def run_through_updates(policies: Policies) -> list[tuple[GenerateRequest, Completion]]:
    """Eight long requests that start under weights 0 and meet 1, 2 and 0 on their way."""
    first = await policies.load(0)
    requests = [policies.request(PROMPT[: 40 + 7 * i], max_new_tokens=300) for i in range(8)]
    running = [asyncio.create_task(policies.engine.generate(request, first)) for request in requests]
    for index in (1, 2, 0):
        await policies.generate(policies.request((5, 6, 7), max_new_tokens=40))
        await policies.load(index)
    completions = await asyncio.gather(*running)
    for completion in completions:
        assert [span.version - first for span in completion.versions] == [0, 1, 2, 3]
        assert [span.start for span in completion.versions] == [0, *(span.end for span in completion.versions[:-1])]
        assert completion.versions[-1].end == len(completion.token_ids) == 300
    return list(zip(requests, completions, strict=True))


def by_span(policies: Policies, request: GenerateRequest, completion: Completion) -> list[torch.Tensor]:
    return [
        mismatch(policies.models[index], request, completion)[span.start : span.end]
        for index, span in zip((0, 1, 2, 0), completion.versions, strict=True)
    ]


async def test_a_new_request_never_finds_what_older_weights_cached(start: Start) -> None:
    policies = await start()
    await policies.load(0)
    await policies.play([PROMPT])
    await policies.load(1)
    before = policies.reused
    ((request, completion),) = await policies.play([PROMPT], max_new_tokens=32)
    assert policies.reused == before
    assert mismatch(policies.models[1], request, completion).max() < FLOAT_NOISE


async def test_a_submitted_request_reaches_its_first_token_before_weights_change(start: Start) -> None:
    """The replica would sample it again otherwise."""
    policies = await start()
    first = await policies.load(0)
    await policies.engine.stage(policies.files[1])
    running = [asyncio.create_task(policies.generate(policies.request(PROMPT, max_new_tokens=9))) for _ in range(4)]
    await asyncio.sleep(0)
    await policies.engine.load(policies.files[1], first + 1)
    assert {(await each).versions[0].version for each in running} == {first}


async def test_until_it_is_loaded_a_staged_version_changes_nothing(start: Start) -> None:
    policies = await start()
    version = await policies.load(0)
    request = policies.request(PROMPT, max_new_tokens=200)
    running = asyncio.create_task(policies.generate(request))
    for index in (1, 2, 1):
        await policies.engine.stage(policies.files[index])
    completion = await running
    assert [tuple(span) for span in completion.versions] == [(0, 200, version)]
    assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE
    await policies.engine.load(policies.files[1], version + 1)
    request = policies.request(PROMPT, max_new_tokens=24)
    assert mismatch(policies.models[1], request, await policies.generate(request)).max() < FLOAT_NOISE


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
async def test_a_file_that_does_not_fit_is_refused_and_the_old_weights_serve(
    start: Start, tmp_path: Path, change: str
) -> None:
    policies = await start()
    await policies.load(0)
    tensors, name = load_file(policies.files[1]), "model.layers.1.mlp.up_proj.weight"
    tensor = tensors.pop(name)
    if change == "shape":
        tensors[name] = tensor.T.contiguous()
    elif change == "unknown":
        tensors |= {name: tensor, "model.layers.9.mlp.up_proj.weight": tensor.clone()}
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(WeightsError, match="up_proj"):
        await policies.engine.stage(tmp_path / "bad.safetensors")
    ((request, completion),) = await policies.play([PROMPT], max_new_tokens=8)
    assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE


@pytest.mark.parametrize("use_rslora", [False, True])
async def test_an_adapter_is_served_on_its_base_and_replaced(start: Start, tmp_path: Path, use_rslora: bool) -> None:
    policies = await start(config_of(strategy_args=with_arguments(max_lora_rank=4)))
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], use_rslora=use_rslora)
    peft = get_peft_model(random_policy(policies.folder, 0), adapters)
    for version in range(3):
        generator = torch.Generator().manual_seed(version)
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.15, generator=generator)
        folder = tmp_path / f"adapter-{version}"
        peft.save_pretrained(str(folder))
        settings = json.loads((folder / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (4, 8, use_rslora)
        if version == 0:
            (folder / "model.safetensors").symlink_to(policies.files[0])
        await policies.engine.stage(folder)
        await policies.engine.load(folder, version)
        policies.version = version
        ((request, completion),) = await policies.play([PROMPT], max_new_tokens=24)
        assert mismatch(peft, request, completion).max() < FLOAT_NOISE
        assert mismatch(policies.models[0], request, completion).max() > 0.05
    await policies.load(1)
    ((request, completion),) = await policies.play([PROMPT], max_new_tokens=24)
    assert mismatch(policies.models[1], request, completion).max() < FLOAT_NOISE

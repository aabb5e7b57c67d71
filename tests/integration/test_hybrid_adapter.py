"""An adapter of recurrent layers, served by the real engine: its logprobs are the trainer's, up to bfloat16.

Versions travel as they do in a run: from a policy with adapters through the transport.
"""

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.services.generation.config import EngineModelArgs, EngineStrategy, GenerationConfig, VllmConfig
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.types import Completion, GenerateRequest, Manifest, Sampling
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.transports.factory import make_transport, remove_all
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.lora import unmerged_weights
from offbeat.trainer.models.packing import PackedInput
from tests.integration.hybrid_policy import write_hybrid

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("engine_forks")]

CONFIG = GenerationConfig(
    model_args=EngineModelArgs(dtype="bfloat16"),
    kv_cache_gib=0.1,
    strategy_args=EngineStrategy(strategy_config=VllmConfig(max_lora_rank=4)),
)
ARGS = ModelArgs(lora_target="all-linear", lora_rank=3, lora_alpha=5.0)
PROMPT = tuple(range(4, 28)) * 4


def adapted(folder: Path, seed: int) -> Any:
    """A policy whose adapters have learnt something."""
    policy = load_policy(folder, ARGS, seed=0).eval()
    torch.manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0.0, 0.3)
    return policy


def mismatch(policy: Any, request: GenerateRequest, completion: Completion) -> float:
    assert not completion.error, completion.error
    tokens = torch.tensor((*request.prompt, *completion.token_ids))
    positions = torch.arange(len(request.prompt), len(tokens))
    with torch.no_grad():
        own = policy(PackedInput.of(tokens, torch.tensor([0, len(tokens)]), positions)).logprobs
    return float((own - torch.tensor(completion.logprobs)).abs().mean())


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5"])
async def test_logprobs_of_an_adapter_on_recurrent_layers_are_the_trainers(kind: str, tmp_path: Path) -> None:
    environment, folder = dict(os.environ), write_hybrid(tmp_path / "policy", kind)
    engine = await VllmEngine.start(CONFIG, folder, sequence_length=512, seed=1)
    policies = [adapted(folder, seed) for seed in range(2)]
    of = {"r": ARGS.lora_rank, "lora_alpha": ARGS.adapter_alpha, "target_modules": ARGS.lora_targets}
    learner, replica = (make_transport(WeightsConfig(), "hybrid", folder, adapter=each) for each in (of, {}))
    try:
        for version, index in enumerate((0, 1, 0)):
            weights = unmerged_weights(policies[index], "model.")
            parts = learner.copies((part.name.removeprefix("model."), part.tensor()) for part in weights)
            s = learner.stage(version, 1, parts)
            manifest = Manifest("hybrid", version, 0, 1, "shm", s.location, s.digest, s.num_bytes, (), 0.0, s.anchor)
            with replica.fetch(manifest) as path:
                await engine.stage(path)
                await engine.load(path, version)
            request = GenerateRequest(f"r{version}", PROMPT, Sampling(max_new_tokens=48))
            completion = await engine.generate(request, version)
            assert mismatch(policies[index], request, completion) < 0.01
            assert mismatch(policies[1 - index], request, completion) > 0.05
    finally:
        remove_all(replica)
        engine.close()
        del engine
        await asyncio.sleep(0)
        gc.collect()  # vLLM's client wants to be gone before the interpreter is
        os.environ.clear()
        os.environ.update(environment)

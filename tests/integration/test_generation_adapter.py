"""The real engine with an adapter of its own: its logprobs are the trainer's, before, during and after updates.

Versions travel as they do in a run: from a policy with adapters through the transport. One engine for the module.
"""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.services.generation.config import EngineModelArgs, EngineStrategy, GenerationConfig, VllmConfig
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.types import (
    Completion,
    GenerateRequest,
    Manifest,
    Sampling,
)
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.transports.base import Transport
from offbeat.services.weights.transports.factory import make_transport, remove_all
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.lora import unmerged_weights
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedPolicy
from tests.integration.policy_weights import write_policy

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("engine_forks"),
]

FLOAT_NOISE = 5e-5
CONFIG = GenerationConfig(
    model_args=EngineModelArgs(dtype="float32"),
    kv_cache_gib=0.25,
    on_weight_update="recompute",
    strategy_args=EngineStrategy(strategy_config=VllmConfig(max_lora_rank=4)),
)
ARGS = [
    ModelArgs(lora_target="all-linear", lora_rank=3, lora_alpha=5.0),
    ModelArgs(lora_target="all-linear", lora_rank=3, lora_alpha=5.0),
    ModelArgs(lora_target="q_proj,v_proj,down_proj", lora_rank=4, use_rslora=True),
]
"""Two versions of one run, and one of another run with another base."""
PROMPT = tuple(range(4, 28)) * 4


def settings(args: ModelArgs) -> dict[str, object]:
    scale = {"r": args.lora_rank, "lora_alpha": args.adapter_alpha, "use_rslora": args.use_rslora}
    return {**scale, "target_modules": args.lora_targets}


def adapted(folder: Path, index: int) -> PackedPolicy:
    """A policy whose adapters have learnt something."""
    policy = load_policy(folder, ARGS[index], seed=index // 2).eval()
    torch.manual_seed(index)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0.0, 0.3)
    return policy


def mismatch(policy: PackedPolicy, request: GenerateRequest, completion: Completion) -> Tensor:
    """[tokens] absolute difference between the engine's logprobs and the trainer's."""
    assert not completion.error, completion.error
    tokens = torch.tensor(request.prompt + completion.token_ids)
    positions = torch.arange(len(request.prompt), len(tokens))
    with torch.no_grad():
        said = policy(PackedInput.of(tokens, torch.tensor([0, len(tokens)]), positions)).logprobs
    return (said - torch.tensor(completion.logprobs)).abs()


class Served:
    """Policies with adapters, and the engine that serves one of them."""

    def __init__(self, engine: VllmEngine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.policies = [adapted(folder, index) for index in range(3)]
        self.learners = [self.end(folder, settings(args)) for args in (ARGS[0], ARGS[2])]
        self.replica = self.end(folder, {})
        self.version = -1

    def end(self, folder: Path, of: dict[str, object]) -> Transport:
        return make_transport(WeightsConfig(), "adapting", folder, adapter=of)

    def publish(self, index: int) -> Manifest:
        learner = self.learners[index // 2]
        parts = (
            (part.name.removeprefix("model."), part.tensor())
            for part in unmerged_weights(self.policies[index], "model.")
        )
        s = learner.stage(self.version + 1, 1, learner.copies(parts))
        return Manifest("adapting", self.version + 1, 0, 1, "shm", s.location, s.digest, s.num_bytes, (), 0.0, s.anchor)

    async def load(self, index: int) -> int:
        """Serve these weights as a new version."""
        manifest = self.publish(index)
        with self.replica.fetch(manifest) as folder:
            await self.engine.stage(folder)
            await self.engine.load(folder, manifest.version)
        self.version = manifest.version
        return self.version

    async def sample(self, prompt: tuple[int, ...], num: int) -> tuple[GenerateRequest, Completion]:
        request = GenerateRequest(f"r{self.version}-{len(prompt)}-{num}", prompt, Sampling(max_new_tokens=num))
        return request, await self.engine.generate(request, self.version)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = write_policy(tmp_path_factory.mktemp("policy"))
    engine = await VllmEngine.start(CONFIG, folder, sequence_length=512, seed=1)
    served = Served(engine, folder)
    replica = served.replica
    try:
        yield served
    finally:
        engine.close()
        remove_all(replica)
        vars(served).clear()
        del engine
        await asyncio.sleep(0)
        gc.collect()  # vLLM's client wants to be gone before the interpreter is


async def test_logprobs_of_a_served_adapter_are_those_of_the_trainer(served: Served) -> None:
    for index in (0, 1, 2, 0):
        version = await served.load(index)
        request, completion = await served.sample(PROMPT, 48)
        assert [tuple(span) for span in completion.versions] == [(0, 48, version)]
        assert mismatch(served.policies[index], request, completion).max() < FLOAT_NOISE
        assert mismatch(served.policies[(index + 1) % 3], request, completion).max() > 0.1


async def test_a_running_request_switches_adapters_and_records_the_token(served: Served) -> None:
    first = await served.load(0)
    running = [asyncio.create_task(served.sample(PROMPT[: 40 + 7 * i], 300)) for i in range(4)]
    for index in (1, 0):
        await served.sample((5, 6, 7), 40)
        await served.load(index)
    for request, completion in await asyncio.gather(*running):
        assert [span.version - first for span in completion.versions] == [0, 1, 2]
        assert completion.versions[-1].end == 300
        for index, span in zip((0, 1, 0), completion.versions, strict=True):
            difference = mismatch(served.policies[index], request, completion)[span.start : span.end]
            assert difference.max() < FLOAT_NOISE


async def test_a_new_request_never_finds_what_an_older_adapter_cached(served: Served) -> None:
    keeping = VllmEngine(served.engine.llm, CONFIG.model_copy(update={"on_weight_update": "keep"}))
    served.engine, recomputing = keeping, served.engine
    try:
        await served.load(0)
        await served.sample(PROMPT, 16)
        old = await served.load(0)
        await served.sample(PROMPT, 17)
        await served.load(1)
        request, completion = await served.sample(PROMPT, 32)
        assert mismatch(served.policies[1], request, completion).max() < FLOAT_NOISE
        stale = await keeping.generate(request, old)
        assert mismatch(served.policies[1], request, stale).max() > 1e-3, "the cache was not there to be found"
    finally:
        served.engine = recomputing


async def test_an_adapter_of_a_layer_that_the_engine_lacks_is_refused(served: Served) -> None:
    """The last test: an engine whose update failed in a pause must not be used any more. vLLM itself passes it over."""
    await served.load(0)
    with served.replica.fetch(served.publish(1)) as folder:
        path = folder / "adapter_model.safetensors"
        tensors = {name.replace("layers.0.", "layers.9."): tensor for name, tensor in load_file(path).items()}
        path.unlink()
        save_file(tensors, path)
        with pytest.raises(Exception, match=r"layers\.9\.[a-z_.]+ takes no adapter here"):
            await served.engine.load(folder, 1000)

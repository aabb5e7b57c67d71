"""Several adapters in one engine, of each kind: a sequence has the logprobs of its own, whatever is batched with it."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, get_peft_model

from offbeat.services.chat.stops import load_decoder
from offbeat.services.errors import GenerationError, WeightsError, WeightsRefusedError
from offbeat.services.generation.config import EngineModelArgs, GenerationConfig
from offbeat.services.generation.hf.engine import HfEngine
from offbeat.services.generation.vllm.adapters import VllmAdapterEngine
from offbeat.services.generation.vllm.shared import RunEngine, VllmSharedEngine
from offbeat.services.messages.types import Completion, GenerateRequest, Sampling
from offbeat.services.weights.transports.lora import BASE_DIGEST
from tests.integration.policy_weights import mismatch, random_policy, save_weights, write_policy

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("engine_forks"),
]

CONFIG = GenerationConfig(model_args=EngineModelArgs(dtype="float32"), kv_cache_gib=0.25)
LENGTH, MAX_RANK = 512, 8
FLOAT_NOISE = 5e-5
PROMPT = tuple(range(4, 28)) * 3
TARGETS = (["q_proj", "up_proj", "lm_head"], ["v_proj"], ["down_proj", "lm_head"])


def make_adapter(policy: Path, folder: Path, targets: list[str], seed: int, base: int = 0) -> Any:
    """Save an adapter of the base with weights of a seed; return the model with it."""
    config = LoraConfig(r=2 + seed, lora_alpha=8, target_modules=targets)
    model = get_peft_model(random_policy(policy, base), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.15, generator=generator)
    model.save_pretrained(str(folder))
    return model.eval()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["hf_infer", "vllm"])
async def engine(request: pytest.FixtureRequest, policy: Path) -> AsyncIterator[HfEngine | VllmAdapterEngine]:
    environment = dict(os.environ)
    if request.param == "hf_infer":
        engine = await HfEngine.start(CONFIG, policy, sequence_length=LENGTH, seed=1)
    else:
        engine = await VllmAdapterEngine.start(
            CONFIG, policy, sequence_length=LENGTH, seed=1, max_adapters=3, max_lora_rank=MAX_RANK, max_top=4
        )
    await engine.load(save_weights(random_policy(policy, 0), policy / "base.safetensors"), 0)
    yield engine
    engine.close()
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()


Engine = HfEngine | VllmAdapterEngine


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def drop_adapters(engine: Engine) -> AsyncIterator[None]:
    yield
    for name in ("a", "b", "c", "a0", "a1", "a2"):
        await engine.drop_adapter(name)


async def generate(engine: Engine, adapter: str, **sampling: Any) -> tuple[GenerateRequest, Completion]:
    request = GenerateRequest("r", PROMPT, Sampling(**sampling))
    return request, (await engine.generate_with_top(request, adapter, 0)).completion


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")
async def test_sequences_of_a_pass_have_the_logprobs_of_their_adapters(
    engine: Engine, policy: Path, tmp_path: Path
) -> None:
    """Twice: equal prompts of other adapters reuse none of each other's keys and values, and those of the same do."""
    models = {"": random_policy(policy, 0)}
    for i, targets in enumerate(TARGETS):
        models[f"a{i}"] = make_adapter(policy, tmp_path / f"a{i}", targets, i)
        await engine.put_adapter(f"a{i}", tmp_path / f"a{i}", 10 + i)
    for _ in range(2):
        names = [name for name in models for _ in range(2)]
        answers = await asyncio.gather(*(generate(engine, name, max_new_tokens=12) for name in names))
        for name, (request, completion) in zip(names, answers, strict=True):
            assert mismatch(models[name], request, completion).max() < FLOAT_NOISE
            assert all(mismatch(models[other], request, completion).max() > 0.05 for other in models if other != name)
            assert {span.version for span in completion.versions} == {10 + int(name[1:]) if name else 0}
    if isinstance(engine, HfEngine):
        assert engine.reused_tokens >= 3 * len(models) * 64


async def test_sampled_tokens_have_the_top_tokens_of_their_places(engine: Engine, policy: Path, tmp_path: Path) -> None:
    model = make_adapter(policy, tmp_path / "a", ["q_proj", "lm_head"], 1)
    await engine.put_adapter("a", tmp_path / "a", 1)
    request = GenerateRequest("r", PROMPT, Sampling(max_new_tokens=6, temperature=0.5))
    (completion, top), _ = await asyncio.gather(
        engine.generate_with_top(request, "a", 4), generate(engine, "a", max_new_tokens=6)
    )
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    best, ids = (logits / 0.5).log_softmax(-1).topk(4)
    assert [list(each.ids) for each in top] == ids.tolist()
    torch.testing.assert_close(torch.tensor([each.logprobs for each in top]), best, rtol=1e-5, atol=FLOAT_NOISE)


async def test_an_answer_ends_with_its_stop_string(engine: Engine, policy: Path) -> None:
    _, completion = await generate(engine, "", max_new_tokens=400, stop_strings=("1 w",))
    decode = load_decoder(policy)
    assert "1 w" in decode(completion.token_ids)
    assert "1 w" not in decode(completion.token_ids[:-1])
    count = len(completion.token_ids)
    assert len(completion.logprobs) == completion.versions[-1].end == count < 400


async def test_an_adapter_is_replaced_under_running_requests(engine: Engine, policy: Path, tmp_path: Path) -> None:
    """Tokens know their version, and later requests reuse nothing of the older one."""
    models = [make_adapter(policy, tmp_path / f"v{i}", ["q_proj", "v_proj"], i) for i in range(2)]
    await engine.put_adapter("a", tmp_path / "v0", 0)
    running = asyncio.create_task(generate(engine, "a", max_new_tokens=400))
    await generate(engine, "a", max_new_tokens=2)  # the other has begun, too
    await engine.put_adapter("a", tmp_path / "v1", 1)
    request, completion = await generate(engine, "a", max_new_tokens=8)
    assert mismatch(models[1], request, completion).max() < FLOAT_NOISE
    _, long = await running
    assert [span.version for span in long.versions] == [0, 1]
    assert len(long.token_ids) == 400


async def test_a_prompt_is_scored_under_its_adapter_beside_running_requests(
    engine: Engine, policy: Path, tmp_path: Path
) -> None:
    models = {"": random_policy(policy, 0)}
    for i, targets in enumerate(TARGETS):
        models[f"a{i}"] = make_adapter(policy, tmp_path / f"a{i}", targets, i)
        await engine.put_adapter(f"a{i}", tmp_path / f"a{i}", 0)
    running = asyncio.create_task(generate(engine, "a0", max_new_tokens=60))
    for name, model in models.items():
        with torch.no_grad():
            rows = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
        expected = rows.gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
        scores = await engine.score(PROMPT, name, num_top=3)
        torch.testing.assert_close(torch.tensor(scores.logprobs), expected, rtol=1e-5, atol=FLOAT_NOISE)
        best = torch.tensor([each.logprobs for each in scores.top])
        torch.testing.assert_close(best, rows.topk(3).values, rtol=1e-5, atol=FLOAT_NOISE)
        ids = torch.tensor([each.ids for each in scores.top])
        torch.testing.assert_close(rows.gather(-1, ids), best, rtol=1e-5, atol=FLOAT_NOISE)
    request, completion = await running
    assert mismatch(models["a0"], request, completion).max() < FLOAT_NOISE
    with pytest.raises(GenerationError, match="not loaded"):
        await engine.score(PROMPT, "unknown")


async def test_an_unknown_adapter_is_refused_and_a_dropped_one_is_unknown(
    engine: Engine, policy: Path, tmp_path: Path
) -> None:
    make_adapter(policy, tmp_path / "b", ["q_proj"], 0)
    _, completion = await generate(engine, "b")
    assert completion.error == "adapter b is not loaded"
    await engine.put_adapter("b", tmp_path / "b", 0)
    _, completion = await generate(engine, "b", max_new_tokens=2)
    assert not completion.error
    await engine.drop_adapter("b")
    _, completion = await generate(engine, "b")
    assert completion.error == "adapter b is not loaded"


async def test_an_adapter_of_another_model_is_refused_and_the_engine_serves_on(
    engine: Engine, policy: Path, tmp_path: Path
) -> None:
    """More often than there are slots, one of which vLLM on a CPU takes for requests without adapter."""
    other = write_policy(tmp_path / "other", hidden_size=128)
    model = make_adapter(policy, tmp_path / "c", ["q_proj"], 0)
    await engine.put_adapter("c", tmp_path / "c", 0)
    make_adapter(other, tmp_path / "d", ["q_proj"], 0)
    with pytest.raises(WeightsError, match=r"64.*128|128.*64"):
        await engine.put_adapter("c", tmp_path / "d", 1)
    request, completion = await generate(engine, "c", max_new_tokens=4)
    assert mismatch(model, request, completion).max() < FLOAT_NOISE
    assert [span.version for span in completion.versions] == [0]
    for i in range(4):
        with pytest.raises(WeightsError):
            await engine.put_adapter(f"d{i}", tmp_path / "d", 1)
    for name, expected in (("c", model), ("", random_policy(policy, 0))):
        request, completion = await generate(engine, name, max_new_tokens=4)
        assert mismatch(expected, request, completion).max() < FLOAT_NOISE


def deliver(policy: Path, folder: Path, base: int, adapter: int) -> Any:
    """Write what a run's replica fetches: an adapter, and its base with weights of a seed; return the model."""
    model = make_adapter(policy, folder, ["q_proj", "up_proj"], adapter, base)
    save_weights(random_policy(policy, base), folder / "model.safetensors")
    (folder / BASE_DIGEST).write_text(f"base {base}")
    return model


async def ask(
    run: RunEngine, version: int, request_id: str = "r", **sampling: Any
) -> tuple[GenerateRequest, Completion]:
    request = GenerateRequest(request_id, PROMPT, Sampling(**sampling))
    return request, await run.generate(request, version)


async def test_runs_on_one_engine_sample_by_their_own_versions(engine: Engine, policy: Path, tmp_path: Path) -> None:
    """Their requests have equal ids; an update of one run neither ends nor renames a version of the other one."""
    if isinstance(engine, HfEngine):
        pytest.skip("serves one run at a time")
    shared = VllmSharedEngine(engine)
    one, two = shared.salted("one"), shared.salted("two")
    first, second, other = (deliver(policy, tmp_path / f"{i}", 0, i) for i in range(3))
    await one.load(tmp_path / "0", 7)
    await two.load(tmp_path / "2", 3)
    long = asyncio.create_task(ask(two, 3, max_new_tokens=300))
    running = asyncio.create_task(ask(one, 7, max_new_tokens=300))
    await asyncio.gather(*(ask(run, 0, "short", max_new_tokens=2) for run in (one, two)))
    times = await one.load(tmp_path / "1", 8)
    assert 0 < times.load_s < times.pause_s
    request, completion = await ask(one, 8, max_new_tokens=8)
    assert [tuple(span) for span in completion.versions] == [(0, 8, 8)]
    assert mismatch(second, request, completion).max() < FLOAT_NOISE
    request, completion = await running
    assert [span.version for span in completion.versions] == [7, 8]
    assert mismatch(first, request, completion)[: completion.versions[0].end].max() < FLOAT_NOISE
    request, completion = await long
    assert [tuple(span) for span in completion.versions] == [(0, 300, 3)]
    assert mismatch(other, request, completion).max() < FLOAT_NOISE
    for name in ("one", "two"):
        await shared.release(name)


async def test_a_run_with_another_base_waits_until_the_others_have_left(
    engine: Engine, policy: Path, tmp_path: Path
) -> None:
    if isinstance(engine, HfEngine):
        pytest.skip("serves one run at a time")
    shared = VllmSharedEngine(engine)
    one, two = shared.salted("one"), shared.salted("two")
    model = deliver(policy, tmp_path / "a", 0, 0)
    stranger = deliver(policy, tmp_path / "b", 5, 0)
    await one.load(tmp_path / "a", 0)
    with pytest.raises(WeightsRefusedError, match=r"not that of the 1 run"):
        await two.load(tmp_path / "b", 0)
    await shared.release("one")
    await shared.release("two")
    one, two = shared.salted("one"), shared.salted("two")
    both = await asyncio.gather(one.load(tmp_path / "a", 0), two.load(tmp_path / "b", 0), return_exceptions=True)
    assert isinstance(both[1], WeightsRefusedError), both
    with pytest.raises(WeightsRefusedError, match="no run's whole weights"):
        await two.load(tmp_path / "b" / "model.safetensors", 0)
    request, completion = await ask(one, 0, max_new_tokens=4)
    assert mismatch(model, request, completion).max() < FLOAT_NOISE
    running = asyncio.create_task(ask(one, 0, max_new_tokens=100))
    await ask(one, 0, "short", max_new_tokens=2)
    await shared.release("one")
    assert running.done(), "its adapter is dropped when no request uses it"
    await two.load(tmp_path / "b", 0)
    request, completion = await ask(two, 0, max_new_tokens=4)
    assert mismatch(stranger, request, completion).max() < FLOAT_NOISE
    await shared.release("two")
    await engine.load(save_weights(random_policy(policy, 0), policy / "base.safetensors"), 0)

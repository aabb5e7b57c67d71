"""The engine by transformers: its logprobs are those of a plain forward, whatever it batches, reuses and exchanges."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.services.chat.stops import load_decoder
from offbeat.services.errors import GenerationError, RetryableError
from offbeat.services.generation.config import EngineModelArgs
from offbeat.services.generation.hf import scheduler
from offbeat.services.generation.hf.engine import HfEngine
from offbeat.services.generation.kv_cache import bytes_per_token
from offbeat.services.generation.tenancy import read_architecture
from offbeat.services.messages.types import FinishReason, GenerateRequest, PromptImage, Sampling, VersionSpan
from tests.integration.policy_weights import mismatch, save_weights, write_policy
from tests.services.generation.hf.policies import (
    CONTEXT,
    FLOAT_NOISE,
    PROMPT,
    Start,
    config_of,
    with_arguments,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("keep", [True, False])
async def test_turns_of_sessions_have_the_logprobs_of_a_plain_forward(start: Start, keep: bool) -> None:
    """Ragged batches, prefixes reused between turns and among siblings, and an update between turns."""
    policies = await start(config_of(strategy_args=with_arguments(enable_prefix_caching=keep)))
    prompts = [PROMPT[: 20 + 3 * (i // 4)] for i in range(24)]
    for turn, index in enumerate((0, 0, 0, 1, 1)):
        if turn in (0, 3):
            await policies.load(index)
        before = policies.reused
        played = await policies.play(prompts, max_new_tokens=5 + turn)
        for request, completion in played:
            assert [tuple(span) for span in completion.versions] == [(0, 5 + turn, policies.version)]
            assert mismatch(policies.models[index], request, completion).max() < FLOAT_NOISE
        reused = policies.reused - before
        assert sum(completion.cached_tokens for _, completion in played) == reused
        computed_before = sum(len(prompt) for prompt in prompts)
        if not keep or turn == 3:
            assert reused <= (keep and computed_before)
        elif turn:
            # all but the last sampled token of each earlier turn, and what the env said since
            assert reused == sum(len(request.prompt) - 4 for request, _ in played)
        prompts = [r.prompt + c.token_ids + (5, 6 + i % 3, 7) for i, (r, c) in enumerate(played)]


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 0.0}, {"temperature": 1.3, "top_k": 5}]
)
async def test_logprobs_are_of_the_sampled_distribution(start: Start, sampling: dict[str, Any]) -> None:
    policies = await start()
    for index in (0, 1):
        version = await policies.load(index)
        request = policies.request(PROMPT, max_new_tokens=48, **sampling)
        completion = await policies.generate(request)
        assert completion.finish_reason is FinishReason.LENGTH
        assert [tuple(span) for span in completion.versions] == [(0, 48, version)]
        top_k = sampling.get("top_k")
        assert mismatch(policies.models[index], request, completion, top_k=top_k).max() < FLOAT_NOISE
        assert mismatch(policies.models[1 - index], request, completion).max() > 0.1


async def test_greedy_and_sampled_requests_share_a_batch(start: Start) -> None:
    policies = await start()
    await policies.load(0)
    greedy = policies.request(PROMPT[:30], temperature=0.0, top_k=3, max_new_tokens=20)
    sampled = [policies.request(PROMPT[: 31 + i], temperature=0.5 + i, max_new_tokens=20) for i in range(3)]
    answers = await asyncio.gather(*map(policies.generate, (greedy, *sampled)))
    for request, completion in zip((greedy, *sampled), answers, strict=True):
        assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE
    tokens = torch.tensor([greedy.prompt + answers[0].token_ids])
    with torch.no_grad():
        best = policies.models[0](tokens).logits[0, 29:-1].argmax(-1)
    assert best.tolist() == list(answers[0].token_ids)


async def test_a_seed_gives_the_same_answers_again(start: Start) -> None:
    answers: list[tuple[int, ...]] = []
    for seed in (1, 1, 2):
        policies = await start(seed=seed)
        await policies.load(0)
        answers.append((await policies.generate(policies.request(PROMPT, max_new_tokens=32))).token_ids)
    assert answers[0] == answers[1] != answers[2]


async def test_a_stop_token_is_kept_and_ends_the_answer(start: Start) -> None:
    policies = await start()
    await policies.load(0)
    completion = await policies.generate(policies.request(PROMPT, max_new_tokens=400, stop_token_ids=(3, 9)))
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids[-1] in (3, 9)
    assert not {3, 9} & set(completion.token_ids[:-1])
    assert len(completion.logprobs) == len(completion.token_ids)


async def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(start: Start) -> None:
    """Also where it begins in tokens that another engine sampled; a stop token counts beside it."""
    policies = await start()
    await policies.load(0)
    decode = load_decoder(policies.folder)
    for text, num_answered in (("1 w", 0), ("4", 0), ("3 w", 1)):
        request = policies.request(PROMPT, max_new_tokens=380, stop_strings=(text, "never"))
        request = replace(request, num_answered=num_answered)
        completion = await policies.generate(request)
        assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE
        assert completion.finish_reason is FinishReason.STOP
        answer = [*request.prompt[len(request.prompt) - num_answered :], *completion.token_ids]
        assert text in decode(answer)
        assert text not in decode(answer[:-1])
        assert completion.versions == (VersionSpan(0, len(completion.token_ids), policies.version),)
    begun = policies.request((*PROMPT, 9), max_new_tokens=40, stop_strings=(" w", " <", " u", " a", " s"))
    assert len((await policies.generate(replace(begun, num_answered=1))).token_ids) == 1, "w2, and a next word"
    assert len((await policies.generate(begun)).token_ids) == 2
    both = policies.request(PROMPT, max_new_tokens=380, stop_strings=("4 w1",), stop_token_ids=tuple(range(4, 32)))
    assert len((await policies.generate(both)).token_ids) < 20


async def test_an_answer_ends_with_the_context(start: Start) -> None:
    policies = await start()
    await policies.load(0)
    request = policies.request((PROMPT * 6)[: CONTEXT - 3], max_new_tokens=50)
    completion = await policies.generate(request)
    assert (len(completion.token_ids), completion.finish_reason) == (3, FinishReason.LENGTH)
    assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE


async def test_what_the_engine_cannot_take_is_refused_and_harms_no_other_request(start: Start) -> None:
    policies = await start()
    await policies.load(0)
    for prompt in ((1,) * CONTEXT, (32,), (-1,), ()):
        completion = await policies.generate(policies.request(prompt))
        assert completion.error
        assert completion.token_ids == ()
    image = GenerateRequest("image", (1, 2), Sampling(), images=(PromptImage(0, 1, b""),))
    assert "reads none" in (await policies.generate(image)).error
    assert not (await policies.generate(policies.request((1,)))).error


async def test_an_aborted_request_frees_its_place(start: Start) -> None:
    policies = await start(config_of(strategy_args=with_arguments(max_num_seqs=2)))
    await policies.load(0)
    long = [asyncio.create_task(policies.generate(policies.request(PROMPT[:9], max_new_tokens=500))) for _ in range(3)]
    await wait_until(lambda: policies.engine.num_running == 2)
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    await policies.play([PROMPT])
    assert policies.engine.num_running == 0


async def test_sessions_beyond_the_budget_evict_the_least_recently_used(start: Start, tmp_path: Path) -> None:
    """The cache holds four contexts; six sessions play two turns, then the latest four find theirs."""
    token = bytes_per_token(read_architecture(write_policy(tmp_path)), 4)
    policies = await start(config_of(kv_cache_gib=4.5 * CONTEXT * token / 2**30))
    await policies.load(0)
    prompts = [(4 + i, *PROMPT[:39]) for i in range(6)]
    for _ in range(2):
        for place, prompt in enumerate(prompts):
            ((request, completion),) = await policies.play([prompt], max_new_tokens=4)
            assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE
            prompts[place] = request.prompt + completion.token_ids
    before = policies.reused
    await policies.play([prompts[5], prompts[2]], max_new_tokens=1)
    assert policies.reused - before == len(prompts[5]) + len(prompts[2]) - 2
    assert await policies.play(prompts * 3, max_new_tokens=2), "18 at once wait for four rows"


async def test_a_cache_that_holds_no_sequence_is_refused(tmp_path: Path) -> None:
    folder = write_policy(tmp_path)
    with pytest.raises(GenerationError, match=r"kv_cache_gib.*hold no sequence of 512 tokens"):
        await HfEngine.start(config_of(kv_cache_gib=0.0001), folder, sequence_length=CONTEXT, seed=0)


async def test_a_long_prompt_is_computed_in_parts_between_which_others_sample(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MAX_TOKENS_PER_PASS", 64)
    policies = await start()
    await policies.load(0)
    short = policies.request(PROMPT[:5], max_new_tokens=60)
    running = asyncio.create_task(policies.generate(short))
    await wait_until(lambda: policies.engine.num_running == 1)
    for request, completion in [
        *await policies.play([(PROMPT * 5)[: 300 + i] for i in range(3)], max_new_tokens=3),
        (short, await running),
    ]:
        assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE


async def test_an_engine_whose_pass_fails_is_dead(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = await start()
    await policies.load(0)
    await policies.engine.check()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(policies.engine, "_compute", fail)
    with pytest.raises(RetryableError, match="out of memory"):
        await policies.generate(policies.request(PROMPT))
    with pytest.raises(RetryableError, match="out of memory"):
        await policies.engine.check()
    with pytest.raises(RetryableError, match="out of memory"):
        await policies.generate(policies.request(PROMPT))


async def test_a_closed_engine_fails_what_it_was_asked(start: Start) -> None:
    """Of a request that runs, and of one in the same iteration of the event loop."""
    policies = await start()
    await policies.load(0)
    running = asyncio.create_task(policies.generate(policies.request(PROMPT, max_new_tokens=400)))
    await wait_until(lambda: policies.engine.num_running == 1)
    policies.engine.close()
    for answer in (policies.generate(policies.request(PROMPT)), running):
        with pytest.raises(RetryableError, match="closed"):
            await asyncio.wait_for(answer, 30)


async def test_logits_that_are_not_finite_fail_their_request_alone(start: Start, tmp_path: Path) -> None:
    """Keys and values that are no numbers must not reach later requests through masked places."""
    policies = await start()
    await policies.load(0)
    tensors = load_file(policies.files[1])
    tensors["model.layers.0.self_attn.v_proj.weight"][:] = torch.nan
    save_file(tensors, tmp_path / "nan.safetensors")
    await policies.engine.stage(tmp_path / "nan.safetensors")
    policies.version += 1
    await policies.engine.load(tmp_path / "nan.safetensors", policies.version)
    for _, completion in await policies.play([PROMPT[: 20 + i] for i in range(4)]):
        assert completion.error == "the logits are not finite"
    await policies.load(0)
    for request, completion in await policies.play([PROMPT[: 9 + i] for i in range(4)], max_new_tokens=4):
        assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "llama": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 24},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24, "layer_types": None},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_other_architectures_have_the_logprobs_of_a_plain_forward(tmp_path: Path, name: str, dtype: Any) -> None:
    """Grouped heads, sliding windows and tied heads."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
    architecture = AutoConfig.for_model(name, vocab_size=32, **{**sizes, **ARCHITECTURES[name]})
    architecture.save_pretrained(tmp_path)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(architecture).float().eval()
    path = save_weights(model, tmp_path / "model.safetensors")
    config = config_of(model_args=EngineModelArgs(dtype=dtype))
    engine = await HfEngine.start(config, tmp_path, sequence_length=CONTEXT, seed=1)
    await engine.stage(path)
    await engine.load(path, 0)
    bound = FLOAT_NOISE if dtype == "float32" else 0.1
    for turn in range(2):
        prompts = [tuple((7 * i + j * j) % 32 for j in range(10 + 9 * i)) for i in range(6)]
        requests = [
            GenerateRequest(f"{turn}-{i}", prompt, Sampling(max_new_tokens=12)) for i, prompt in enumerate(prompts)
        ]
        for request, completion in zip(
            requests, await asyncio.gather(*[engine.generate(r, 0) for r in requests]), strict=True
        ):
            assert mismatch(model, request, completion).max() < bound
    engine.close()

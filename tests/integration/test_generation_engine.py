"""The real engine: its logprobs are the model's, before, during and after updates; a bad file is refused.

One engine for the module; each test loads the weights that it needs.
"""

import asyncio
import gc
import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file

from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.chat.stops import load_decoder
from offbeat.services.chat.template import load_chat_template
from offbeat.services.gateway.server import Gateway
from offbeat.services.gateway.session import EpisodeSession, SessionLimits
from offbeat.services.generation.config import EngineModelArgs, EngineStrategy, GenerationConfig, VllmConfig
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.generation.vllm.sessions import Sessions
from offbeat.services.messages.types import (
    Completion,
    EpisodeKind,
    EpisodeTask,
    FinishReason,
    GenerateRequest,
    Sampling,
    Segment,
    VersionSpan,
)
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.runners import EnvSpec, InlineEnv
from offbeat.services.rollout.episodes.episode import EpisodePlan, play
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedPolicy
from tests.integration.policy_weights import (
    mismatch,
    random_policy,
    save_weights,
    write_policy,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("engine_forks"),
]

logger = logging.getLogger(__name__)

FLOAT_NOISE = 5e-5
CONFIG = GenerationConfig(model_args=EngineModelArgs(dtype="float32"), kv_cache_gib=0.25, keep_sessions=True)


class Policies:
    """Three sets of weights, and the engine that serves one of them."""

    def __init__(self, engine: VllmEngine, folder: Path, files: Path) -> None:
        self.engine, self.folder = engine, folder
        self.recomputing = VllmEngine(engine.llm, CONFIG.model_copy(update={"on_weight_update": "recompute"}))
        self.models = [random_policy(folder, seed) for seed in range(3)]
        self.files = [save_weights(model, files / f"{i}.safetensors") for i, model in enumerate(self.models)]
        self.version = -1
        self._requests = 0

    async def load(self, index: int, engine: VllmEngine | None = None) -> int:
        """Serve these weights as a new version."""
        await self.stage(index, engine)
        return await self.load_at_once(index, engine)

    async def stage(self, index: int, engine: VllmEngine | None = None) -> None:
        await (engine or self.engine).stage(self.files[index])

    async def load_at_once(self, index: int, engine: VllmEngine | None = None) -> int:
        """Load what was staged, or else the file, as a new version."""
        self.version += 1
        await (engine or self.engine).load(self.files[index], self.version)
        return self.version

    def request(self, prompt: tuple[int, ...], **sampling: Any) -> GenerateRequest:
        self._requests += 1
        return GenerateRequest(f"r{self._requests}", prompt, Sampling(**sampling))

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self.engine.generate(request, self.version)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policies(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Policies]:
    folder, files = write_policy(tmp_path_factory.mktemp("policy")), tmp_path_factory.mktemp("weights")
    engine = await VllmEngine.start(CONFIG, folder, sequence_length=512, seed=1)
    policies = Policies(engine, folder, files)
    try:
        yield policies
    finally:
        await engine.sessions.close_all()
        engine.close()
        vars(policies).clear()
        del engine
        await asyncio.sleep(0)
        gc.collect()  # vLLM's client wants to be gone before the interpreter is


PROMPT = tuple(range(4, 28)) * 4


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 0.0}, {"temperature": 1.3, "top_k": 5}]
)
async def test_logprobs_after_an_update_are_those_of_the_new_weights(
    policies: Policies, sampling: dict[str, Any]
) -> None:
    for index in (0, 1):
        version = await policies.load(index)
        request = policies.request(PROMPT, max_new_tokens=48, **sampling)
        completion = await policies.generate(request)
        assert len(completion.token_ids) == 48
        assert completion.finish_reason is FinishReason.LENGTH
        assert [tuple(span) for span in completion.versions] == [(0, 48, version)]
        top_k = sampling.get("top_k")
        assert mismatch(policies.models[index], request, completion, top_k=top_k).max() < FLOAT_NOISE
        assert mismatch(policies.models[1 - index], request, completion).max() > 0.1


def trainer_logprobs(model: Any, request: GenerateRequest, tokens: tuple[int, ...]) -> tuple[torch.Tensor, Any]:
    """The trainer's logprobs of a completion at the request's temperature, and the logits behind them."""
    start, end = len(request.prompt), len(request.prompt) + len(tokens)
    packed = PackedInput.of(
        torch.tensor(request.prompt + tokens), torch.tensor([0, end]), torch.arange(start, end, dtype=torch.int64)
    )
    policy = PackedPolicy(model, request.sampling.temperature)
    with torch.no_grad():
        return policy(packed).logprobs, policy.logits(packed)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
async def test_the_trainers_logprobs_are_the_recorded_ones_or_off_by_the_cut(
    policies: Policies, temperature: float
) -> None:
    await policies.load(0)
    for top_p in (1.0, 0.6):
        request = policies.request(PROMPT, max_new_tokens=48, temperature=temperature, top_p=top_p)
        completion = await policies.generate(request)
        own, logits = trainer_logprobs(policies.models[0], request, completion.token_ids)
        probabilities = (logits / temperature).softmax(-1).sort(-1, descending=True).values
        kept = torch.where(probabilities.cumsum(-1) - probabilities < top_p, probabilities, 0.0).sum(-1)
        assert (own - torch.tensor(completion.logprobs) - kept.log()).abs().max() < FLOAT_NOISE
        assert (float(kept.max()) < 0.95) == (top_p < 1)


async def test_a_version_that_is_loaded_in_the_pause_serves_like_a_staged_one(policies: Policies) -> None:
    for index, load in ((0, policies.load), (1, policies.load_at_once), (2, policies.load), (0, policies.load_at_once)):
        version = await load(index)
        request = policies.request(PROMPT, max_new_tokens=24)
        completion = await policies.generate(request)
        assert [tuple(span) for span in completion.versions] == [(0, 24, version)]
        assert mismatch(policies.models[index], request, completion).max() < FLOAT_NOISE


async def test_until_it_is_loaded_a_staged_version_changes_nothing(policies: Policies) -> None:
    version = await policies.load(0)
    request = policies.request(PROMPT, max_new_tokens=300)
    running = asyncio.create_task(policies.engine.generate(request, version))
    for index in (1, 2, 1):
        await policies.stage(index)
    completion = await running
    assert [tuple(span) for span in completion.versions] == [(0, 300, version)]
    assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE
    await policies.load_at_once(1)
    request = policies.request(PROMPT, max_new_tokens=24)
    assert mismatch(policies.models[1], request, await policies.generate(request)).max() < FLOAT_NOISE


async def test_a_stop_token_is_kept_and_ends_the_answer(policies: Policies) -> None:
    await policies.load(0)
    request = policies.request(PROMPT, max_new_tokens=400, stop_token_ids=(3, 9))
    completion = await policies.generate(request)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids[-1] in (3, 9)
    assert not {3, 9} & set(completion.token_ids[:-1])
    assert len(completion.logprobs) == len(completion.token_ids)


async def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(policies: Policies) -> None:
    """Also where it begins in tokens that another engine sampled; a stop token counts beside it."""
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


async def test_what_the_engine_cannot_take_is_refused_and_harms_no_other_request(policies: Policies) -> None:
    await policies.load(0)
    for prompt in ((1,) * 512, (32,), (-1,), ()):
        completion = await policies.generate(policies.request(prompt))
        assert completion.error
        assert completion.token_ids == ()
    assert not (await policies.generate(policies.request((1,)))).error


async def test_a_new_request_never_finds_what_older_weights_cached(policies: Policies) -> None:
    await policies.load(0)
    await policies.generate(policies.request(PROMPT))
    old = policies.version
    await policies.load(1)
    request = policies.request(PROMPT, max_new_tokens=32)
    assert mismatch(policies.models[1], request, await policies.generate(request)).max() < FLOAT_NOISE
    with_old_salt = await policies.engine.generate(policies.request(PROMPT, max_new_tokens=32), old)
    assert mismatch(policies.models[1], request, with_old_salt).max() > 1e-3, "the cache was not there to be found"


class SessionEpisode:
    """An episode whose turns name it, as those of an env worker do."""

    def __init__(self, policies: Policies, name: str, engine: VllmEngine | None = None) -> None:
        self._policies = policies
        self._engine = engine or policies.engine
        self._name = name
        self._num_turns = 0
        self.prompt = (*PROMPT[: 40 + len(name)], *range(len(name), len(name) + 3))

    def request(self, **sampling: Any) -> GenerateRequest:
        self._num_turns += 1
        name = f"{self._name}/{self._num_turns}"
        return GenerateRequest(name, self.prompt, Sampling(**sampling), episode=self._name, continues=True)

    async def turn(self, **sampling: Any) -> tuple[GenerateRequest, Completion]:
        """Sample a turn; the next prompt continues it by three tokens."""
        request = self.request(**{"max_new_tokens": 5, **sampling})
        completion = await self._engine.generate(request, self._policies.version)
        self.prompt = (*self.prompt, *completion.token_ids, 3 + self._num_turns, 7, 5)
        return request, completion


async def test_an_episode_continues_in_its_session_with_exact_logprobs(policies: Policies) -> None:
    """Whether a turn is cut or stops; under new weights, or with another prompt, it begins anew."""
    version = await policies.load(0)
    episode, sessions = SessionEpisode(policies, "continues"), policies.engine.sessions
    continued = sessions.num_continued
    stops = {"max_new_tokens": 60, "stop_token_ids": tuple(range(4, 12))}
    kept = 0
    for sampling in ({}, {"max_new_tokens": 1}, stops, {"temperature": 0.7}, {"max_new_tokens": 40}):
        request, completion = await episode.turn(**sampling)
        assert [tuple(span) for span in completion.versions] == [(0, len(completion.token_ids), version)]
        assert (completion.finish_reason is FinishReason.STOP) == (sampling is stops)
        assert completion.cached_tokens == kept
        kept = len(request.prompt) + len(completion.token_ids) - 1
        assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE
    assert sessions.num_continued == continued + 4

    version = await policies.load(1)
    assert sessions.num_waiting == 0
    request, completion = await episode.turn()
    assert [tuple(span) for span in completion.versions] == [(0, 5, version)]
    assert mismatch(policies.models[1], request, completion).max() < FLOAT_NOISE

    episode.prompt = (9, *episode.prompt[1:])
    request, completion = await episode.turn()
    assert mismatch(policies.models[1], request, completion).max() < FLOAT_NOISE
    assert sessions.num_continued == continued + 4


async def test_a_turn_that_a_stop_string_ends_keeps_its_session(policies: Policies) -> None:
    """Also if the length would end it with the same token."""
    await policies.load(0)
    decode = load_decoder(policies.folder)
    episode, sessions = SessionEpisode(policies, "stops"), policies.engine.sessions
    continued = sessions.num_continued
    for text in ("1 w", "", "im_", "2 w"):
        limits = {"max_new_tokens": 120, "stop_strings": (text,)} if text else {"max_new_tokens": 20}
        request, completion = await episode.turn(**limits)
        assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE
        assert (completion.finish_reason is FinishReason.STOP) == bool(text)
        assert completion.versions == (VersionSpan(0, len(completion.token_ids), policies.version),)
        if text:
            assert text in decode(completion.token_ids)
            assert text not in decode(completion.token_ids[:-1])
    assert sessions.num_continued == continued + 3
    _, last = await episode.turn(max_new_tokens=1, stop_strings=("w", "<", "a", "e"))
    assert last.finish_reason is FinishReason.STOP


async def test_a_turn_that_spans_an_update_reports_both_versions_and_ends_its_session(policies: Policies) -> None:
    old = await policies.load(0)
    episode, sessions = SessionEpisode(policies, "through an update"), policies.engine.sessions
    await episode.turn()
    running = asyncio.create_task(episode.turn(max_new_tokens=300))
    await policies.engine.generate(policies.request((5, 6, 7), max_new_tokens=40), old)
    new = await policies.load(1)
    request, completion = await running
    assert [(span.version, span.start) for span in completion.versions] == [(old, 0), (new, completion.versions[0].end)]
    assert completion.versions[-1].end == len(completion.token_ids) == 300
    before = completion.versions[0].end
    assert mismatch(policies.models[0], request, completion)[:before].max() < FLOAT_NOISE
    continued = sessions.num_continued
    request, completion = await episode.turn()
    assert mismatch(policies.models[1], request, completion).max() < FLOAT_NOISE
    assert sessions.num_continued == continued


async def test_waiting_sessions_are_closed_to_make_room_for_running_requests(policies: Policies) -> None:
    """By number and by tokens: the least recently used are closed, and their episodes start new ones."""
    await policies.load(0)
    for few in ({"max_requests": 3}, {"max_tokens": 6 * 32}):
        engine = policies.engine.salted(f"few {few}")
        engine.sessions = Sessions(engine.llm, 256)
        engine.sessions.capacity = replace(engine.sessions.capacity, **few)
        episodes = [SessionEpisode(policies, "e" * (i + 1), engine) for i in range(6)]
        for _ in range(3):
            for request, completion in await asyncio.gather(*(episode.turn() for episode in episodes)):
                assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE
            assert 0 < engine.sessions.num_waiting <= 3
        await episodes[0].turn()
        continued = engine.sessions.num_continued
        for _ in range(2):
            await episodes[0].turn()
        assert engine.sessions.num_continued == continued + 2
        await engine.sessions.close_all()
        assert (engine.sessions.capacity.requests, engine.sessions.capacity.tokens) == (0, 0)


async def test_an_aborted_turn_ends_its_session_and_no_other(policies: Policies) -> None:
    await policies.load(0)
    episode, other = SessionEpisode(policies, "aborted"), SessionEpisode(policies, "other")
    await episode.turn()
    await other.turn()
    continued = policies.engine.sessions.num_continued
    running = asyncio.create_task(policies.engine.generate(episode.request(max_new_tokens=400), policies.version))
    await policies.engine.generate(policies.request((5, 6, 7), max_new_tokens=20), policies.version)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    for each in (episode, other):
        request, completion = await each.turn()
        assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE
    assert policies.engine.sessions.num_continued == continued + 2  # the aborted turn and the other episode's


async def test_an_engine_that_may_sleep_returns_the_tokens_of_an_aborted_turn(policies: Policies) -> None:
    """Also of an episode's second turn: it keeps no sessions, whose turns vLLM does not know by their ids."""
    await policies.load(0)
    may_sleep = EngineStrategy(strategy_config=VllmConfig(enable_sleep_mode=True))
    engine = VllmEngine(policies.engine.llm, CONFIG.model_copy(update={"strategy_args": may_sleep}), "may sleep")
    episode = SessionEpisode(policies, "interrupted", engine)
    await episode.turn()
    request = episode.request(max_new_tokens=400)
    running = asyncio.create_task(engine.generate(request, policies.version))
    await policies.engine.generate(policies.request((5, 6, 7), max_new_tokens=20), policies.version)
    await engine.abort([request.request_id])
    completion = await running
    assert completion.finish_reason is FinishReason.ABORT
    assert 0 < len(completion.token_ids) < 400
    assert mismatch(policies.models[0], request, completion).max() < FLOAT_NOISE


async def test_agent_calls_are_captured_with_the_weights_that_answered(policies: Policies, tmp_path: Path) -> None:
    template = load_chat_template(write_policy(tmp_path))
    served: dict[int, int] = {}

    async def sample(prompt: tuple[int, ...], most: int) -> Completion:
        return await policies.generate(policies.request(prompt, max_new_tokens=most, stop_token_ids=template.stop_ids))

    session, gateway = EpisodeSession(template, sample, SessionLimits(512, 24)), Gateway()
    gateway.start()
    with gateway.open_session(session):
        async with AsyncOpenAI(base_url=f"{gateway.origin}/v1", api_key=session.key) as client:
            turns: list[Any] = [{"role": "user", "content": "w1 w2 w3"}]
            for index in (0, 1, 2):
                served[await policies.load(index)] = index
                answer = (await client.chat.completions.create(model="any", messages=turns)).choices[0].message
                turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": f"w{index}"}]
            await client.chat.completions.create(model="any", messages=[*turns[:3], {"role": "user", "content": "w9"}])
    await gateway.close()
    captured = session.close()
    assert len(captured.segments) == 2
    assert [turn.segment for turn in captured.turns] == [0, 0, 0, 1]
    check_segments(policies, served, captured.segments)


def check_segments(policies: Policies, served: dict[int, int], segments: Sequence[Segment]) -> None:
    """Recorded logprobs are those of the weights that each token's version stands for."""
    for segment in segments:
        sampled = np.flatnonzero(segment.loss_mask)
        for version in np.unique(segment.token_versions()[sampled]):
            own = sampled[segment.token_versions()[sampled] == version]
            with torch.no_grad():
                logits = policies.models[served[int(version)]](torch.tensor(segment.tokens[None]).long()).logits[0]
            expected = logits.log_softmax(-1)[own - 1, segment.tokens[own]].numpy()
            assert np.abs(expected - segment.logprobs[own]).max() < FLOAT_NOISE


REWRITES = (
    "{% for m in messages %}{% set old = m.role == 'assistant' and not loop.last %}"
    "{{ '<|im_start|>' + m.role + '\n' + ('w1 ' if old else '') + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Adds a word to every earlier answer, however short."""
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "trajectory": ({}, 1),
    "step": (
        {"env_manager_cls": "StepEnvManager", "history_length": 1, "agent_template": "{history} {observation}"},
        3,
    ),
    "step_concat": ({"env_manager_cls": "StepConcatEnvManager"}, 3),
    "rewritten": ({}, 3),
    "tools": (
        {"env_type": "tools", "env_config": {"env_type": "frozen_lake", "tools": [{"tool_id": "python_code"}]}},
        1,
    ),
}
"""Rules of an episode of three turns, and how many sequences it makes."""


@pytest.mark.parametrize("kind", KINDS)
async def test_every_episode_kind_records_each_turns_logprobs(policies: Policies, tmp_path: Path, kind: str) -> None:
    """They are those of the weights that generated the turn."""
    folder = write_policy(tmp_path)
    if kind == "rewritten":
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": REWRITES}))
    chat = load_chat_format(folder)
    assert (chat.rewriting is not None) == (kind == "rewritten")
    changes, count = KINDS[kind]
    rules = CustomEnv(**{"env_type": "frozen_lake", "max_steps": 3, "max_tokens_per_step": 8, **changes})
    served: dict[int, int] = {}

    async def sample(prompt: tuple[int, ...], most: int) -> Completion:
        served[await policies.load(len(served))] = len(served)
        return await policies.generate(policies.request(prompt, max_new_tokens=most, stop_token_ids=chat.stop_ids))

    env = InlineEnv(EnvSpec(rules.env_type, rules.env_config, 60, 60))
    task = EpisodeTask(EpisodeKind.TRAIN, "run-0", 0, 0, 0, min_version=0)
    plan = EpisodePlan(task, kind, 1, rules, 512, Sampling(max_new_tokens=8), keep_text=False, worker_id="w")
    played = await play(plan, env, await env.start(), sample, chat)
    assert (len(played.turns), len(played.segments), len(served)) == (3, count, 3)
    versions = [version for segment in played.segments for version in segment.token_versions()[segment.loss_mask]]
    assert sorted(set(versions)) == sorted(served)
    check_segments(policies, served, played.segments)


async def run_through_updates(policies: Policies, engine: VllmEngine) -> list[tuple[GenerateRequest, Completion]]:
    """Eight long requests that start under weights 0 and meet 1, 2 and 0 on their way."""
    first = await policies.load(0, engine)
    requests = [policies.request(PROMPT[: 40 + 7 * i], max_new_tokens=300) for i in range(8)]
    running = [asyncio.create_task(engine.generate(request, first)) for request in requests]
    for index in (1, 2, 0):
        await engine.generate(policies.request((5, 6, 7), max_new_tokens=40), policies.version)
        await policies.load(index, engine)
    completions = await asyncio.gather(*running)
    for completion in completions:
        assert [span.version - first for span in completion.versions] == [0, 1, 2, 3]
        assert [span.start for span in completion.versions] == [0, *(span.end for span in completion.versions[:-1])]
        assert completion.versions[-1].end == len(completion.token_ids) == 300
    return list(zip(requests, completions, strict=True))


def by_span(policies: Policies, request: GenerateRequest, completion: Completion) -> list[torch.Tensor]:
    models = [policies.models[index] for index in (0, 1, 2, 0)]
    return [
        mismatch(model, request, completion)[span.start : span.end]
        for model, span in zip(models, completion.versions, strict=True)
    ]


async def test_running_requests_keep_their_cache_and_continue_under_new_weights(policies: Policies) -> None:
    later: list[torch.Tensor] = []
    for request, completion in await run_through_updates(policies, policies.engine):
        before, *after = by_span(policies, request, completion)
        assert before.max() < FLOAT_NOISE
        later += after
    # Keys and values of the prefix stay old: that is what `keep` means. It is measured, not bounded.
    drift = torch.cat(later)
    logger.info("logprobs after unrelated weights came: off by %.3f mean, %.3f max", drift.mean(), drift.max())
    assert drift.mean() > 1e-3


async def test_recompute_makes_every_token_match_its_version(policies: Policies) -> None:
    for request, completion in await run_through_updates(policies, policies.recomputing):
        for difference in by_span(policies, request, completion):
            assert difference.max() < FLOAT_NOISE


async def test_zero_learning_rate_keeps_the_mismatch_at_float_noise(
    policies: Policies,
) -> None:
    first = await policies.load(2)
    requests = [policies.request(PROMPT[: 30 + i], max_new_tokens=400) for i in range(8)]
    running = [asyncio.create_task(policies.engine.generate(request, first)) for request in requests]
    for _ in range(25):
        await policies.load(2)
    for request, completion in zip(requests, await asyncio.gather(*running), strict=True):
        assert len(completion.versions) > 10
        assert mismatch(policies.models[2], request, completion).max() < FLOAT_NOISE


async def test_a_file_without_one_of_the_tensors_is_refused(policies: Policies, tmp_path: Path) -> None:
    """The last test: an engine whose update failed in a pause must not be used any more."""
    version = await policies.load(1)
    tensors = load_file(policies.files[0])
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "incomplete.safetensors")
    with pytest.raises(Exception, match=r"up_proj\.weight is not in the file"):
        await policies.engine.stage(tmp_path / "incomplete.safetensors")
    request = policies.request(PROMPT, max_new_tokens=24)
    assert mismatch(policies.models[1], request, await policies.engine.generate(request, version)).max() < FLOAT_NOISE
    with pytest.raises(Exception, match=r"up_proj\.weight is not in the file"):
        await policies.engine.load(tmp_path / "incomplete.safetensors", 1000)

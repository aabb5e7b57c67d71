"""Traces from the prompt to the gradient: workers, a real buffer, a learner's steps, an OTLP collector in this process."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.trace import TraceFlags
from tokenizers import Tokenizer

from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import Group, Sampling
from offbeat.services.rollout.worker import EnvWorker
from offbeat.services.tracing.config import TelemetryConfig
from offbeat.services.tracing.factory import open_episode_tracer, open_step_tracer
from tests.fakes_rollout import FakeGeneration, FakeMetrics, train_episode, worker_settings
from tests.otlp import Collector, otlp_collector
from tests.services.buffer.buffer_play import RUN, Run
from tests.services.rollout.worker_bench import custom, group, walker
from tests.waiting import wait_until

NUM_GROUPS = 2
SPAN_KIND_CLIENT = 3


@pytest.fixture
def collector() -> Iterator[Collector]:
    with otlp_collector() as collector:
        yield collector


async def play_groups(
    run: Run, folder: Path, chat: ChatFormat, tokenizer: Tokenizer, telemetry: TelemetryConfig
) -> list[Group]:
    """Let two workers play `NUM_GROUPS` groups; return them as the learner takes them."""
    generation = FakeGeneration(walker(tokenizer))
    generation.version = 0
    settings = worker_settings(folder, run_id=RUN, telemetry=telemetry)
    workers = [
        EnvWorker(settings, name, buffer=run.other_worker(), generation=generation, metrics=FakeMetrics(), chat=chat)
        for name in ("w1", "w2")
    ]
    running = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        groups = [await asyncio.to_thread(run.learner.take, 60.0) for _ in range(NUM_GROUPS)]
    finally:
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)
    return [group for group in groups if group is not None]


async def test_a_gradient_leads_back_to_every_prompt(
    run: Run, policy_folder: Path, chat: ChatFormat, tokenizer: Tokenizer, collector: Collector
):
    telemetry = TelemetryConfig(otlp_endpoint=collector.endpoint, sample_rate=1.0)
    groups = await play_groups(run, policy_folder, chat, tokenizer, telemetry)
    tracer = open_step_tracer(telemetry, run_id=RUN, algorithm="grpo")
    with tracer.train(4, groups):
        pass
    with tracer.sync(5):
        pass
    tracer.close()

    episodes = {(span.trace_id, span.span_id): span for span in collector.named("invoke_agent Lake")}
    members = [(each, member) for each in groups for member in each.trajectories]
    assert len(members) == NUM_GROUPS * len(groups[0].trajectories)
    for played, member in members:
        version, trace_id, span_id, flags = member.traceparent.split("-")
        assert version == "00"
        assert int(flags, 16) & TraceFlags.SAMPLED
        span = episodes[trace_id, span_id]
        assert span.attributes["gen_ai.operation.name"] == "invoke_agent"
        assert span.attributes["rl.group.number"] == played.number
        assert span.attributes["rl.episode.index"] == member.index
        assert span.attributes["rl.reward"] == member.reward
        assert span.attributes["gen_ai.usage.output_tokens"] == member.num_sampled
        assert (span.attributes["rl.policy.version.min"], span.attributes["rl.policy.version.max"]) == (0, 0)
        assert span.resource["rl.run.id"] == RUN
        children = [each for each in collector.spans if each.parent_id == span_id]
        assert {each.trace_id for each in children} == {trace_id}
        names = Counter(each.name for each in children)
        turns = len(member.turns)
        assert names == {"rl.environment.reset": 1, "chat policy": turns, "rl.environment.step": turns}
        chats = [each for each in children if each.name == "chat policy"]
        assert {each.kind for each in chats} == {SPAN_KIND_CLIENT}
        assert sum(each.attributes["gen_ai.usage.output_tokens"] for each in chats) == member.num_sampled
        assert {each.attributes["rl.policy.version.max"] for each in chats} == {0}
    for each in groups:
        assert len({member.traceparent.split("-")[1] for member in each.trajectories}) == 1

    (train,) = collector.named("rl.train")
    assert [(trace, span) for trace, span, _ in train.links] == [
        tuple(each.trajectories[0].traceparent.split("-")[1:3]) for each in groups
    ]
    assert [attributes["rl.group.number"] for _, _, attributes in train.links] == [each.number for each in groups]
    assert train.attributes["rl.step"] == 5
    assert train.resource["rl.algorithm"] == "grpo"
    (sync,) = collector.named("rl.sync")
    assert sync.links == [(train.trace_id, train.span_id, {"rl.step": 5})]
    assert sync.attributes["rl.policy.version"] == 5


async def test_without_an_endpoint_nothing_is_traced(
    run: Run, policy_folder: Path, chat: ChatFormat, tokenizer: Tokenizer
):
    groups = await play_groups(run, policy_folder, chat, tokenizer, TelemetryConfig())
    assert {member.traceparent for group in groups for member in group.trajectories} == {""}
    tracer = open_step_tracer(TelemetryConfig(), run_id=RUN, algorithm="grpo")
    with tracer.train(0, groups), tracer.sync(1):
        pass
    tracer.close()


async def test_a_group_is_traced_whole_or_not_at_all(bench, collector: Collector):
    telemetry = TelemetryConfig(otlp_endpoint=collector.endpoint, sample_rate=0.5)
    num_groups = 40
    for worker_id, members in (("w1", slice(0, 2)), ("w2", slice(2, 4))):
        tasks = [task for number in range(num_groups) for task in group(number)[members]]
        async with bench(*tasks, telemetry=telemetry, worker_id=worker_id) as b:
            await b.until_done(len(tasks))
    traced = Counter(span.trace_id for span in collector.named("invoke_agent"))
    assert set(traced.values()) == {4}
    assert 8 <= len(traced) <= 32  # of 40, p < 1e-4; the ids are those of the groups, so it never changes


async def test_a_failed_episode_ends_its_spans_with_the_reason(bench, collector: Collector):
    telemetry = TelemetryConfig(otlp_endpoint=collector.endpoint, sample_rate=1.0)
    broken = custom("BadEnv", env_config={"how": "raise"})
    async with bench(*group(0, 1), custom_envs={"Broken": broken}, telemetry=telemetry) as b:
        await b.until_done(1)
    (episode,) = collector.named("invoke_agent Broken")
    assert episode.is_error
    assert episode.attributes["error.type"] == "step_error"
    assert [span.is_error for span in collector.named("rl.environment.step")] == [False, True]


def test_an_error_that_quotes_an_answer_leaves_it_out_of_spans(collector: Collector):
    telemetry = TelemetryConfig(otlp_endpoint=collector.endpoint, sample_rate=1.0)
    tracer = open_episode_tracer(telemetry, run_id="run", run_uid="u", worker_id="w")
    episode = tracer.episode(train_episode(0), "Shop", Sampling(), has_tools=False)
    with pytest.raises(ValueError, match="bad action"), episode as spans, spans.step():
        raise ValueError("bad action 'my answer'")
    tracer.close()
    assert [(span.is_error, span.attributes["error.type"]) for span in collector.spans] == [(True, "ValueError")] * 2
    assert not any("my answer" in str(span) for span in collector.spans)


def test_a_failed_optimizer_step_leaves_the_errors_text_out_of_its_span(collector: Collector):
    tracer = open_step_tracer(TelemetryConfig(otlp_endpoint=collector.endpoint), run_id=RUN, algorithm="grpo")
    for span in (tracer.train(0, []), tracer.sync(1)):
        with pytest.raises(ValueError, match="bad answer"), span:
            raise ValueError("bad answer 'my answer'")
    tracer.close()
    assert [span.name for span in collector.spans] == ["rl.train", "rl.sync"]
    assert [(span.is_error, span.attributes["error.type"]) for span in collector.spans] == [(True, "ValueError")] * 2
    assert not any("my answer" in str(span) for span in collector.spans)


def test_a_step_of_an_env_with_functions_is_a_tool_call(collector: Collector):
    telemetry = TelemetryConfig(otlp_endpoint=collector.endpoint, sample_rate=1.0)
    tracer = open_episode_tracer(telemetry, run_id="run", run_uid="u", worker_id="w")
    with tracer.episode(train_episode(0), "Shop", Sampling(), has_tools=True) as spans, spans.step():
        pass
    tracer.close()
    (call,) = collector.named("execute_tool Shop")
    assert call.attributes["gen_ai.operation.name"] == "execute_tool"
    assert call.attributes["gen_ai.tool.name"] == "Shop"


async def test_a_collector_that_is_gone_delays_no_episode(bench):
    telemetry = TelemetryConfig(otlp_endpoint="http://127.0.0.1:9", sample_rate=1.0)
    async with bench(*group(0), *group(1), telemetry=telemetry) as b:
        await b.until_done(8)
        assert len(b.buffer.submitted) == 8
        b.worker.stop()
        await wait_until(b.running.done)

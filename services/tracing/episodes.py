"""Spans of episodes: `invoke_agent` with its `chat` and `execute_tool` (GenAI semantic conventions) or env calls.

Invariant: all members of a group are traced, or none.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer, set_span_in_context

from offbeat.services.messages.types import Completion, EpisodeTask, Sampling, Trajectory
from offbeat.services.tracing.api import NO_SPANS, EpisodeSpans, RecordCompletion
from offbeat.services.tracing.export import SYSTEM, close_provider, open_provider
from offbeat.services.tracing.failures import record_error
from offbeat.services.tracing.ids import ChosenTraceIds, format_traceparent, is_traced, trace_id_of

POLICY = "policy"


class OtlpEpisodeTracer:
    def __init__(self, endpoint: str, rate: float, run: tuple[str, str], worker_id: str) -> None:
        """run: id and uid."""
        self._run = run
        self._rate = rate
        self._ids = ChosenTraceIds()
        attributes = {"rl.run.id": run[0], "service.instance.id": worker_id}
        self._provider = open_provider(endpoint, "offbeat-env-worker", attributes, self._ids)
        self._tracer = self._provider.get_tracer(SYSTEM)

    @contextmanager
    def episode(self, task: EpisodeTask, tag: str, sampling: Sampling, *, has_tools: bool) -> Iterator[EpisodeSpans]:
        trace_id = trace_id_of(*self._run, task.kind.value, task.group_id)
        if not is_traced(trace_id, self._rate):
            yield NO_SPANS
            return
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": SYSTEM,
            "gen_ai.agent.name": tag,
            "gen_ai.conversation.id": f"{task.group_id}/{task.index}",
            "rl.environment.name": tag,
            "rl.episode.kind": task.kind.value,
            "rl.group.id": task.group_id,
            "rl.group.number": task.number,
            "rl.episode.index": task.index,
            "rl.episode.attempt": task.attempt,
        }
        self._ids.next_trace_id = trace_id
        span = self._tracer.start_span(f"invoke_agent {tag}", Context(), attributes=attributes)
        with _ended(span):
            yield SampledSpans(self._tracer, span, tag, sampling, has_tools=has_tools)

    def close(self) -> None:
        close_provider(self._provider)


class SampledSpans:
    def __init__(self, tracer: Tracer, span: Span, tag: str, sampling: Sampling, *, has_tools: bool) -> None:
        self.traceparent = format_traceparent(span)
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, Context())
        self._tag = tag
        self._sampling = sampling
        self._has_tools = has_tools

    @contextmanager
    def chat(self, prompt: Sequence[int], max_new_tokens: int) -> Iterator[RecordCompletion]:
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": SYSTEM,
            "gen_ai.request.model": POLICY,
            "gen_ai.request.temperature": self._sampling.temperature,
            "gen_ai.request.top_p": self._sampling.top_p,
            "gen_ai.request.max_tokens": max_new_tokens,
            "gen_ai.usage.input_tokens": len(prompt),
        }
        span = self._tracer.start_span(f"chat {POLICY}", self._context, SpanKind.CLIENT, attributes)
        with _ended(span):
            yield lambda completion: _describe(span, completion)

    def reset(self) -> AbstractContextManager[None]:
        return self._env_call("rl.environment.reset", {})

    def step(self) -> AbstractContextManager[None]:
        if not self._has_tools:
            return self._env_call("rl.environment.step", {})
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": self._tag, "gen_ai.tool.type": "function"}
        return self._env_call(f"execute_tool {self._tag}", tool)

    @contextmanager
    def _env_call(self, name: str, attributes: Mapping[str, str]) -> Iterator[None]:
        named = {"rl.environment.name": self._tag, **attributes}
        with _ended(self._tracer.start_span(name, self._context, attributes=named)):
            yield

    def finish(self, trajectory: Trajectory) -> None:
        self._span.set_attributes(
            {
                "rl.reward": trajectory.reward,
                "rl.episode.turns": len(trajectory.turns),
                "rl.episode.stop_reason": trajectory.stop_reason.value,
                "gen_ai.usage.output_tokens": trajectory.num_sampled,
                **_version_attributes(trajectory.version_range()),
            }
        )


@contextmanager
def _ended(span: Span) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        record_error(span, error)
        raise
    finally:
        span.end()


def _describe(span: Span, completion: Completion) -> None:
    versions = [each.version for each in completion.versions]
    span.set_attributes(
        {
            "gen_ai.usage.output_tokens": len(completion.token_ids),
            "gen_ai.response.finish_reasons": (completion.finish_reason.value,),
            **_version_attributes((min(versions), max(versions)) if versions else None),
        }
    )


def _version_attributes(versions: tuple[int, int] | None) -> dict[str, int]:
    """Return the oldest and newest version of the tokens."""
    return {} if versions is None else {"rl.policy.version.min": versions[0], "rl.policy.version.max": versions[1]}

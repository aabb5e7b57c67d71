"""Spans of the learner: `rl.train` links to its groups, `rl.sync` to its steps."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext

from offbeat.services.messages.types import Group
from offbeat.services.tracing.export import SYSTEM, close_provider, open_provider
from offbeat.services.tracing.failures import record_error
from offbeat.services.tracing.ids import parse_traceparent


class OtlpStepTracer:
    def __init__(self, endpoint: str, run_id: str, algorithm: str) -> None:
        attributes = {"rl.run.id": run_id, "rl.algorithm": algorithm}
        self._provider = open_provider(endpoint, "offbeat-learner", attributes)
        self._tracer = self._provider.get_tracer(SYSTEM)
        self._unpublished: list[tuple[int, SpanContext]] = []
        """Step and span of each `rl.train` since the last `rl.sync`."""

    @contextmanager
    def train(self, step: int, groups: Sequence[Group]) -> Iterator[None]:
        attributes = {
            "rl.step": step + 1,
            "rl.train.groups": len(groups),
            "rl.train.trajectories": sum(len(group.trajectories) for group in groups),
            "rl.train.staleness.max": max((step - group.oldest_version for group in groups), default=0),
        }
        with self._span("rl.train", attributes, list(_group_links(groups))) as context:
            yield
        self._unpublished.append((step + 1, context))

    @contextmanager
    def sync(self, version: int) -> Iterator[None]:
        trained, self._unpublished = self._unpublished, []
        links = [Link(context, {"rl.step": step}) for step, context in trained]
        with self._span("rl.sync", {"rl.policy.version": version}, links):
            yield

    def close(self) -> None:
        close_provider(self._provider)

    @contextmanager
    def _span(self, name: str, attributes: Mapping[str, int], links: Sequence[Link]) -> Iterator[SpanContext]:
        with self._tracer.start_as_current_span(
            name,
            Context(),
            attributes=attributes,
            links=links,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span.get_span_context()
            except BaseException as error:
                record_error(span, error)
                raise


def _group_links(groups: Sequence[Group]) -> Iterator[Link]:
    """Yield a link to each group's first traced member."""
    for group in groups:
        contexts = (parse_traceparent(trajectory.traceparent) for trajectory in group.trajectories)
        context = next((each for each in contexts if each is not None), None)
        if context is not None:
            yield Link(context, {"rl.group.id": group.group_id, "rl.group.number": group.number})

"""Trace ids derived from a group's name, and their sampling."""

from hashlib import blake2b

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import Span, SpanContext, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

HEADER = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()


class ChosenTraceIds(RandomIdGenerator):
    """Trace ids as set, else random."""

    def __init__(self) -> None:
        self.next_trace_id: int | None = None

    def generate_trace_id(self) -> int:
        chosen, self.next_trace_id = self.next_trace_id, None
        return super().generate_trace_id() if chosen is None else chosen


def trace_id_of(*names: str) -> int:
    """Return a group's trace id, equal on all workers."""
    digest = blake2b("\0".join(names).encode(errors="surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest, "big") or 1


def is_traced(trace_id: int, rate: float) -> bool:
    """Return whether an id is sampled."""
    return TraceIdRatioBased(rate).should_sample(None, trace_id, "").decision.is_sampled()


def format_traceparent(span: Span) -> str:
    """Return W3C's header."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier[HEADER]


def parse_traceparent(text: str) -> SpanContext | None:
    """Return None unless it names a sampled span."""
    context = get_current_span(_PROPAGATOR.extract({HEADER: text}, Context())).get_span_context()
    return context if context.is_valid and context.trace_flags.sampled else None

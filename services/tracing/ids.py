"""Trace ids that every process derives from a group's name, and their sampling."""

import re
from hashlib import blake2b

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, TraceFlags

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01")
"""W3C's header of a sampled span."""
_LOW_BITS = (1 << 64) - 1


class ChosenTraceIds(RandomIdGenerator):
    """Trace ids as set; without, random ones."""

    def __init__(self) -> None:
        self.next_trace_id: int | None = None

    def generate_trace_id(self) -> int:
        chosen, self.next_trace_id = self.next_trace_id, None
        return super().generate_trace_id() if chosen is None else chosen


def trace_id_of(*names: str) -> int:
    """Return the id of a group's trace, the same for all of its members on all workers."""
    digest = blake2b("\0".join(names).encode(errors="surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest, "big") or 1


def is_traced(trace_id: int, rate: float) -> bool:
    """Decide as OpenTelemetry's `TraceIdRatioBased`, the same for all members."""
    return (trace_id & _LOW_BITS) < round(rate * (1 << 64))


def format_traceparent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def parse_traceparent(text: str) -> SpanContext | None:
    """Return None unless it names a sampled span."""
    matched = TRACEPARENT.fullmatch(text)
    if matched is None:
        return None
    context = SpanContext(int(matched[1], 16), int(matched[2], 16), is_remote=True, trace_flags=TraceFlags(1))
    return context if context.is_valid else None

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from offbeat.services.tracing.ids import format_traceparent, is_traced, parse_traceparent, trace_id_of

CONTEXT = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1))


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
def test_the_configured_share_of_groups_is_traced(rate: float):
    ids = [trace_id_of("run", "uid", str(number)) for number in range(2_000)]
    decisions = [is_traced(each, rate) for each in ids]
    assert sum(decisions) == pytest.approx(rate * len(ids), abs=5 * (rate * (1 - rate) * len(ids)) ** 0.5)


def test_runs_of_one_name_have_other_traces():
    assert trace_id_of("run", "first", "g-1") != trace_id_of("run", "second", "g-1")
    assert trace_id_of("ab", "c") != trace_id_of("a", "bc")


def test_a_traceparent_is_read_as_it_was_written():
    text = format_traceparent(NonRecordingSpan(CONTEXT))
    assert text == f"00-{0xABC:032x}-{0xDEF:016x}-01"
    assert parse_traceparent(text) == CONTEXT


@pytest.mark.parametrize(
    "text",
    ["", "x", f"00-{0:032x}-{1:016x}-01", f"00-{1:032x}-{0:016x}-01", f"00-{1:032x}-{1:016x}-00", f"01-{1:032x}"],
)
def test_what_names_no_sampled_span_is_no_link(text: str):
    assert parse_traceparent(text) is None

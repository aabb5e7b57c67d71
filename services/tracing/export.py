"""Export of spans by OTLP in a thread of its own; a slow or missing collector loses spans and delays nothing."""

import threading
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

SYSTEM = "offbeat"
"""Instrumentation scope, `rl.system` and `gen_ai.provider.name`."""
EXPORT_TIMEOUT_S = 5.0
EXPORT_INTERVAL_MS = 500
"""Short: the env workers of a finished run are killed, with the spans that they still hold."""
TRACES_PATH = "/v1/traces"


def open_provider(
    endpoint: str, service: str, attributes: Mapping[str, str], ids: IdGenerator | None = None
) -> TracerProvider:
    """attributes: of the process, such as its run."""
    url = endpoint.rstrip("/")
    url = url if url.endswith(TRACES_PATH) else f"{url}{TRACES_PATH}"
    provider = TracerProvider(
        sampler=ALWAYS_ON,  # spans are made of sampled groups alone
        resource=Resource.create({"service.name": service, "rl.system": SYSTEM, **attributes}),
        id_generator=ids or RandomIdGenerator(),
        span_limits=SpanLimits(max_links=SpanLimits.UNSET),  # one for each group of a batch
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_INTERVAL_MS))
    return provider


def close_provider(provider: TracerProvider) -> None:
    """Send the remaining spans, within `EXPORT_TIMEOUT_S`."""
    closing = threading.Thread(target=provider.shutdown, name="close traces", daemon=True)
    closing.start()
    closing.join(EXPORT_TIMEOUT_S)

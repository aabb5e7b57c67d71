"""An OTLP collector in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    attributes: dict[str, Any]
    links: list[tuple[str, str, dict[str, Any]]]
    """Trace id, span id, attributes."""
    is_error: bool
    message: str
    """Of its status."""
    events: list[dict[str, Any]]
    resource: dict[str, Any]


@dataclass
class Collector:
    endpoint: str
    spans: list[CollectedSpan] = field(default_factory=list[CollectedSpan])

    def named(self, prefix: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.name.startswith(prefix)]

    def add(self, request: ExportTraceServiceRequest) -> None:
        for resource_spans in request.resource_spans:
            resource = _attributes(resource_spans.resource.attributes)
            for scope in resource_spans.scope_spans:
                self.spans += [_collected(span, resource) for span in scope.spans]


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    collector = Collector("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_traces = self.path == "/v1/traces"
            if is_traces:
                collector.add(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if is_traces else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _collected(span: Any, resource: dict[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        attributes=_attributes(span.attributes),
        links=[(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes)) for link in span.links],
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        message=span.status.message,
        events=[_attributes(event.attributes) for event in span.events],
        resource=resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)

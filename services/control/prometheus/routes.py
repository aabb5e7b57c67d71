from typing import Annotated, Any

from fastapi import APIRouter, Header, Response

from offbeat.services.control.http_errors import refusals
from offbeat.services.control.prometheus.exporter import PrometheusExporter

TEXT_TYPES = ("text/plain", "application/openmetrics-text")
EXPOSITION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus' text format, or OpenMetrics if `Accept` asks for it.",
        "content": {media_type: {"schema": {"type": "string"}} for media_type in TEXT_TYPES},
    }
}


def prometheus_routes(exporter: PrometheusExporter) -> APIRouter:
    routes = APIRouter(tags=["service"])

    @routes.get("/metrics", response_class=Response, responses={**EXPOSITION, **refusals(422)})
    async def scrape(accept: Annotated[str, Header(max_length=1000)] = "") -> Response:
        """Metrics of the active runs, and of those that ended within ten minutes, for Prometheus."""
        body, media_type = await exporter.export(accept)
        return Response(body, headers={"content-type": media_type})

    return routes

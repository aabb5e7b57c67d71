"""Configuration of tracing."""

from pydantic import Field

from offbeat.envs.config import Config


class TelemetryConfig(Config):
    """Traces by OpenTelemetry (docs/monitoring.md)."""

    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s@]+$")
    """Collector's OTLP address by HTTP, such as `http://127.0.0.1:4318`; None: no traces. Headers:
    `OTEL_EXPORTER_OTLP_HEADERS` of the environment.
    """
    sample_rate: float = Field(default=0.01, gt=0, le=1)
    """Share of groups that are traced."""

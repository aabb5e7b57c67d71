"""Construction of tracers; imports `opentelemetry` only if enabled."""

from offbeat.services.tracing.api import EpisodeTracer, NoEpisodeTracer, NoStepTracer, StepTracer
from offbeat.services.tracing.config import TelemetryConfig


def open_episode_tracer(config: TelemetryConfig, *, run_id: str, run_uid: str, worker_id: str) -> EpisodeTracer:
    if config.otlp_endpoint is None:
        return NoEpisodeTracer()
    from offbeat.services.tracing.episodes import OtlpEpisodeTracer  # noqa: PLC0415 - takes a second

    return OtlpEpisodeTracer(config.otlp_endpoint, config.sample_rate, (run_id, run_uid), worker_id)


def open_step_tracer(config: TelemetryConfig, *, run_id: str, algorithm: str) -> StepTracer:
    if config.otlp_endpoint is None:
        return NoStepTracer()
    from offbeat.services.tracing.steps import OtlpStepTracer  # noqa: PLC0415 - takes a second

    return OtlpStepTracer(config.otlp_endpoint, run_id, algorithm)

"""Errors in spans, without their text, which may quote an answer."""

from opentelemetry.trace import Span, Status, StatusCode

from offbeat.services.errors import EpisodeError


def record_error(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", error.reason if isinstance(error, EpisodeError) else type(error).__name__)
    span.set_status(Status(StatusCode.ERROR))

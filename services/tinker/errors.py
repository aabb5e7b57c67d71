"""Refusals of the Tinker API, by HTTP status."""

from offbeat.services.errors import MeshError


class TinkerError(MeshError):
    status = 400


class UnauthorizedError(TinkerError):
    status = 401


class NotFoundError(TinkerError):
    """Unknown, or another key's."""

    status = 404


class GoneError(TinkerError):
    """Ended session, or a result that is not kept any more: the SDK sends a sample again."""

    status = 410


class QueueFullError(TinkerError):
    """Too much is queued: the SDK waits and tries again."""

    status = 429

"""Refusals of the Tinker API, by HTTP status."""

from offbeat.services.errors import MeshError


class TinkerError(MeshError):
    status = 400


class UnauthorizedError(TinkerError):
    status = 401


class ForbiddenError(TinkerError):
    status = 403


class NotFoundError(TinkerError):
    """Unknown, or another key's."""

    status = 404


class GoneError(TinkerError):
    """Ended session, or expired result, which the SDK sends again."""

    status = 410


class QueueFullError(TinkerError):
    """Full queue; the SDK waits and tries again."""

    status = 429

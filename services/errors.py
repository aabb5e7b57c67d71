"""Errors that cross a service's boundary: one class per boundary, one that means "retry", and the failure of an
episode, which is data for the buffer.
"""


class MeshError(Exception):
    """Anything that a service of the mesh refuses or fails to do."""


class RetryableError(MeshError):
    """The service is there but cannot answer now (starting, overloaded, being replaced); the same call may succeed later."""


class GenerationError(MeshError):
    """The generation service refused a request."""


class BufferError(MeshError):
    """The trajectory buffer refused a command."""


class WeightsError(MeshError):
    """A weight version could not be published, fetched or loaded."""


class FencedError(MeshError):
    """A newer learner holds the run's lease; writes of this one are refused."""


class RolloutError(MeshError):
    """The env-worker pool could not run an episode."""


class CodecError(MeshError):
    """A message does not follow its schema."""


class ControlError(MeshError):
    """The control service refused a command."""


class EpisodeError(RolloutError):
    """An episode ended without a trajectory.

    reason: short name under which episodes are counted (`step_timeout`); the message holds the details.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason

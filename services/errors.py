"""Errors across service boundaries."""


class MeshError(Exception):
    """Base of the services' errors."""


class RetryableError(MeshError):
    """Service unavailable; the call may be repeated."""


class GenerationError(MeshError):
    """Request refused by the generation service."""


class BufferError(MeshError):
    """Command refused by the trajectory buffer."""


class WeightsError(MeshError):
    """Failed publication, fetch or load of a weight version."""


class WeightsRefusedError(WeightsError):
    """Weights that do not fit an engine, which serves on with those of before."""


class RewoundError(MeshError):
    """Run that continues from a version before the served one."""


class StoreUnavailableError(RetryableError):
    """Write refused or not answered by a store that may accept it later."""


class FencedError(MeshError):
    """Write refused, as a newer learner holds the run's lease."""


class ForeignRunError(FencedError):
    """Write refused, as the run was deleted or created anew under its name."""


class ReconcileError(RetryableError):
    """Write refused until reconciliation, as Redis may have lost acknowledged writes."""


class RolloutError(MeshError):
    """Episode failed in the env-worker pool."""


class CodecError(MeshError):
    """Message that violates its schema."""


class ControlError(MeshError):
    """Command refused by the control service."""


class EpisodeError(RolloutError):
    """Episode without trajectory.

    reason: name to count by (`step_timeout`). trace: another process's traceback. Lone surrogates are escaped.
    """

    def __init__(self, reason: str, detail: str = "", trace: str = "") -> None:
        self.reason = reason
        self.detail = escape_surrogates(detail)
        self.trace = escape_surrogates(trace)
        super().__init__(f"{reason}: {self.detail}" if detail else reason)


def escape_surrogates(text: str) -> str:
    """Escape lone surrogates, which UTF-8 can't encode."""
    return text.encode("utf-8", "backslashreplace").decode()

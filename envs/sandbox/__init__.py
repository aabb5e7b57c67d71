"""Running a policy's Python where it can do little harm."""

from envs.sandbox.running import Limits, Outcome, run_python

__all__ = ["Limits", "Outcome", "run_python"]

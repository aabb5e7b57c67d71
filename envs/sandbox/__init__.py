"""Sandbox for a policy's Python programs."""

from offbeat.envs.sandbox.run import (
    STARTUP_TIMEOUT_S,
    IsolationError,
    Limits,
    ProgramResult,
    check_isolation,
    describe_missing,
    describe_sandbox,
    platform_isolation,
    run_python,
)

__all__ = [
    "STARTUP_TIMEOUT_S",
    "IsolationError",
    "Limits",
    "ProgramResult",
    "check_isolation",
    "describe_missing",
    "describe_sandbox",
    "platform_isolation",
    "run_python",
]

"""What tests need that run programs of a policy."""

import pytest

from offbeat.envs.isolation.guarantees import missing_guarantees
from offbeat.envs.sandbox import describe_missing, platform_isolation

needs_sandbox = pytest.mark.skipif(
    bool(missing_guarantees(platform_isolation(), one_process=True)),
    reason=f"this machine does not keep programs from {'; '.join(describe_missing(platform_isolation()))}",
)
"""Where the kernel holds too little, programs are refused by name; `isolation` in envs/sandbox."""

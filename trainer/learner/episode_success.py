"""Success of episodes, which may lack it."""

import math
from collections.abc import Sequence

from offbeat.services.messages.types import Trajectory
from offbeat.services.telemetry import Partial


def success_values(trajectories: Sequence[Trajectory], num_failed: int = 0) -> dict[str, Partial]:
    """Return mean success and the share of episodes without one, counted as failures.

    Tags that never report success have none; failed episodes count as those of other tags.
    """
    reported = {t.tag for t in trajectories if reports_success(t)}
    if not reported:
        return {}
    values = [t.metrics["success"] for t in trajectories if reports_success(t)]
    num_missing = num_failed + sum(t.tag in reported for t in trajectories) - len(values)
    count = float(len(values) + num_missing)
    return {
        "success": Partial("mean", sum(values), count),
        "success_missing": Partial("mean", float(num_missing), count),
    }


def reports_success(trajectory: Trajectory) -> bool:
    return math.isfinite(trajectory.metrics.get("success", math.nan))

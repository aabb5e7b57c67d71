import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from offbeat.benchmarks.harness.result import Spread
from offbeat.deploy.console.groups import REFRESH_INTERVAL_S

SERIES = "learner/reward,learner/success,learner/turns,learner/reward_min,learner/reward_max,learner/episodes_truncated"
ORDERS = ("number", "spread", "tokens", "ratio", "staleness", "duration")
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RestCall:
    name: str
    method: str
    path: str
    """`{group}`: of a kept group."""
    body: Any = None
    accept: str = "application/json"


@dataclass(frozen=True, slots=True)
class CallTimes:
    name: str
    first_ms: float
    """Uncached, unless an earlier call has read it."""
    ms: Spread
    bytes: int


def calls(run: str) -> Iterator[RestCall]:
    """Yield reads, then acts."""
    path = f"/runs/{run}"
    yield RestCall("run", "GET", path)
    yield RestCall("why", "GET", f"{path}/why")
    for order in ORDERS:
        yield RestCall(f"groups by {order}", "GET", f"{path}/groups?sort={order}")
    yield RestCall("groups by reward", "GET", f"{path}/groups?min_reward=0.8")
    yield RestCall("lags of 2,000 groups", "GET", f"{path}/lags")
    yield RestCall("group", "GET", f"{path}/groups/{{group}}")
    yield RestCall("trajectory", "GET", f"{path}/trajectories/{{group}}/0", accept="application/msgpack")
    for axis in ("step", "time", "trajectories"):
        yield RestCall(f"6 series by {axis}", "GET", f"{path}/series?names={SERIES}&axis={axis}&points=800")
    yield RestCall("names of series", "GET", f"{path}/series")
    yield RestCall("comparison", "GET", f"/compare?runs={run}")
    yield RestCall("pause", "POST", f"{path}/pause")
    yield RestCall("resume", "POST", f"{path}/resume")
    yield RestCall("quarantine", "GET", f"{path}/quarantine")
    yield RestCall("change of settings", "PATCH", path, body={"learning_rate": 1e-3})


def measure_calls(url: str, run: str, rounds: int, *, add_step: Callable[[], int]) -> list[CallTimes]:
    """Measure each call. add_step: adds a step before each and returns one of its groups."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        return [_measure(client, call, rounds, add_step) for call in calls(run)]


def _measure(client: httpx.Client, call: RestCall, rounds: int, add_step: Callable[[], int]) -> CallTimes:
    first_ms, size = _time(client, call, add_step())
    times = [_time(client, call, add_step())[0] for _ in range(rounds)]
    return CallTimes(call.name, first_ms, Spread.of(times), size)


def _time(client: httpx.Client, call: RestCall, group: int) -> tuple[float, int]:
    """Return milliseconds, and bytes of the body."""
    if any(each in call.path for each in ("{group}", "/groups", "/lags")):
        time.sleep(REFRESH_INTERVAL_S)  # so that the service has to read the new step
    began = time.perf_counter()
    answer = client.request(call.method, call.path.format(group=group), json=call.body, headers={"accept": call.accept})
    ms = 1000 * (time.perf_counter() - began)
    answer.raise_for_status()
    return ms, len(answer.content)

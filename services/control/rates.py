"""Rates of a run's metrics over the last seconds.

Invariant: each record is decoded once, however many views show it, and the event loop is free between pages.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Mapping

from offbeat.services.control.component_store import ComponentStore
from offbeat.services.control.run import LearnerReport, RunRecord
from offbeat.services.control.schemas import RatesView
from offbeat.services.telemetry import decode_record

WINDOW_S = 15.0
PAGE_SIZE = 500
MAX_RUNS = 256
"""Runs whose windows are kept."""
METRICS = {
    "trajectories": ("rollout", "episodes"),
    "tokens_generated": ("generation", "tokens"),
    "tokens_trained": ("learner", "tokens_trained"),
}


class RunRates:
    """Windows of the runs that were viewed last."""

    def __init__(self, components: ComponentStore) -> None:
        self._components = components
        self._windows: OrderedDict[tuple[str, str], _Window] = OrderedDict()

    async def view(self, record: RunRecord, learner: LearnerReport, now: float, *, can_train: bool) -> RatesView:
        """Return the rates; raises `CodecError`."""
        key = record.run_id, record.uid
        window = self._windows.setdefault(key, _Window(self._components, record.run_id))
        self._windows.move_to_end(key)
        if len(self._windows) > MAX_RUNS:
            self._windows.popitem(last=False)
        rates = {name: total / WINDOW_S for name, total in (await window.totals()).items()}
        step_s = learner.metrics.get("time/step_s", 0.0)
        if step_s > WINDOW_S:  # no window holds two such steps: the newest one's rate, until the next is overdue
            span_s = max(step_s, now - learner.doing.get("since", now))
            tokens = learner.metrics.get("tokens_trained", 0.0)
            rates |= {"steps": can_train / span_s, "tokens_trained": can_train * tokens / span_s}
        return RatesView(**rates)


class _Window:
    def __init__(self, components: ComponentStore, run_id: str) -> None:
        self._components = components
        self._run_id = run_id
        self._lock = asyncio.Lock()
        self._position = (0, 0)
        """Id of the newest record that was read."""
        self._records: deque[tuple[int, Mapping[str, float]]] = deque()
        """Time in ms of Redis, and totals, of records that add to a rate."""

    async def totals(self) -> dict[str, float]:
        async with self._lock:
            start_ms, newest = await self._components.metrics_window(self._run_id, WINDOW_S)
            if newest < self._position:  # Redis was emptied or restored
                self._position = (0, 0)
                self._records.clear()
            while await self._read_page(start_ms) == PAGE_SIZE:
                pass
            while self._records and self._records[0][0] < start_ms:
                self._records.popleft()
        sums = dict.fromkeys(("steps", *METRICS), 0.0)
        for _, totals in self._records:
            for name, total in totals.items():
                sums[name] += total
        return sums

    async def _read_page(self, start_ms: int) -> int:
        milliseconds, sequence = max(self._position, (max(start_ms, 1) - 1, (1 << 64) - 1))
        page = await self._components.metrics_after(self._run_id, f"{milliseconds}-{sequence}", PAGE_SIZE)
        for entry_id, encoded in page:
            if totals := _totals(encoded):
                self._records.append((entry_id[0], totals))
            self._position = entry_id
        return len(page)


def _totals(encoded: bytes) -> Mapping[str, float]:
    """Return what a metric record adds to each rate."""
    record = decode_record(encoded)
    totals = {
        rate: record.values[name].total
        for rate, (source, name) in METRICS.items()
        if record.source == source and record.values.get(name) and record.values[name].total
    }
    is_step = record.source == "learner" and record.step is not None
    return {"steps": 1.0, **totals} if is_step else totals

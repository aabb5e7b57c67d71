"""Load of vLLM's KV cache, from its statistics of each step.

It takes the place of vLLM's Prometheus logger, which would count each step in some fifty series.
"""

# pyright: basic
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from offbeat.services.generation.engine import KvLoad

MEAN_OVER_S = 2.0
"""Time constant of the mean usage: prompts and answers come and go within a step."""
RECENT_S = 30.0


class KvStats(PrometheusStatLogger):
    def __init__(
        self, vllm_config: Any = None, engine_indexes: Any = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        del vllm_config, engine_indexes
        self._clock = clock
        self._usage = 0.0
        self._at = clock()
        self._preemptions = 0
        self._recent: deque[tuple[float, int]] = deque()
        """Time and number of preemptions."""

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...

    def record_admission_rejection(self, reason: str) -> None: ...

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        del mm_cache_stats, engine_idx
        if scheduler_stats is not None:
            self._add(scheduler_stats.kv_cache_usage)
        if iteration_stats is not None and iteration_stats.num_preempted_reqs:
            self._preemptions += iteration_stats.num_preempted_reqs
            self._recent.append((self._clock(), iteration_stats.num_preempted_reqs))

    def load(self, tokens: int, *, kept: float = 0.0) -> KvLoad:
        """Return the load. tokens: that the cache holds. kept: share of sessions between their turns, not counted."""
        now = self._clock()
        while self._recent and self._recent[0][0] < now - RECENT_S:
            self._recent.popleft()
        usage = self._usage * math.exp(-max(0.0, now - self._at - MEAN_OVER_S) / MEAN_OVER_S)  # no steps: none runs
        return KvLoad(max(0.0, usage - kept), self._preemptions, sum(count for _, count in self._recent), tokens)

    def _add(self, usage: float) -> None:
        now = self._clock()
        self._usage += (usage - self._usage) * (1 - math.exp(-(now - self._at) / MEAN_OVER_S))
        self._at = now

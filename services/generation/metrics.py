from offbeat.services.generation.engine import KvLoad, LoadTimes, SessionCounts
from offbeat.services.messages.types import Completion
from offbeat.services.telemetry import MetricRecord, Partial, mean


class Counts:
    def __init__(self, continued: int = 0, preemptions: int = 0) -> None:
        """continued, preemptions: those of the engine for earlier runs."""
        self._sums = dict.fromkeys(("tokens", "requests", "errors", "resampled", "refused_weights"), 0)
        self._loads: list[LoadTimes] = []
        self._continued = continued
        self._preemptions = preemptions
        self._prompt_tokens = self._cached_tokens = 0

    def completed(self, completion: Completion, prompt_tokens: int) -> None:
        self._sums["requests"] += 1
        self._sums["errors"] += bool(completion.error)
        self._sums["tokens"] += len(completion.token_ids)
        if completion.token_ids:
            self._prompt_tokens += prompt_tokens
            self._cached_tokens += completion.cached_tokens

    def resampled(self) -> None:
        self._sums["resampled"] += 1

    def refused_weights(self) -> None:
        self._sums["refused_weights"] += 1

    def loaded(self, times: LoadTimes) -> None:
        self._loads.append(times)

    def take(
        self, sessions: SessionCounts, kv: KvLoad, *, replica_id: str, version: int, running: int, waiting: int
    ) -> MetricRecord:
        values = {name: Partial("sum", value) for name, value in self._sums.items()}
        values |= {
            "weight_updates": Partial("sum", len(self._loads)),
            "version": Partial("last", version),
            "running": Partial("last", running),
            "waiting": Partial("last", waiting),
            "sessions": Partial("last", sessions.waiting),
            "continued": Partial("sum", sessions.continued - self._continued),
        }
        if kv.tokens:
            values["kv_usage"] = Partial("mean", kv.usage)
            values["preemptions"] = Partial("sum", kv.preemptions - self._preemptions)
        if self._prompt_tokens:
            values["prefix_cache_hit_rate"] = Partial("mean", self._cached_tokens, self._prompt_tokens)
        if self._loads:
            values["pause_s"] = mean(times.pause_s for times in self._loads)
            values["pause_max_s"] = Partial("max", max(times.pause_s for times in self._loads))
            values["load_s"] = mean(times.load_s for times in self._loads)
        self._sums = dict.fromkeys(self._sums, 0)
        self._loads = []
        self._prompt_tokens = self._cached_tokens = 0
        self._continued = sessions.continued
        self._preemptions = kv.preemptions
        return MetricRecord("generation", values, labels={"replica": replica_id})

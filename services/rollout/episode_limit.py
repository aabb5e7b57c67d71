"""Number of episodes that a worker plays at a time, by the load of the engines' KV cache (`rollout.kv_usage_target`).

Invariants: the limit grows only as episodes are submitted, so that it never outruns its own effect, and by what fits into
more engines; it shrinks what is admitted, and cancels no running episode.
"""

from collections import deque
from collections.abc import Mapping

from offbeat.services.weights.replica_reports import ReplicaLoad

GROWTH = 0.25
"""Of the limit, at least 1, in the time in which all episodes in play end once."""
CUT = 0.8
"""Of the episodes in play, after preemptions."""
LOW = 0.85
"""Share of the target below which the limit grows, and to which it shrinks."""
USAGE_LAG = 4
"""Observations whose episodes a usage may be of: it is a mean over seconds, reported and read once a second."""
COOLDOWN = 6
"""Observations between reductions, in which the one before takes effect."""
BINDING = 0.9
"""Share of the limit in play at which it is the limit that binds."""


class EpisodeLimit:
    def __init__(self, target: float, most: int, *, num_workers: int, sequence_length: int) -> None:
        """target: share of the KV cache. most: limit without load."""
        self._target = target
        self._most = most
        self._num_workers = num_workers
        self._sequence_length = sequence_length
        self._limit: float | None = None
        self._most_tokens = 0
        """Of all replicas so far; those that replace others are no more."""
        self._tells = True
        """Whether the engines, if there are any, may tell their load."""
        self._preemptions: dict[str, int] = {}
        self._played: deque[int] = deque(maxlen=USAGE_LAG)
        self._cooldown = 0

    @property
    def limit(self) -> int:
        if self._limit is not None:
            return int(self._limit)
        return 1 if self._tells else self._most

    def observe(self, loads: Mapping[str, ReplicaLoad], playing: int, finished: int) -> str:
        """Adapt the limit; return why it shrank, or "".

        loads: by replica; those that do not tell are left out. finished: episodes since the last observation, without
        those that failed or were cancelled, which may not have loaded an engine.
        """
        self._played.append(playing)
        known = {name: load for name, load in loads.items() if load.kv_tokens}
        if not known:
            self._tells = self._tells and not loads
            return ""
        preempted = sum(
            load.preemptions - min(load.preemptions, self._preemptions.get(name, load.preemptions))
            for name, load in known.items()
        )
        self._preemptions = {name: load.preemptions for name, load in known.items()}
        self._cooldown = max(0, self._cooldown - 1)
        self._make_room(sum(load.kv_tokens for load in known.values()))
        assert self._limit is not None, "the tokens set it"
        usage = max(load.kv_usage for load in known.values())
        if playing and not self._cooldown and preempted:
            return self._shrink(CUT, f"{preempted} request(s) were preempted")
        if playing and not self._cooldown and usage > self._target:
            return self._shrink(LOW * self._target / usage, f"{usage:.0%} of the KV cache is in use")
        if usage < LOW * self._target and not preempted and playing >= BINDING * self.limit:
            self._limit = self._clamp(self._limit + max(GROWTH * self._limit, 1.0) * finished / max(playing, 1))
        return ""

    def _make_room(self, tokens: int) -> None:
        """Raise the limit by what fits into added tokens at full length, in proportion if it was reduced below that."""
        if tokens <= self._most_tokens:
            return
        fit = self._most_tokens / self._sequence_length / self._num_workers
        more = tokens / self._sequence_length / self._num_workers - fit
        self._limit = self._clamp(more if self._limit is None else self._limit + more * min(1.0, self._limit / fit))
        self._most_tokens = tokens

    def _shrink(self, share: float, why: str) -> str:
        """share: of the episodes that the load is of, which may have ended since."""
        before = self.limit
        self._limit = self._clamp(min(share * max(self._played), float(before)))
        if self.limit == before:
            return ""
        self._cooldown = COOLDOWN
        return why

    def _clamp(self, limit: float) -> float:
        return min(max(limit, 1.0), float(self._most))

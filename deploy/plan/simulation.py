"""Discrete-event simulation of admission, play, batches and updates.

Invariants: groups start by the buffer's own rule (`services.buffer.admission`); the same seed gives the same run.
Engines share turns evenly; a turn's time is that of the concurrency at its start, and stands still while engines sleep.
"""

import heapq
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from offbeat.deploy.plan.outcome import Setup, SimulatedRun, Statistics
from offbeat.deploy.plan.stations import Average, Servers, Station
from offbeat.deploy.plan.workload import Measures, PlannedEpisode, draw_episodes
from offbeat.services.buffer.admission import GroupCounts, count_admissible, oldest_consumable

ROUNDING_S = 1e-9


class _Group:
    __slots__ = ("began", "done", "is_over", "members", "number", "version")

    def __init__(self, number: int, version: int, began: float) -> None:
        self.number = number
        self.version = version
        self.began = began
        self.done = 0
        self.is_over = False
        self.members: list[_Member] = []


class _Member:
    __slots__ = ("began", "due_s", "env_s", "group", "has_agent", "is_held", "turns")

    def __init__(self, group: _Group, episode: PlannedEpisode) -> None:
        self.group = group
        self.turns, env_s = episode
        self.env_s = env_s / episode.turns
        self.is_held = False
        self.has_agent = False
        self.began = 0.0
        self.due_s = 0.0
        """End of its turn, in time that engines are awake."""


class _Agents:
    __slots__ = ("free", "waiting")

    def __init__(self, number: int) -> None:
        self.free = number
        self.waiting: deque[_Member] = deque()


class Simulation:
    def __init__(self, setup: Setup, measures: Measures, seed: int) -> None:
        self._setup = setup
        self._measures = measures
        self._rng = np.random.default_rng(seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_events = 0
        self._step = 0
        """Of the newest announced weights."""
        self._warm_up = self._last = 0
        self._batch = 0
        """0-based; filled or trained."""
        self._published = 0
        self._standing = self._next = 0
        members = setup.limits.group_size + setup.limits.redundancy
        self._episodes = draw_episodes(measures.workload, self._rng, members)
        self._free = setup.slots
        self._queue: deque[_Member] = deque()
        self._assembling: dict[int, _Group] = {}
        """In order of admission."""
        self._ready: list[tuple[int, _Group]] = []
        """Heap by the order of consumption."""
        self._num_complete = 0
        self._taken: list[_Group] | None = []
        """Of the batch being filled; None while the learner is busy."""
        self._refills = 0
        self._no_signal = self._draw_no_signal()
        """Of this batch."""
        self._wait_began = 0.0
        self._served_at = 0.0
        self._generating = 0
        self._asleep_since: float | None = None
        self._slept_s = 0.0
        self._frozen: list[_Member] = []
        """Whose turns go on when the engines wake."""
        self._train_s = measures.train_s(setup.batch)
        self._workers = [Station() for _ in range(setup.num_workers)]
        self._buffer = Station()
        self._averages = {name: Average() for name in ("playing", "held", "waiting", "generating")}
        self._call_s = inf if measures.env_call_s is None else measures.env_call_s
        self._envs = [Servers(setup.env_steps) for _ in self._workers] if setup.env_steps else []
        self._agents = [_Agents(setup.agents) for _ in self._workers] if setup.agents else []
        self._by_turns = not measures.turn_s.is_flat or measures.worker_s > 0 or bool(self._envs) or setup.sleeps
        self._statistics = Statistics()
        self._phases: list[float] = (self._rng.random(setup.num_workers) * setup.heartbeat_s).tolist()

    def run(self, steps: int, warm_up: int) -> SimulatedRun:
        """Simulate `steps` batches, without counting the first `warm_up`."""
        self._warm_up, self._last = warm_up, steps
        self._claim()
        while len(self._statistics.ends) < steps:
            if not self._events:
                raise ValueError(
                    "no group can ever start: max_groups_in_flight, slots and groups_per_step leave no room"
                )
            self._now, _, act, argument = heapq.heappop(self._events)
            act(argument)
        return self._outcome(steps - warm_up)

    def _at(self, time: float, act: Callable[[Any], None], argument: Any = None) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, act, argument))

    # --- rollout ----------------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Fill free slots with queued members, then with new groups within the bound."""
        limits = self._setup.limits
        while self._free:
            while self._queue and self._queue[0].group.is_over:
                self._queue.popleft()
            if not self._queue:
                counts = GroupCounts(self._standing, len(self._assembling))
                if count_admissible(limits, self._step, counts)[0] <= 0:
                    break
                self._admit()
            self._begin(self._queue.popleft())
        self._observe()

    def _admit(self) -> None:
        group = _Group(self._next, self._step, self._now)
        self._next, self._standing = self._next + 1, self._standing + 1
        group.members = [_Member(group, episode) for episode in next(self._episodes)]
        self._assembling[group.number] = group
        self._queue.extend(group.members)

    def _begin(self, member: _Member) -> None:
        self._free -= 1
        member.is_held = True
        member.began = self._now
        at = self._buffer.serve(self._now, self._measures.buffer_s / 2)
        at = max(at, self._served_at)
        if self._agents:
            self._at(at, self._wait_for_agent, member)
        else:
            self._play(member, at)

    def _wait_for_agent(self, member: _Member) -> None:
        if not member.is_held:
            return
        agents = self._agents[member.group.number % len(self._agents)]
        if agents.free:
            agents.free -= 1
            self._play_with_agent(member)
        else:
            agents.waiting.append(member)

    def _play_with_agent(self, member: _Member) -> None:
        member.has_agent = True
        member.began = self._now
        self._play(member, self._now)

    def _play(self, member: _Member, at: float) -> None:
        if self._by_turns:
            self._at(at, self._sample, member)
        else:
            turn_s = self._measures.turn_s.seconds(1.0)
            self._at(at + member.turns * (turn_s + member.env_s), self._end, member)

    def _sample(self, member: _Member) -> None:
        if not member.is_held:
            return
        at = self._workers[member.group.number % len(self._workers)].serve(self._now, self._measures.worker_s)
        if at > self._now:
            self._at(at, self._generate, member)
        else:
            self._generate(member)

    def _generate(self, member: _Member) -> None:
        if member.is_held:
            self._generating += 1
            seconds = self._measures.turn_s.seconds(self._generating / self._setup.num_replicas)
            member.due_s = self._awake_s + seconds
            self._at(self._now + seconds, self._act, member)

    def _act(self, member: _Member) -> None:
        if self._setup.sleeps and member.due_s - self._awake_s > ROUNDING_S:
            self._resume(member)
            return
        self._generating -= 1
        if member.is_held:
            member.turns -= 1
            at = self._step_env(member) if self._envs else self._now + member.env_s
            self._at(at, self._sample if member.turns else self._end, member)

    def _resume(self, member: _Member) -> None:
        """Go on with a turn that engines have slept through."""
        if self._asleep_since is None:
            self._at(self._now + member.due_s - self._awake_s, self._act, member)
        else:
            self._frozen.append(member)

    @property
    def _awake_s(self) -> float:
        """Time that engines were awake."""
        return (self._now if self._asleep_since is None else self._asleep_since) - self._slept_s

    def _step_env(self, member: _Member) -> float:
        """Return the end of a turn's time outside of engines, of which `env_call_s` takes one of the worker's steps."""
        call_s = min(member.env_s, self._call_s)
        done = self._envs[member.group.number % len(self._envs)].serve(self._now, call_s)
        return done + member.env_s - call_s

    def _end(self, member: _Member) -> None:
        if not member.is_held:
            return
        at = self._buffer.serve(self._now, self._measures.buffer_s / 2)
        if at > self._now:
            self._at(at, self._submit, member)
        else:
            self._submit(member)

    def _submit(self, member: _Member) -> None:
        if not member.is_held:
            return
        group = member.group
        self._statistics.episode_s.append(self._now - member.began)
        self._release(member)
        if not group.is_over:
            group.done += 1
            if group.done == self._setup.limits.group_size:
                self._complete(group)
        self._claim()

    def _release(self, member: _Member) -> None:
        if member.is_held:
            member.is_held = False
            self._free += 1
            if member.has_agent:
                self._release_agent(member)

    def _release_agent(self, member: _Member) -> None:
        agents = self._agents[member.group.number % len(self._agents)]
        while agents.waiting and not agents.waiting[0].is_held:
            agents.waiting.popleft()
        if agents.waiting:
            self._play_with_agent(agents.waiting.popleft())
        else:
            agents.free += 1

    def _complete(self, group: _Group) -> None:
        self._end_group(group)
        self._statistics.group_s.append(self._now - group.began)
        order = group.number if self._setup.order == "admission" else self._num_complete
        self._num_complete += 1
        heapq.heappush(self._ready, (order, group))
        self._take()

    def _end_group(self, group: _Group) -> None:
        """Cancel unfinished members at their worker's next heartbeat."""
        group.is_over = True
        del self._assembling[group.number]
        interval = self._setup.heartbeat_s
        phase = self._phases[group.number % len(self._phases)]
        told_at = self._now + (phase - self._now) % interval if interval else self._now
        for member in group.members:
            if member.is_held:
                self._statistics.cancelled += 1
                self._at(told_at, self._cancel, member)
        group.members = []

    def _cancel(self, member: _Member) -> None:
        self._release(member)
        self._claim()

    # --- learner ----------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        limits = self._setup.limits
        while self._taken is not None and self._ready and self._may_take():
            _, group = heapq.heappop(self._ready)
            if limits.stale_policy == "drop" and group.version < oldest_consumable(self._batch, limits.max_staleness):
                self._drop("stale")
            elif self._refills < self._setup.max_refills and self._rng.random() < self._no_signal:
                self._refills += 1
                self._drop("no_signal")
            else:
                self._taken.append(group)
                if len(self._taken) == limits.groups_per_step:
                    self._train(self._taken)

    def _draw_no_signal(self) -> float:
        return float(self._rng.choice(self._measures.no_signal)) if self._measures.no_signal else 0.0

    def _may_take(self) -> bool:
        """Return whether the next group in order is complete."""
        if self._setup.order == "completion" or not self._assembling:
            return True
        return self._ready[0][0] < next(iter(self._assembling))

    def _drop(self, reason: str) -> None:
        self._standing -= 1
        self._statistics.dropped[reason] += 1
        self._at(self._now, lambda _: self._claim())

    def _train(self, groups: list[_Group]) -> None:
        self._taken = None
        self._statistics.waits_s.append(self._now - self._wait_began)
        self._statistics.lags.update(self._batch - group.version for group in groups)
        if self._setup.sleeps and self._asleep_since is None:
            self._asleep_since = self._now
        step = self._batch + 1
        is_due = self._setup.is_publish_due(step) or step - self._published > self._setup.limits.max_staleness
        self._at(self._now + self._train_s + (self._measures.publish_s if is_due else 0.0), self._publish, is_due)

    def _publish(self, is_due: bool) -> None:
        self._batch += 1
        if is_due:
            self._published = self._batch
            self._at(self._now + self._measures.announce_s, self._announce, self._batch)
        self._at(self._now + self._measures.other_s, self._finish_step)

    def _wake(self, step: int) -> None:
        """Wake the engines, unless the learner has taken another batch since."""
        if self._asleep_since is None or self._batch != step or self._taken is None:
            return
        self._slept_s += self._now - self._asleep_since
        self._asleep_since = None
        frozen, self._frozen = self._frozen, []
        for member in frozen:
            self._resume(member)

    def _announce(self, step: int) -> None:
        self._step = step
        self._served_at = self._now + self._measures.serve_s
        limits = self._setup.limits
        if limits.stale_policy == "drop":
            oldest = oldest_consumable(step, limits.max_staleness)
            for group in [group for group in self._assembling.values() if group.version < oldest]:
                self._end_group(group)
                self._drop("expired")
        self._claim()
        self._take()

    def _finish_step(self, _: None) -> None:
        ends = self._statistics.ends
        ends.append(self._now)
        self._wait_began = self._now
        if len(ends) == self._warm_up:
            self._forget()
        if len(ends) == self._last:
            return
        self._taken, self._refills, self._no_signal = [], 0, self._draw_no_signal()
        if self._setup.sleeps:  # the newest weights are loaded before the first turn
            load_s = self._measures.serve_s if self._published == self._batch else 0.0
            self._at(self._now + load_s, self._wake, self._batch)
        self._take()
        self._observe()

    # --- statistics -------------------------------------------------------------------------------------------------------

    def _observe(self) -> None:
        waiting = len(self._ready) + (len(self._taken) if self._taken else 0)
        values = (len(self._assembling), self._setup.slots - self._free, waiting, self._generating)
        for average, value in zip(self._averages.values(), values, strict=True):
            average.observe(self._now, value)

    def _forget(self) -> None:
        """Reset statistics, except drops and step times."""
        old = self._statistics
        self._statistics = Statistics(ends=old.ends, dropped=old.dropped, began=self._now)
        for average in self._averages.values():
            average.restart(self._now)
        for station in (self._buffer, *self._workers):
            station.busy_s = 0.0

    def _outcome(self, steps: int) -> SimulatedRun:
        means = {name: average.mean(self._now) for name, average in self._averages.items()}
        span_s = self._now - self._statistics.began
        if not span_s:
            raise ValueError("a plan needs a time above 0: of envs, turns or training")
        return self._statistics.outcome(
            steps,
            span_s,
            trajectories=steps * self._setup.batch,
            slots_empty=1 - means["held"] / self._setup.slots,
            playing_groups=means["playing"],
            waiting_groups=means["waiting"],
            generating=means["generating"],
            worker_busy=max(station.busy_s for station in self._workers) / span_s,
            buffer_busy=self._buffer.busy_s / span_s,
        )

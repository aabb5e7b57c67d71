"""Groups of a run, from the ledgers in its folder."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter
from pathlib import Path

from offbeat.deploy.audit.live_replay import KEPT_GROUPS, LiveReplay
from offbeat.deploy.audit.lives import DROPPED, FAILED, TRAINED, GroupLife
from offbeat.deploy.console.tail import JsonLinesTail
from offbeat.services.buffer.group_ledger import LEDGER_FILE, parse_event
from offbeat.services.control.console.archive import GroupQuery, UnknownGroupError
from offbeat.services.control.console.schemas import GroupSort, GroupState, GroupsView, GroupView, LagsView
from offbeat.services.control.schemas import CountersView, finite
from offbeat.services.process import uncollected
from offbeat.trainer.learner.step_ledger import STEPS_FILE, parse_journal_line

REFRESH_INTERVAL_S = 0.5
"""Bounds the cost of frequent callers."""
NEWEST_BYTES = 32 << 20
"""Of a larger ledger its end is read, which has more than `KEPT_GROUPS` groups of 16 members."""
MASKED = "its batch counted it in denominators alone: no signal, or filtered"


class GroupIndex:
    """Lives by number; `refresh` reads appended ones."""

    def __init__(self, folder: Path) -> None:
        self._event_tail = JsonLinesTail(folder / LEDGER_FILE, NEWEST_BYTES)
        self._step_tail = JsonLinesTail(folder / STEPS_FILE, NEWEST_BYTES)
        self._replay = LiveReplay()
        self._refreshed_at = -math.inf

    @property
    def lives(self) -> dict[int, GroupLife]:
        return self._replay.lives

    @property
    def has_all(self) -> bool:
        """Whether no earlier groups are left out."""
        return self._replay.first_number == 0

    def refresh(self) -> None:
        if time.monotonic() < self._refreshed_at + REFRESH_INTERVAL_S:
            return
        if is_first := self._event_tail.restarted():
            self._replay.clear_events()
        if self._step_tail.restarted():
            self._replay.clear_lines()
        with uncollected():
            events = [event for row in self._event_tail.read() if (event := parse_event(row)) is not None]
            lines = [line for row in self._step_tail.read() if (line := parse_journal_line(row)) is not None]
            if is_first and self._event_tail.num_skipped_bytes:
                self._replay.leave_out_earlier(events)
            self._replay.add(events, lines)
        self._refreshed_at = time.monotonic()

    def find(self, number: int) -> GroupLife:
        """Raises `UnknownGroupError`."""
        if number not in self.lives and number < self._replay.first_number:
            raise UnknownGroupError(
                f"group {number} is older than the newest {KEPT_GROUPS:,} groups, which are listed: "
                f"`offbeat audit RUN --group {number}` reads it in the ledgers"
            )
        if number not in self.lives:
            raise UnknownGroupError(f"there is no group {number}: {len(self.lives)} were admitted, numbered from 0")
        return self.lives[number]


def state_of(life: GroupLife) -> GroupState:
    if life.ending in (TRAINED, DROPPED, FAILED):
        return GroupState(life.ending)
    if life.step is not None:
        return GroupState.CONSUMED
    return GroupState.SUBMITTED if life.submitted else GroupState.PLAYING


def view_of(life: GroupLife, *, tag: str, max_ratio: float | None, recorded: bool) -> GroupView:
    trained = life.ending == TRAINED
    reason = "" if trained else life.detail
    return GroupView(
        number=life.number,
        state=state_of(life),
        tag=life.tag or tag,
        admitted_version=life.admitted_version,
        admitted_at=life.admitted_at or None,
        submitted_at=life.submitted_at or None,
        trained_at=life.trained_at or None,
        ended_at=life.ended_at or None,
        step=life.step,
        checkpoint=int(life.detail) if trained else None,
        reason=reason or ("" if life.computed else MASKED),
        computed=life.computed,
        oldest_version=life.oldest_version,
        staleness=staleness_of(life),
        rewards=[finite(reward) for reward in life.rewards],
        num_sampled=life.num_sampled,
        max_ratio=max_ratio,
        recorded=recorded,
    )


def staleness_of(life: GroupLife) -> int | None:
    if life.step is None or life.oldest_version is None:
        return None
    return life.step - 1 - life.oldest_version


def count_lives(lives: Sequence[GroupLife]) -> CountersView:
    endings = {ending: Counter(life.detail for life in lives if life.ending == ending) for ending in (DROPPED, FAILED)}
    num_trained = sum(life.ending == TRAINED for life in lives)
    return CountersView(
        admitted=len(lives),
        submitted=sum(life.submitted for life in lives),
        trained=num_trained,
        dropped=dict(endings[DROPPED]),
        failed=dict(endings[FAILED]),
        in_flight=len(lives) - num_trained - sum(counts.total() for counts in endings.values()),
    )


def count_lags(lives: dict[int, GroupLife], groups: int, columns: int) -> LagsView:
    """Count the lags of the newest consumed groups by ranges of steps."""
    consumed = (life for life in reversed(lives.values()) if life.ending in ("", TRAINED))
    lags = ((life.step, lag) for life in consumed if life.step is not None and (lag := staleness_of(life)) is not None)
    newest = list(islice(lags, groups))
    if not newest:
        return LagsView(total=0, first=None, last=None, counts=[])
    first, last = min(step for step, _ in newest), max(step for step, _ in newest)
    num_steps, num_lags = last - first + 1, 1 + max(lag for _, lag in newest)
    columns = min(columns, num_steps)
    counts = [[0] * num_lags for _ in range(columns)]
    for step, lag in newest:
        counts[(step - first) * columns // num_steps][lag] += 1
    return LagsView(total=len(newest), first=first, last=last, counts=counts)


def select(
    lives: Iterable[GroupLife], query: GroupQuery, tag_of: Callable[[GroupLife], str], ratios: dict[int, float]
) -> list[GroupLife]:
    """Return the selected lives in order. ratios: largest ratio of groups, if known."""
    states = set(query.states)
    if GroupQuery(sort=query.sort, offset=query.offset, limit=query.limit) == query and query.sort is GroupSort.NUMBER:
        return sorted(lives, key=attrgetter("number"), reverse=True)
    chosen = [
        life
        for life in lives
        if (not states or state_of(life) in states)
        and (query.step is None or life.step == query.step)
        and (query.tag is None or tag_of(life) == query.tag)
        and _fits_reward(life, query)
    ]
    return sorted(chosen, key=lambda life: (_rank(life, query.sort, ratios), -life.number))


def _fits_reward(life: GroupLife, query: GroupQuery) -> bool:
    if query.min_reward is None and query.max_reward is None:
        return True
    if not life.rewards:
        return False
    mean = statistics.fmean(life.rewards)
    low = -math.inf if query.min_reward is None else query.min_reward
    high = math.inf if query.max_reward is None else query.max_reward
    return low <= mean <= high


def _rank(life: GroupLife, sort: GroupSort, ratios: dict[int, float]) -> float:
    """Return a sort key; groups without the value come last."""
    match sort:
        case GroupSort.NUMBER:
            return 0.0
        case GroupSort.SPREAD:
            return max(life.rewards) - min(life.rewards) if life.rewards else math.inf
        case GroupSort.TOKENS:
            return -float(life.num_sampled)
        case GroupSort.RATIO:
            return -ratios.get(life.number, -math.inf)
        case GroupSort.STALENESS:
            staleness = staleness_of(life)
            return math.inf if staleness is None else -float(staleness)
        case GroupSort.DURATION:
            return life.admitted_at - life.submitted_at if life.submitted else math.inf


def page_of(lives: list[GroupLife], query: GroupQuery, view: Callable[[GroupLife], GroupView]) -> GroupsView:
    end = query.offset + query.limit
    return GroupsView(
        groups=[view(life) for life in lives[query.offset : end]],
        total=len(lives),
        next=end if end < len(lives) else None,
    )

"""`offbeat runs groups` and `trajectory`."""

from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from offbeat.deploy.cli.runs.calls import call, show_answer
from offbeat.services.control.client import ControlClient
from offbeat.services.control.console.schemas import (
    NO_OUTCOME,
    Floats,
    GroupDetailView,
    GroupsView,
    GroupView,
    SegmentView,
    TrajectoryView,
)

COLUMNS = ("trajectory", "reward", "turns", "tokens", "versions", "max. ratio", "end", "tokens by outcome")


def list_groups(url: str, token: str | None, run_id: str, filters: dict[str, Any], *, as_json: bool) -> int:
    async def ask(client: ControlClient) -> int:
        answer = await client.groups(run_id, **filters)
        return show_answer(answer, as_json=as_json, otherwise=lambda: _groups_table(answer))

    return call(url, token, ask)


def show_group(url: str, token: str | None, run_id: str, number: int, *, as_json: bool) -> int:
    async def ask(client: ControlClient) -> int:
        answer = await client.group(run_id, number)
        return show_answer(answer, as_json=as_json, otherwise=lambda: _group_table(answer))

    return call(url, token, ask)


def show_trajectory(url: str, token: str | None, run_id: str, group: int, index: int, *, as_json: bool) -> int:
    async def ask(client: ControlClient) -> int:
        answer = await client.trajectory(run_id, group, index)
        return show_answer(answer, as_json=as_json, otherwise=lambda: "\n".join(_describe(answer)))

    return call(url, token, ask)


def _groups_table(page: GroupsView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", caption=_caption(page), caption_justify="left")
    for heading in ("group", "state", "tag", "step", "lag", "tokens", "max. ratio", "rewards", "reason"):
        table.add_column(heading)
    for group in page.groups:
        table.add_row(*map(escape, _cells(group)))
    return table


def _caption(page: GroupsView) -> str:
    more = f"; --offset {page.next} lists more" if page.next is not None else ""
    return f"{len(page.groups)} of {page.total} groups{more}"


def _cells(group: GroupView) -> Iterator[str]:
    yield str(group.number)
    yield group.state.value
    yield group.tag
    yield _number(group.step)
    yield _number(group.staleness)
    yield _number(group.num_sampled or None)
    yield _number(group.max_ratio)
    yield _numbers(group.rewards)
    yield group.reason


def _group_table(group: GroupDetailView) -> Table:
    titles = [f"group {group.number}: {group.state.value}", group.tag, group.reason]
    if group.step is not None:
        titles.append(f"step {group.step}, lag {_number(group.staleness)}")
    if not group.members:
        titles.append(f"rewards {_numbers(group.rewards)}" if group.rewards else "its trajectories are not kept")
    table = Table(box=None, title=escape(", ".join(filter(None, titles))), title_justify="left", header_style="bold")
    for heading in COLUMNS if group.members else ():
        table.add_column(heading)
    for member in group.members:
        versions = dict.fromkeys((_number(member.oldest_version), _number(member.newest_version)))
        table.add_row(
            f"{group.number}/{member.index}",
            _number(member.reward),
            str(member.turns),
            str(member.num_sampled),
            "-".join(versions),
            _number(member.max_ratio),
            escape(member.stop_reason),
            ", ".join(f"{name} {count}" for name, count in member.outcomes.items()),
        )
    return table


def _describe(trajectory: TrajectoryView) -> Iterator[str]:
    facts = f"trajectory {trajectory.group}/{trajectory.index}: {trajectory.tag}, seed {trajectory.seed}"
    yield f"{facts}, reward {_number(trajectory.reward)}, {trajectory.stop_reason}, trained at step {trajectory.step}"
    yield from filter(None, (trajectory.error, trajectory.reason))
    has_messages = len(trajectory.text) > 1
    if trajectory.text:
        yield ("system: " if has_messages else "prompt: ") + trajectory.text[0]
    for i, turn in enumerate(trajectory.turns):
        if has_messages:
            yield f"env: {turn.observation}"
        yield f"turn {i}: {turn.text}"
        yield "  " + _describe_tokens(trajectory, trajectory.segments[turn.segment], turn.start, turn.end)


def _describe_tokens(trajectory: TrajectoryView, segment: SegmentView, start: int, end: int) -> str:
    sampled = [i for i in range(start, end) if segment.mask[i]]
    versions = sorted({segment.versions[i] for i in sampled})
    counts: dict[str, int] = {}
    for i in sampled:
        outcome = segment.outcome[i]
        name = "not trained" if outcome == NO_OUTCOME else trajectory.outcomes[outcome].replace("_", " ")
        counts[name] = counts.get(name, 0) + 1
    columns = {"logprob": segment.logprobs, "trainer's": segment.trainer_logprobs, "ratio": segment.ratio}
    means = ", ".join(f"{name} {_mean(column, sampled)}" for name, column in columns.items())
    outcomes = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{len(sampled)} tokens of version {_numbers(versions)}; mean {means}; {outcomes}"


def _mean(column: Floats, places: list[int]) -> str:
    values = [value for i in places if (value := column[i]) is not None]
    return _number(sum(values) / len(values)) if values else "–"


def _numbers(values: "Floats | list[int]") -> str:
    return " ".join(map(_number, values))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"

"""Resources of active runs: the folder, exclusively, and the generation application, exclusively or shared.

Invariant: runs share a resource only up to its number of slots, and only if their adapters have the same base.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from redis.asyncio.client import Pipeline

from offbeat.services.control.run import BusyError, RunSpec
from offbeat.services.keys import claims_key, join_claim

T = TypeVar("T")
APP = "app"
KINDS = ("folder", APP)
Claims = Mapping[str, Mapping[str, Sequence[str]]]
"""Kind -> resource -> its runs."""


@dataclass(frozen=True, slots=True)
class Holder:
    """An active run with a claim."""

    run_id: str
    state: str
    base: str
    """`RunRecord.base`."""


def write_claims(pipe: Pipeline, claims: Claims) -> None:
    for kind, resources in claims.items():
        for name, run_ids in resources.items():
            if run_ids:
                pipe.hset(claims_key(kind), name, join_claim(run_ids))
            else:
                pipe.hdel(claims_key(kind), name)


def without_run(run_id: str, held: Claims) -> Claims:
    """Return what is left of a run's claims when it is deleted."""
    return {
        kind: {name: [run for run in runs if run != run_id] for name, runs in resources.items() if run_id in runs}
        for kind, resources in held.items()
    }


def find_conflict(kind: str, name: str, holders: Sequence[Holder], *, slots: int, base: str) -> str:
    """Return why a run can't have a resource beside its holders; empty if it can. base: of the run, empty: its own."""
    if not holders:
        return ""
    advice = f"or use another {kind}"
    who = _describe(holders)
    if slots == 1:
        return f"{kind} {name!r} is in use by {who}: stop it first, {advice}"
    if not base:
        reason = "and may only be shared on one base, where this run's warm start trains its own: leave warm_start out"
        return f"{kind} {name!r} is in use by {who}, {reason}, {advice}"
    if any(holder.base != base for holder in holders):
        reason = "whose adapters are on another base: start from the same weights, or stop the other run first"
        return f"{kind} {name!r} is in use by {who}, {reason}, {advice}"
    if len(holders) >= slots:
        return (
            f"{kind} {name!r} has {slots} adapter slots, all in use by {who}: stop one first, raise max_loras, {advice}"
        )
    return ""


def _describe(holders: Sequence[Holder]) -> str:
    runs = [f"run {holder.run_id!r}, which is {holder.state}" for holder in holders]
    return " and ".join(runs)


def claims_of(spec: RunSpec, others: Mapping[str, Sequence[Holder]], held: Claims) -> Claims:
    """Return a start's claims, and what is left of its earlier ones. others: by kind, the holders beside it."""
    claims: dict[str, dict[str, Sequence[str]]] = {}
    for kind, name in spec.claims.items():
        earlier = {each: runs for each, runs in held[kind].items() if spec.run_id in runs and each != name}
        claims[kind] = {each: [run for run in runs if run != spec.run_id] for each, runs in earlier.items()}
        claims[kind][name] = [*(holder.run_id for holder in others[kind]), spec.run_id]
    return claims


async def claim_chosen(choose: Callable[[], Awaitable[RunSpec]], claim: Callable[[RunSpec], Awaitable[T]]) -> T:
    """Claim a run's resources, choosing again while other starts take the chosen application; raises `BusyError`."""
    spec = await choose()
    while True:
        try:
            return await claim(spec)
        except BusyError as error:
            taken = spec.claims.get(APP)
            if error.kind != APP or (spec := await choose()).claims.get(APP) == taken:
                raise

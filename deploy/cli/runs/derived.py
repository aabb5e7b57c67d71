"""`offbeat runs fork` and `reproduce`."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from offbeat.deploy.cli.runs.calls import DONE, REFUSED, call, parse_number, parse_pairs, show_answer
from offbeat.services.control.client import ControlClient
from offbeat.services.control.console.schemas import ReproductionState, ReproductionView

POLL_S = 1.0
NOT_EQUAL = 1


def fork_run(
    url: str, token: str | None, run_id: str, step: int, name: str | None, values: Sequence[str], *, as_json: bool
) -> int:
    pairs = parse_pairs(values, _parse_json)
    if pairs is None:
        return REFUSED
    changes = pairs if name is None else {"exp_name": name, **pairs}

    async def ask(client: ControlClient) -> int:
        view = await client.fork(run_id, step, changes)
        return show_answer(view, as_json=as_json, otherwise=lambda: view.id)

    return call(url, token, ask)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=str, parse_float=parse_number)
    except ValueError:
        return text


def reproduce_run(url: str, token: str | None, run_id: str, step: int, *, as_json: bool) -> int:
    """Repeat steps and wait for the result; an interrupt ends only the wait."""

    async def ask(client: ControlClient) -> int:
        view = await client.reproduce(run_id, step)
        while view.state is ReproductionState.RUNNING:
            await asyncio.sleep(POLL_S)
            view = await client.reproduction(run_id)
        show_answer(view, as_json=as_json, otherwise=lambda: _describe(view))
        return DONE if view.state in (ReproductionState.EQUAL, ReproductionState.TRAINED) else NOT_EQUAL

    return call(url, token, ask)


def _describe(view: ReproductionView) -> str:
    compared = (view.result or {}).get("compared", [])
    match view.state:
        case ReproductionState.FAILED:
            return f"step {view.step} can't be reproduced: {view.error}"
        case ReproductionState.TRAINED:
            return f"step {view.step} is trained again; there is no later checkpoint to compare the weights with"
        case _:
            return f"step {view.step}: the weights of {len(compared)} checkpoint(s) are {view.state.value}"

"""`offbeat runs watch`.

Invariant: reconnects to an unavailable service; prints no event twice.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence

from offbeat.deploy.cli.run_view import LiveView, open_view
from offbeat.deploy.cli.runs.calls import DONE, UNREACHABLE, call
from offbeat.deploy.local.signals import interruptible
from offbeat.deploy.report.history import RunHistory
from offbeat.services.control.client import ControlClient
from offbeat.services.control.event_schemas import HistoryView, MetricView
from offbeat.services.control.run import RunState
from offbeat.services.control.schemas import RunView

KINDS = ("run", "metrics", "history")
FAILED, UNTRAINED = 1, 6


def watch_run(url: str, token: str | None, run_id: str, *, as_json: bool) -> int:
    async def ask(client: ControlClient) -> int:
        return await (_print_events(client, run_id) if as_json else _show_events(client, run_id))

    try:
        with interruptible():
            return call(url, token, ask)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return DONE
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; Python would complain at the flush
        return UNREACHABLE


async def _print_events(client: ControlClient, run_id: str, kinds: Sequence[str] = ()) -> int:
    code = DONE
    async for message in client.events(run_id, kinds=kinds, from_start=True):
        data = json.loads(message.data)
        if message.event == "run":
            code = _exit_code(RunView.model_validate(data))
        print(json.dumps({"event": message.event, "id": message.id, "data": data}), flush=True)  # noqa: T201
    return code


async def _show_events(client: ControlClient, run_id: str) -> int:
    view = await client.show(run_id)
    history = RunHistory()
    with open_view(run_id, began=view.started_at) as shown:
        async for message in client.events(run_id, kinds=KINDS, from_start=True):
            match message.event:
                case "run":
                    view = RunView.model_validate_json(message.data)
                    shown.show(view, history)
                case "metrics":
                    record = MetricView.model_validate_json(message.data)
                    history.add([(record.id, record.record())])
                case _:
                    _print_event(shown, HistoryView.model_validate_json(message.data), view.started_at)
        shown.close()
        shown.print(_describe_end(view))
    return _exit_code(view)


def _print_event(shown: LiveView, event: HistoryView, since: float) -> None:
    if event.at < since:
        return
    detail = event.detail
    match event.event:
        case "died":
            shown.print(f"{detail['component']} died ({detail['why']}) and is restarted")
        case "recovered":
            shown.print(f"{detail['component']} is ready again")
        case "adopted":
            shown.print(f"from step {detail['step'] + 1} on: {_format_values(detail['values'])}")
        case "asked":
            shown.print(f"requested: {_format_values(detail['values'])}")
        case "state" if detail.get("state") in ("paused", "draining"):
            shown.print(f"the run is {detail['state']}" + (f": {detail['error']}" if detail.get("error") else ""))
        case _:
            return


def _describe_end(view: RunView) -> str:
    why = f": {view.error}" if view.error else ""
    why += f"\nRead {view.paths.output_dir}/{view.log}" if view.error and view.log else ""
    return f"{view.id} is {view.state} at step {max(view.step, 0)} of {view.max_steps}{why}"


def _exit_code(view: RunView) -> int:
    if view.state is RunState.FINISHED and view.error:
        return UNTRAINED
    return FAILED if view.state is RunState.FAILED else DONE


def _format_values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sorted(values.items()))

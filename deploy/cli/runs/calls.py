"""Requests and output of `offbeat runs`; each returns an exit code.

Invariant: stdout has only the answer, stderr the rest, without tracebacks.
"""

import asyncio
import json
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.text import Text

from offbeat.deploy.cli.runs.tables import run_table, runs_table
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import compose_document
from offbeat.deploy.printable import show_controls
from offbeat.deploy.token_file import TOKEN_FILE, find_token, is_remote
from offbeat.services.control.client import ControlClient, ControlRefusedError
from offbeat.services.control.schemas import ErrorBody, RunView
from offbeat.services.errors import RetryableError

DONE, UNREACHABLE, REFUSED, UNKNOWN, CONFLICT, UNAUTHORIZED = 0, 1, 2, 3, 4, 5
CODES = {401: UNAUTHORIZED, 403: UNAUTHORIZED, 404: UNKNOWN, 409: CONFLICT}
"""Exit codes; other 4xx are REFUSED."""
TIMEOUT_S = 30.0
PIPED_WIDTH = 200


def call(url: str, token: str | None, ask: Callable[[ControlClient], Awaitable[int]]) -> int:
    token = token or find_token(url)
    if token is not None and not token.isascii():
        print_message("the token has characters other than ASCII")
        return UNAUTHORIZED

    async def asked() -> int:
        async with ControlClient(url, token=token, timeout_s=TIMEOUT_S) as client:
            return await ask(client)

    try:
        return asyncio.run(asked())
    except ControlRefusedError as error:
        return print_error(error, token)
    except RetryableError as error:
        complaint = str(error)
    except httpx.InvalidURL as error:
        complaint = f"no URL: {error}"
    except (json.JSONDecodeError, ValidationError):
        complaint = "answers, and is no control service of this version"
    print_message(
        f"{url}: {complaint}\nSay where the control service is with --url or OFFBEAT_URL. "
        "A Tinker server has none: offbeat runs models"
    )
    return UNREACHABLE


def print_error(error: ControlRefusedError, token: str | None) -> int:
    print_message(describe(error.error.error))
    if error.status == 401:
        missing = f"Give the token with --token or OFFBEAT_TOKEN; `serve deploy deploy/deploy.yaml` makes {TOKEN_FILE}."
        print_message(missing if token is None else "The token is another one.")
    return CODES.get(error.status, REFUSED)


def describe(error: ErrorBody) -> str:
    problems = [f"{problem.path}: {problem.message}" if problem.path else problem.message for problem in error.problems]
    return "\n  ".join([error.message, *problems])


def print_message(text: str) -> None:
    sys.stderr.write(f"offbeat: {show_controls(text)}\n")


def show_answer(answer: BaseModel, *, as_json: bool, otherwise: Callable[[], Any]) -> int:
    """otherwise: returns a text, shown without markup, or something that Rich renders."""
    if as_json:
        sys.stdout.write(answer.model_dump_json(indent=2) + "\n")
    else:
        width = None if sys.stdout.isatty() else PIPED_WIDTH
        shown = otherwise()
        shown = Text(show_controls(shown)) if isinstance(shown, str) else shown
        Console(highlight=False, emoji=False, soft_wrap=True, width=width).print(shown)
    return DONE


def start_run(
    url: str, token: str | None, config: Path, overrides: Sequence[str], *, dry_run: bool, as_json: bool
) -> int:
    try:
        document = compose_document(config, overrides, is_remote=is_remote(url))
    except ConfigError as error:
        print_message(f"{config}: {error}")
        return REFUSED

    async def ask(client: ControlClient) -> int:
        if dry_run:
            await client.validate(document)
            if as_json:
                sys.stdout.write("null\n")
            else:
                print_message("valid")
            return DONE
        view = await client.create(document)
        return show_answer(view, as_json=as_json, otherwise=lambda: view.id)

    return call(url, token, ask)


def list_them(
    url: str, token: str | None, states: Sequence[str], name: str, limit: int, after: str | None, *, as_json: bool
) -> int:
    async def ask(client: ControlClient) -> int:
        answer = await client.runs(states=states, name=name, after=after, limit=limit)
        for one in [] if as_json else answer.unreadable:
            print_message(one.reason)
        if answer.next and not as_json:
            print_message(f"there are more runs: --after {answer.next} lists them")
        return show_answer(answer, as_json=as_json, otherwise=lambda: runs_table(answer))

    return call(url, token, ask)


def show_run(url: str, token: str | None, run_id: str, *, as_json: bool) -> int:
    async def ask(client: ControlClient) -> int:
        view = await client.show(run_id)
        return show_answer(view, as_json=as_json, otherwise=lambda: run_table(view))

    return call(url, token, ask)


def send_command(url: str, token: str | None, run_id: str, command: str, *, as_json: bool) -> int:
    async def ask(client: ControlClient) -> int:
        match command:
            case "stop":
                view = await client.stop(run_id)
            case "stop now":
                view = await client.stop(run_id, now=True)
            case "pause":
                view = await client.pause(run_id)
            case _:
                view = await client.resume(run_id)
        return show_answer(view, as_json=as_json, otherwise=lambda: _describe_outcome(view))

    return call(url, token, ask)


def _describe_outcome(view: RunView) -> str:
    if view.state.is_terminal:
        return f"{view.id} is {view.state} already."
    outcomes = {
        "running": "resumes",
        "paused": "pauses",
        "stopped": "drains, saves a checkpoint and ends",
        "killed": "ends now",
    }
    return f"{view.id} {outcomes[view.wanted.value]} (step {max(view.step, 0)} of {view.max_steps})."


def explain_run(url: str, token: str | None, run_id: str, *, as_json: bool, plans: bool = False) -> int:
    """plans: also simulate changes, from the run's folder."""

    async def ask(client: ControlClient) -> int:
        answer = await client.why(run_id)
        code = show_answer(answer, as_json=as_json, otherwise=lambda: answer.sentence)
        return await _advise(client, run_id) if plans and code == DONE else code

    return call(url, token, ask)


async def _advise(client: ControlClient, run_id: str) -> int:
    from offbeat.deploy.plan.advice import advise
    from offbeat.deploy.plan.measurements import PlanError

    view = await client.show(run_id)
    try:
        print(await asyncio.to_thread(advise, Path(view.paths.output_dir), view.settings.to_settings()))  # noqa: T201
    except PlanError as error:
        print_message(f"no plan: {error}")
        return REFUSED
    return DONE


def show_quarantine(url: str, token: str | None, run_id: str, *, as_json: bool) -> int:
    async def ask(client: ControlClient) -> int:
        answer = await client.quarantine(run_id)
        lines = [
            f"group {row.group}, member {row.member}: {row.complaint} ({row.size} bytes, {row.head[:32]}...)"
            for row in answer.trajectories
        ]
        return show_answer(answer, as_json=as_json, otherwise=lambda: "\n".join(lines) or "nothing is kept aside")

    return call(url, token, ask)


def change_run(url: str, token: str | None, run_id: str, values: Sequence[str], *, as_json: bool) -> int:
    pairs = parse_pairs(values, parse_number)
    if pairs is None:
        return REFUSED

    async def ask(client: ControlClient) -> int:
        view = await client.change(run_id, pairs)
        return show_answer(view, as_json=as_json, otherwise=lambda: _describe_change(view))

    return call(url, token, ask)


def parse_pairs(texts: Sequence[str], parse: Callable[[str], Any]) -> dict[str, Any] | None:
    """Parse `KEY=VALUE` texts; None, with a message, for another text."""
    pairs: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            print_message(f"expected KEY=VALUE, got {text!r}")
            return None
        pairs[key] = parse(value)
    return pairs


def parse_number(text: str) -> Any:
    """Return a finite number, or the text, for the service to refuse."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text


def _describe_change(view: RunView) -> str:
    change = view.changes[-1]
    named = ", ".join(f"{name} {value:g}" for name, value in change.values.items())
    at_once = all(name in ("num_workers", "num_replicas") for name in change.values)
    return f"{view.id}: {named}" + (", at once" if at_once else ", from the next step on")


def delete_run(url: str, token: str | None, run_id: str, *, files: bool, as_json: bool) -> int:
    async def ask(client: ControlClient) -> int:
        gone = await client.delete(run_id, files=files)
        lines = [f"{run_id} is forgotten"]
        lines += [f"  removed {path}" for path in gone.files] + [f"  left {path}" for path in gone.left]
        return show_answer(gone, as_json=as_json, otherwise=lambda: "\n".join(lines))

    return call(url, token, ask)

"""Requests and output of `offbeat runs` for models that clients train by Tinker's API."""

import json
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError
from rich.markup import escape
from rich.table import Table

from offbeat.deploy.cli.runs.calls import CODES, DONE, REFUSED, TIMEOUT_S, UNREACHABLE, print_message, show_answer

ViewT = TypeVar("ViewT", bound=BaseModel)

ROOT = "/api/v1/training_runs"
NOT_AUDITED = 2
NO_ROUTE = {"detail": "Not Found"}
"""FastAPI's answer."""


class ModelView(BaseModel):
    """applied: sequence id of the last applied command, -1: none; queued: number of commands that are not applied."""

    model_id: str
    applied: int
    queued: int
    waits_for: str


class ModelsView(BaseModel):
    models: list[ModelView]


class VersionSamples(BaseModel):
    """Sequences that began with a version of the weights, and its tokens."""

    version: int
    sequences: int
    tokens: int


class SamplesView(BaseModel):
    versions: list[VersionSamples]


class AuditView(BaseModel):
    model_id: str
    proven: bool
    problems: list[str]
    applied: int
    refused: int
    optimizer_steps: int
    checkpoints: int


class TinkerRefusedError(Exception):
    """4xx or 5xx response."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class _TinkerClient:
    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def model(self, model_id: str) -> ModelView:
        return ModelView.model_validate(self._get(f"{ROOT}/{quote(model_id, safe='')}/why"))

    def samples(self, model_id: str) -> SamplesView:
        return SamplesView.model_validate(self._get(f"{ROOT}/{quote(model_id, safe='')}/samples"))

    def audit(self, model_id: str) -> AuditView:
        return AuditView.model_validate(self._get(f"{ROOT}/{quote(model_id, safe='')}/audit"))

    def models(self, limit: int) -> ModelsView:
        """Return the key's models, newest first."""
        listing = self._get(ROOT, limit=limit)
        return ModelsView(models=[self.model(each["training_run_id"]) for each in listing["training_runs"]])

    def _get(self, path: str, **query: int) -> Any:
        """Raises TinkerRefusedError, or LookupError if the server has no such route."""
        answer = self._http.get(path, params=query)
        content = answer.json()
        if content == NO_ROUTE:
            raise LookupError(path)
        if answer.is_error:
            raise TinkerRefusedError(answer.status_code, content["detail"])
        return content


def list_models(url: str, key: str, limit: int, *, as_json: bool) -> int:
    return _show(url, key, lambda client: client.models(limit), _models_table, as_json=as_json)


def explain_model(url: str, key: str, model_id: str, *, as_json: bool) -> int:
    return _show(url, key, lambda client: client.model(model_id), _sentence, as_json=as_json)


def list_samples(url: str, key: str, model_id: str, *, as_json: bool) -> int:
    return _show(url, key, lambda client: client.samples(model_id), _samples_table, as_json=as_json)


def audit_model(url: str, key: str, model_id: str, *, as_json: bool) -> int:
    """Return 0 if proven, 1 if not, 2 without an answer."""
    proven: list[bool] = []

    def ask(client: _TinkerClient) -> AuditView:
        view = client.audit(model_id)
        proven.append(view.proven)
        return view

    code = _show(url, key, ask, _audit_text, as_json=as_json)
    return NOT_AUDITED if code != DONE else int(not proven[0])


def _show(
    url: str,
    key: str,
    ask: Callable[[_TinkerClient], ViewT],
    describe: Callable[[ViewT], Any],
    *,
    as_json: bool,
) -> int:
    try:
        with httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=TIMEOUT_S) as http:
            answer = ask(_TinkerClient(http))
    except TinkerRefusedError as error:
        print_message(str(error))
        return UNREACHABLE if error.status >= httpx.codes.INTERNAL_SERVER_ERROR else CODES.get(error.status, REFUSED)
    except UnicodeEncodeError:
        print_message("the API key has characters other than ASCII")
        return REFUSED
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        complaint = str(error) or type(error).__name__
    except (json.JSONDecodeError, ValidationError, LookupError, TypeError):
        complaint = "answers, and is no Tinker server of this version"
    else:
        return show_answer(answer, as_json=as_json, otherwise=lambda: describe(answer))
    print_message(f"{url}: {complaint}\nSay where the Tinker server is with --tinker-url or TINKER_BASE_URL.")
    return UNREACHABLE


def _sentence(view: ModelView) -> str:
    applied = "no command is applied" if view.applied < 0 else f"command {view.applied} is the last applied one"
    return f"{view.model_id} waits for {view.waits_for}; {applied}, {view.queued} queued"


def _audit_text(view: AuditView) -> str:
    if not view.proven:
        return "\n".join([f"{view.model_id} is not proven:", *view.problems])
    return (
        f"{view.model_id} is proven: commands 0 to {view.applied} were applied once each ({view.refused} refused), "
        f"{view.optimizer_steps} optimizer steps; {view.checkpoints} checkpoints have the version that they name"
    )


def _samples_table(view: SamplesView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("version", "sequences", "tokens"):
        table.add_column(heading, justify="right")
    for each in view.versions:
        table.add_row(str(each.version), str(each.sequences), str(each.tokens))
    return table


def _models_table(listing: ModelsView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("model", "applied", "queued", "waits for"):
        table.add_column(heading, no_wrap=True)
    for view in listing.models:
        table.add_row(escape(view.model_id), str(view.applied), str(view.queued), escape(view.waits_for))
    return table

"""`offbeat runs` against a real server of Tinker's API: what it prints of a client's models, and its exit codes."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner, Result

from offbeat.deploy.cli.app import app
from offbeat.deploy.cli.runs.calls import DONE, REFUSED, UNAUTHORIZED, UNKNOWN, UNREACHABLE
from offbeat.deploy.cli.runs.models import NOT_AUDITED
from offbeat.services.process import free_port
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.tinker.app import create_app
from offbeat.services.tinker.log import CommandLog, Write
from offbeat.services.tinker.owners import Keys
from offbeat.services.tinker.records import AppliedCommand, OptimStep
from offbeat.services.tinker.records import Result as CommandResult
from offbeat.services.tinker.service import TinkerService
from tests.deploy.monitoring.test_prometheus import served
from tests.services.tinker.api_server import CONFIG, make_service

KEY, OTHER_KEY = "tml-one", "tml-other"


class Terminal:
    """Commands, and the server that they reach."""

    def __init__(self, url: str, log: CommandLog, service: TinkerService) -> None:
        self.url, self.log, self.service = url, log, service

    async def types(self, *arguments: str, key: str = KEY) -> Result:
        environment = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": key}
        return await asyncio.to_thread(CliRunner(env=environment).invoke, app, ["runs", *arguments])

    async def audits(self, *arguments: str) -> Result:
        environment = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": KEY}
        return await asyncio.to_thread(CliRunner(env=environment).invoke, app, ["audit", *arguments])

    async def create_model(self) -> str:
        async with httpx.AsyncClient(base_url=f"{self.url}/api/v1", headers={"X-API-Key": KEY}) as http:
            session = (await http.post("/create_session", json={})).json()["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 2}}
            return (await http.post("/create_model", json=body)).json()["model_id"]


@pytest.fixture
async def terminal(redis_url: str) -> AsyncIterator[Terminal]:
    redis = connect_async(redis_url)
    service = make_service(redis, CONFIG)
    api = create_app(service, Keys(None), CONFIG)
    with connect(redis_url) as learner:
        log = CommandLog(learner, "test")
        log.take_over()
        async with served(api) as address:
            yield Terminal(f"http://{address}", log, service)
    await redis.aclose()


async def test_models_of_a_key_are_listed_newest_first(terminal: Terminal) -> None:
    first, second = [await terminal.create_model() for _ in range(2)]
    terminal.log.commit(first, terminal.log.model(first).owner, 0, CommandResult.of_json({}))
    listed = await terminal.types("models", "--json")
    assert listed.exit_code == DONE, listed.output
    models = json.loads(listed.stdout)["models"]
    assert [(each["model_id"], each["applied"], each["queued"]) for each in models] == [(second, -1, 1), (first, 0, 0)]
    table = (await terminal.types("models")).stdout.splitlines()
    assert [line.split()[:3] for line in table[1:]] == [[second, "-1", "1"], [first, "0", "0"]]
    assert "its client: every command that came is applied" in table[2]
    others = await terminal.types("models", "--json", key=OTHER_KEY)
    assert json.loads(others.stdout) == {"models": []}


async def test_why_says_what_a_model_waits_for(terminal: Terminal) -> None:
    model = await terminal.create_model()
    said = await terminal.types("why", model)
    assert said.exit_code == DONE, said.output
    assert said.stdout.startswith(f"{model} waits for the learner: it has not taken up the next command")
    assert said.stdout.endswith("no command is applied, 1 queued\n")
    unknown = await terminal.types("why", model, key=OTHER_KEY)
    assert (unknown.exit_code, unknown.stderr) == (UNKNOWN, f"offbeat: there is no model {model}\n")
    assert (await terminal.types("why", model, "--plan")).exit_code == REFUSED


async def test_samples_and_commands_of_a_model_are_shown(terminal: Terminal) -> None:
    model = await terminal.create_model()
    store = terminal.service.store
    await store.count_samples(model, {2: 3}, {2: 10, 3: 4})
    lines = (await terminal.types("groups", model)).stdout.splitlines()
    assert [line.split() for line in lines] == [["version", "sequences", "tokens"], ["2", "3", "10"], ["3", "0", "4"]]
    owner, key = terminal.log.model(model).owner, terminal.log.keys.applied_commands(model)
    first = Write.of(key, "0", AppliedCommand(kind="create_model", at=1.0, version=4))
    terminal.log.commit(model, owner, 0, CommandResult.of_json({}), [first])
    proven = await terminal.audits(model)
    assert (proven.exit_code, " is proven: commands 0 to 0 were applied once each" in proven.stdout) == (0, True)
    assert json.loads((await terminal.audits(model, "--json")).stdout)["proven"] is True
    await store.submit(model, owner, 1, OptimStep())
    terminal.log.commit(model, owner, 1, CommandResult.of_json({}))
    violated = await terminal.audits(model)
    assert (violated.exit_code, "command 1 has no entry, 1 in all" in violated.stdout) == (1, True)
    assert (await terminal.audits("s:train:9")).exit_code == NOT_AUDITED


@pytest.mark.parametrize(
    "options", [("--state", "trained"), ("--tag", "x"), ("--step", "1"), ("--sort", "spread"), ("--limit", "50")]
)
def test_options_for_a_list_of_groups_are_refused_where_none_is_made(options: tuple[str, str]) -> None:
    for shown in (("s:train:0",), ("lake", "5")):
        refused = CliRunner().invoke(app, ["runs", "groups", *shown, *options])
        assert refused.exit_code == REFUSED
        assert options[0] in refused.stderr
        assert "leave" in refused.stderr


@pytest.mark.parametrize("options", [("--group", "3"), ("--redis", "redis://127.0.0.1:1")])
async def test_options_for_runs_are_refused_by_the_audit_of_a_model(
    terminal: Terminal, options: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await terminal.create_model()
    refused = await terminal.audits(model, *options)
    assert (refused.exit_code, options[0] in refused.stderr) == (REFUSED, True)
    monkeypatch.setenv("OFFBEAT_REDIS", "redis://127.0.0.1:1")
    assert "--redis" not in (await terminal.audits(model)).stderr  # a variable is for all commands


@pytest.mark.parametrize("command", ["show", "stop", "trajectory", "set"])
async def test_commands_for_runs_alone_say_what_shows_a_model(terminal: Terminal, command: str) -> None:
    refused = await terminal.types(command, "s:train:0", *{"trajectory": ("1", "2"), "set": ("a=1",)}.get(command, ()))
    assert refused.exit_code == REFUSED
    assert "model of Tinker's API" in refused.stderr


@pytest.mark.parametrize(
    ("key", "code", "message"),
    [("", UNAUTHORIZED, "set TINKER_API_KEY"), ("tml-é", REFUSED, "characters other than ASCII")],
)
async def test_a_key_that_is_no_key_is_refused(terminal: Terminal, key: str, code: int, message: str) -> None:
    refused = await terminal.types("models", key=key)
    assert refused.exit_code == code
    assert message in refused.stderr


async def test_a_server_that_is_no_tinker_server_is_named(terminal: Terminal) -> None:
    gone = await terminal.types("models", "--tinker-url", f"http://127.0.0.1:{free_port()}")
    async with served(FastAPI()) as other:
        wrong = await terminal.types("models", "--tinker-url", f"http://{other}")
    for answer in (gone, wrong):
        assert answer.exit_code == UNREACHABLE
        assert "--tinker-url or TINKER_BASE_URL" in answer.stderr

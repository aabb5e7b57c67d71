"""`offbeat runs` against a real API: what it prints, and its exit codes."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner, Result

from offbeat.deploy.cli.app import app
from offbeat.deploy.cli.runs.calls import (
    CONFLICT,
    REFUSED,
    UNAUTHORIZED,
    UNKNOWN,
    UNREACHABLE,
)
from offbeat.deploy.cli.runs.watch import UNTRAINED
from offbeat.services.control.run import RunSpec, RunState
from offbeat.services.control.schemas import ProblemView
from offbeat.services.control.service import NotAllowedError
from offbeat.services.keys import RunKeys
from offbeat.services.telemetry import AsyncRedisMetrics, MetricRecord, mean
from offbeat.trainer.training.checkpoint import LearnerState
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from tests.deploy.console.folders import write_run
from tests.services.buffer.buffer_play import RUN, Run, limits
from tests.services.control.api_harness import ApiHarness, FakeRunFactory, api_harness
from tests.services.control.test_event_stream import served
from tests.trainer.training.test_checkpoint import write

pytestmark = pytest.mark.slow

DONE = 0


@dataclass
class Terminal:
    """Somebody who types commands, and the service that they reach."""

    api: ApiHarness
    url: str

    async def types(self, *arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner(env={"OFFBEAT_URL": self.url}).invoke, app, ["runs", *arguments])

    async def json(self, *arguments: str) -> Any:
        result = await self.types(*arguments, "--json")
        assert result.exit_code == DONE, result.output
        return json.loads(result.stdout)


@pytest.fixture
async def terminal(redis_url: str) -> AsyncIterator[Terminal]:
    async with api_harness(redis_url) as api, served(api) as url:
        yield Terminal(api, url)


async def test_a_run_is_started_from_a_file_with_paths_that_start_here(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("exp_name: lake\noutput_dir: runs/lake\nseed: 1\n")
    valid = await terminal.types("start", "run.yaml", "--dry-run")
    assert (valid.exit_code, valid.stderr) == (DONE, "offbeat: valid\n")
    assert (await terminal.types("start", "run.yaml", "--dry-run", "--json")).stdout == "null\n"
    assert (await terminal.json("list"))["runs"] == []
    started = await terminal.types("start", "run.yaml", "seed=2", "exp_name=sea")
    assert (started.exit_code, started.stdout) == (DONE, "sea\n")
    record = await terminal.api.store.load("sea")
    assert json.loads(record.config) == {"exp_name": "sea", "output_dir": str(tmp_path / "runs/lake"), "seed": 2}
    clash = await terminal.types("start", "run.yaml")
    assert clash.exit_code == CONFLICT
    assert "in use by run 'sea'" in clash.stderr


async def test_a_refused_configuration_lists_its_problems_and_exits_with_2(terminal: Terminal, tmp_path: Path):
    config = tmp_path / "run.yaml"
    config.write_text("exp_nam: lake\n")
    refused = await terminal.types("start", str(config))
    assert (refused.exit_code, refused.stdout) == (REFUSED, "")
    assert "exp_nam: unknown key" in refused.stderr
    missing = await terminal.types("start", str(tmp_path / "nowhere.yaml"))
    assert missing.exit_code == REFUSED
    assert "no such file" in missing.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]\n", "line 1: alias *a contains itself"),
        ("seed: " + "9" * 5000 + "\n", "a value of type int has at most 400 characters"),
    ],
)
async def test_a_file_that_python_could_not_parse_is_refused(
    terminal: Terminal, tmp_path: Path, text: str, message: str
):
    (tmp_path / "run.yaml").write_text(text)
    refused = await terminal.types("start", str(tmp_path / "run.yaml"))
    assert refused.exit_code == REFUSED
    assert message in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


async def test_what_a_token_does_not_allow_is_reported_with_the_key(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(*_: object) -> RunSpec:
        message = "module 'evil' is not in allow_modules (offbeat.*): add it there, or use another"
        raise NotAllowedError([ProblemView(path="custom_envs.A.env_type", message=message)])

    monkeypatch.setattr(FakeRunFactory, "validate", refuse)
    (tmp_path / "run.yaml").write_text("exp_name: lake\n")
    refused = await terminal.types("start", str(tmp_path / "run.yaml"))
    assert refused.exit_code == UNAUTHORIZED
    assert "this is beyond your rights, which the service's `control` settings give" in refused.stderr
    assert "\n  custom_envs.A.env_type: module 'evil' is not in" in refused.stderr


async def test_runs_are_listed_and_shown_for_people_and_for_programs(terminal: Terminal):
    await terminal.api.start("lake")
    await terminal.api.start("sea", RunState.FAILED)
    await terminal.api.store.update("sea", error="the disk is full", log="logs/learner.out")
    lines = (await terminal.types("list")).stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["run", "state"], ["sea", "failed"], ["lake", "running"]]
    assert [run["id"] for run in (await terminal.json("list", "--state", "running"))["runs"]] == ["lake"]
    assert [run["id"] for run in (await terminal.json("list", "--name", "s*"))["runs"]] == ["sea"]
    shown = (await terminal.types("show", "sea")).stdout
    assert "the disk is full (see logs/learner.out)" in shown
    assert "learning_rate 0.001" in shown
    assert (await terminal.json("show", "sea"))["state"] == "failed"


async def test_a_list_says_that_there_are_more_runs_and_is_continued(terminal: Terminal):
    for run in ("lake", "sea", "pond"):
        await terminal.api.start(run)
    page = await terminal.types("list", "--limit", "2")
    assert [line.split()[0] for line in page.stdout.splitlines()] == ["run", "pond", "sea"]
    found = re.search(r"there are more runs: --after (\S+) lists them", page.stderr)
    assert found
    rest = await terminal.types("list", "--limit", "2", "--after", found[1])
    assert [line.split()[0] for line in rest.stdout.splitlines()] == ["run", "lake"]
    assert rest.stderr == ""
    refused = await terminal.types("list", "--after", "x")
    assert (refused.exit_code, "not a position in the list" in refused.stderr) == (REFUSED, True)


async def test_what_could_not_be_read_never_reaches_the_trainer_and_is_reported(terminal: Terminal):
    await terminal.api.start(RUN)
    with Redis.from_url(terminal.api.redis_url) as redis:
        run = Run.begin(redis, terminal.api.redis, limits(max_staleness=9.0))
        assert (await terminal.types("quarantine", RUN)).stdout == "nothing is kept aside\n"
        await run.complete_groups(2)
        run.overwrite_blob(0, 1, b"\xc1[red]" * 20)
        taken = [run.learner.take(0), run.learner.take(0)]
    assert [group.number for group in taken if group] == [1]
    (kept,) = (await terminal.json("quarantine", RUN))["trajectories"]
    assert (kept["group"], kept["member"], kept["size"]) == (0, 1, 120)
    assert kept["head"].startswith("c15b7265645d")
    printed = (await terminal.types("quarantine", RUN)).stdout
    assert printed.startswith("group 0, member 1: not a trajectory message")
    shown = await terminal.json("show", RUN)
    assert (shown["quarantined"], shown["counters"]["dropped"]) == (1, {"corrupt": 1})
    assert (await terminal.types("quarantine", "nobody")).exit_code == UNKNOWN


async def test_a_run_is_paused_resumed_and_stopped(terminal: Terminal):
    await terminal.api.start("lake")
    for command, says in (("pause", "pauses"), ("resume", "resumes"), ("stop", "drains"), ("stop --now", "ends now")):
        result = await terminal.types(*command.split(), "lake")
        assert (result.exit_code, result.stdout.startswith(f"lake {says}")) == (DONE, True), result.output
    late = await terminal.types("pause", "lake")
    assert (late.exit_code, late.stdout) == (CONFLICT, "")
    assert "'lake' is ending" in late.stderr


async def test_a_run_is_scaled_and_its_settings_change(terminal: Terminal):
    await terminal.api.start("lake")
    scaled = await terminal.types("scale", "lake", "--env-workers", "2", "--replicas", "3")
    assert scaled.stdout == "lake: num_workers 2, num_replicas 3, at once\n"
    changed = await terminal.json("set", "lake", "learning_rate=3e-4", "max_staleness=2")
    assert changed["changes"][-1]["values"] == {"learning_rate": 3e-4, "max_staleness": 2.0}
    for arguments in (
        ("scale", "lake"),
        ("set", "lake", "x"),
        ("set", "lake", "learning_rat=1"),
        ("set", "lake", "temperature=hot"),
        ("set", "lake", "max_staleness=inf"),
    ):
        refused = await terminal.types(*arguments)
        assert refused.exit_code == REFUSED, arguments
    for value in ("NaN", "-Infinity", "1e999"):
        refused = await terminal.types("fork", "lake", "--step", "3", f"gamma={value}")
        assert isinstance(refused.exception, SystemExit), value
    assert "did you mean `learning_rate`?" in (await terminal.types("set", "lake", "learning_rat=1")).stderr


async def test_why_is_one_sentence(terminal: Terminal):
    await terminal.api.start("lake", RunState.PREPARING)
    assert (await terminal.types("why", "lake")).stdout == "The run makes its folder and its model ready.\n"
    assert (await terminal.json("why", "lake"))["chain"][0]["who"] == "run"


async def test_a_plan_of_a_run_that_left_nothing_here_says_so(terminal: Terminal):
    await terminal.api.start("lake", RunState.PREPARING)
    planned = await terminal.types("why", "lake", "--plan")
    assert planned.exit_code == REFUSED
    assert planned.stdout == "The run makes its folder and its model ready.\n"
    assert "can't be read on this machine" in planned.stderr
    both = await terminal.types("why", "lake", "--plan", "--json")
    assert both.exit_code == REFUSED
    assert "offbeat plan" in both.stderr


async def test_only_a_run_that_is_over_is_deleted(terminal: Terminal):
    await terminal.api.start("lake")
    assert (await terminal.types("delete", "lake")).exit_code == CONFLICT
    await terminal.api.store.update("lake", state=RunState.STOPPED)
    assert (await terminal.types("delete", "lake")).stdout == "lake is forgotten\n"
    assert (await terminal.types("show", "lake")).exit_code == UNKNOWN


async def test_watching_ends_with_the_run_and_says_how_it_went(terminal: Terminal):
    await terminal.api.start("lake")
    await AsyncRedisMetrics(terminal.api.redis, "lake", await terminal.api.uid("lake")).append(
        MetricRecord("learner", {"success": mean([0.25])}, step=3)
    )
    await terminal.api.store.update("lake", state=RunState.FAILED, error="the disk is full", log="logs/learner.out")
    watched = await terminal.types("watch", "lake")
    assert watched.exit_code == 1
    assert "step 3/7" in watched.stdout
    assert "rollouts 0.25" in watched.stdout
    assert "lake is failed at step 0 of 7: the disk is full\nRead /runs/lake/logs/learner.out" in watched.stdout
    await terminal.api.store.update("lake", state=RunState.FINISHED)
    lines = (await terminal.types("watch", "lake", "--json")).stdout.splitlines()
    events = [json.loads(line) for line in lines]
    assert {"metrics", "history", "run"} <= {event["event"] for event in events}


async def test_watching_a_run_that_trained_nothing_ends_with_a_code_of_its_own(terminal: Terminal):
    await terminal.api.start("lake")
    await terminal.api.store.update("lake", state=RunState.FINISHED, error="no token was trained: ...")
    watched = await terminal.types("watch", "lake")
    assert watched.exit_code == UNTRAINED
    assert "lake is finished at step 0 of 7: no token was trained: ..." in watched.stdout
    assert "Read" not in watched.stdout
    assert (await terminal.types("watch", "lake", "--json")).exit_code == UNTRAINED


async def test_what_happens_meanwhile_is_seen(terminal: Terminal):
    await terminal.api.start("lake")
    watching = asyncio.create_task(terminal.types("watch", "lake"))
    redis: Any = terminal.api.redis
    await terminal.api.client.change("lake", {"learning_rate": 0.5})
    adopted = {"e": "adopted", "d": json.dumps({"values": {"learning_rate": 0.5}, "step": 4})}
    await redis.xadd(RunKeys("lake").history, adopted)
    await terminal.api.store.update("lake", state=RunState.FINISHED)
    result = await asyncio.wait_for(watching, 60)
    assert result.exit_code == DONE, result.output
    assert "requested: learning_rate 0.5" in result.stdout
    assert "from step 5 on: learning_rate 0.5" in result.stdout


async def test_a_token_is_asked_for(redis_url: str):
    async with api_harness(redis_url, token="secret") as api, served(api) as url:
        terminal = Terminal(api, url)
        without = await terminal.types("list")
        assert (without.exit_code, without.stdout) == (UNAUTHORIZED, "")
        assert "OFFBEAT_TOKEN" in without.stderr
        assert (await terminal.types("list", "--token", "other")).exit_code == UNAUTHORIZED
        pasted = await terminal.types("list", "--token", "tok…en")
        assert (pasted.exit_code, pasted.stderr) == (
            UNAUTHORIZED,
            "offbeat: the token has characters other than ASCII\n",
        )
        assert (await terminal.types("list", "--token", "secret")).exit_code == DONE


@pytest.mark.parametrize("command", [("list",), ("show", "x"), ("stop", "x"), ("why", "x")])
def test_a_service_that_is_not_there_is_named_without_a_traceback(command: tuple[str, ...]):
    result = CliRunner().invoke(app, ["runs", *command, "--url", "http://127.0.0.1:1"])
    assert (result.exit_code, result.stdout) == (UNREACHABLE, "")
    assert "http://127.0.0.1:1" in result.stderr
    assert "OFFBEAT_URL" in result.stderr
    assert "Traceback" not in result.stderr


class NoControlService(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>" if self.path.startswith("/runs/") else b"{}")

    def log_message(self, *_: object) -> None: ...


def test_who_names_something_else_than_a_control_service_is_reported():
    with ThreadingHTTPServer(("127.0.0.1", 0), NoControlService) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        stranger = f"http://127.0.0.1:{server.server_port}"
        cases = {"http://here:port": "no URL", stranger: "no control service"}
        for url, says in cases.items():
            for command in (["list"], ["show", "lake"]):
                result = CliRunner().invoke(app, ["runs", *command, "--url", url])
                assert (result.exit_code, says in result.stderr) == (UNREACHABLE, True), result.output
        server.shutdown()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "lake")


async def test_groups_and_their_trajectories_are_shown(terminal: Terminal, recorded: Path):
    await terminal.api.start("lake", output_dir=str(recorded))
    listed = (await terminal.types("groups", "lake", "--state", "dropped")).stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:-1]] == [["8", "dropped"], ["5", "dropped"]]
    assert listed[-1].strip() == "2 of 2 groups"
    assert (await terminal.json("groups", "lake", "--sort", "tokens", "--limit", "1"))["next"] == 1
    shown = (await terminal.types("groups", "lake", "6")).stdout
    assert "group 6: consumed, tag, step 3, lag 1" in shown
    assert [line.split()[0] for line in shown.splitlines()[2:]] == ["6/0", "6/1", "6/2"]
    printed = (await terminal.types("trajectory", "lake", "6", "1")).stdout
    assert "trajectory 6/1: tag, seed 6, reward 1, terminated, trained at step 3" in printed
    assert "2 tokens of version 1; mean logprob -2, trainer's" in printed
    tokens = await terminal.json("trajectory", "lake", "6", "1")
    assert len(tokens["segments"][0]["ratio"]) == len(tokens["segments"][0]["tokens"])
    missing = await terminal.types("trajectory", "lake", "9", "0")
    assert (missing.exit_code, "group 9 is not trained" in missing.stderr) == (UNKNOWN, True)


async def test_a_run_is_forked_and_its_steps_are_reproduced(terminal: Terminal, tmp_path: Path):
    state = LearnerState(step=2, lineage="now", next_number=4, kl_coef=0.0, num_processes=1, config={})
    CheckpointStore(tmp_path / "lake/checkpoints", keep=2, epoch=1).save(state, write).result()
    await terminal.api.start("lake", RunState.FINISHED, output_dir=str(tmp_path / "lake"))
    forked = await terminal.types("fork", "lake", "seed=3", "pretrain=tiny", "--step", "2", "--name", "sea")
    assert (forked.exit_code, forked.stdout) == (DONE, "sea\n")
    config = json.loads((await terminal.api.store.load("sea")).config)
    assert (config["seed"], config["pretrain"]) == (3, "tiny")
    assert (await terminal.types("fork", "lake", "--step", "9")).exit_code == UNKNOWN
    assert (await terminal.types("fork", "lake", "seed", "--step", "2")).exit_code == REFUSED
    for step, says in (
        (2, "step 2: the weights of 1 checkpoint(s) are equal\n"),
        (3, "step 3 is trained again; there is no later checkpoint to compare the weights with\n"),
    ):
        done = await terminal.types("reproduce", "lake", "--step", str(step))
        assert (done.exit_code, done.stdout) == (DONE, says)
    failed = await terminal.types("reproduce", "lake", "--step", "8")
    assert (failed.exit_code, "no way to step 8" in failed.stdout) == (1, True)

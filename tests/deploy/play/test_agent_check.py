"""`offbeat agent check`: real gateway, real processes, a policy that answers at random."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from offbeat.deploy.cli.app import app
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.play.agent_check import AgentReport, _read_row, check_agent, try_agents
from offbeat.deploy.play.parquet import read_parquet
from offbeat.services.rollout.config import AgentRunner, CustomEnv
from tests.paths import QUICKSTART

pytestmark = pytest.mark.slow

MODULE = """
import json, time
from urllib.request import Request, urlopen

def ask(task, messages):
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": task.model, "messages": messages, "temperature": 0.1}).encode()
    with urlopen(Request(f"{task.base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def forgets_the_reward(task):
    ask(task, [{"role": "user", "content": task.observation}])

def rewrites(task):
    for turn in range(2):
        ask(task, [{"role": "user", "content": f"{turn} {task.observation}"}])
    return 1.0

def hangs(task):
    time.sleep(1000)

def shows(task):
    url = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
    ask(task, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    return 1.0

def walks(task):
    messages, done = [{"role": "user", "content": task.observation}], False
    while not done:
        answer = ask(task, messages)
        reply = task.step(answer)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": reply.observation}]
        done = reply.done
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checked_agents.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def check(path: str, **runner: Any) -> AgentReport:
    env = CustomEnv(env_type="frozen_lake", max_steps=4, agent_runner=AgentRunner(path=path, **runner))
    return asyncio.run(check_agent("Lake", env, num_episodes=2))


def offbeat(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["agent", "check", *arguments])


def test_a_sound_agent_of_another_python_has_no_findings(tmp_path: Path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    report = check("checked_agents:walks", python=str(tmp_path / "venv" / "bin" / "python"))
    assert [finding.rule for finding in report.findings] == ["sampling"]  # its temperature is the run's
    assert report.num_calls == report.num_steps > 0
    assert len(report.rewards) == len(report.durations_s) == 2


@pytest.mark.parametrize(
    ("path", "severity", "rule", "says"),
    [
        ("tests.played_agents:silent", "problem", "agent_silent", "task.base_url as base URL"),
        ("tests.played_agents:nonsense", "problem", "agent_result", "return a number"),
        ("tests.played_agents:raises_at_once", "problem", "agent_error", "before its first call"),
        ("tests.played_agents:raises", "advice", "agent_error", "set on_agent_error"),
        ("tests.played_agents:nowhere", "problem", "path", "has no function 'nowhere'"),
        ("checked_agents:forgets_the_reward", "problem", "reward", "its reward is always 0"),
        ("checked_agents:rewrites", "advice", "history", "2 calls became 2 sequences"),
        ("checked_agents:hangs", "problem", "agent_timeout", "no answer in 3 s"),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(path: str, severity: str, rule: str, says: str):
    report = check(path, timeout_s=3.0 if "hangs" in path else 60.0)
    found = {finding.rule: finding for finding in report.findings if finding.rule != "sampling"}
    assert list(found) == [rule], report.findings
    assert found[rule].severity == severity
    assert says in found[rule].message
    if rule == "agent_error":
        assert "in raises" in found[rule].message
        assert "services/rollout" not in found[rule].message


@pytest.mark.parametrize("vision", ["{}", "null"])
def test_an_agent_may_send_images_that_the_runs_policy_reads(vision: str):
    agent = "+custom_envs.FrozenLake.agent_runner={path: 'checked_agents:shows'}"
    issues = try_agents(load_run(QUICKSTART, [agent, "warm_start=null", f"+tiny.vision={vision}"]))
    assert check("checked_agents:shows").problems == []
    assert [issue.path for issue in issues] == ([] if vision == "{}" else ["custom_envs.FrozenLake.agent_runner"])
    assert all("before its first call" in issue.message or "400" in issue.message for issue in issues)


def test_an_env_that_crashes_does_so_in_a_process_of_its_own():
    env = CustomEnv(
        env_type="tests.fakes_rollout:BadEnv",
        env_config={"how": "crash"},
        agent_runner=AgentRunner(path="checked_agents:walks"),
    )
    report = asyncio.run(check_agent("Bad", env, num_episodes=1))
    assert [finding.rule for finding in report.problems] == ["env_crashed"]
    assert "offbeat env check" in report.problems[0].message


ANSWERS = """
import json, os, sys
sys.path.insert(0, os.path.dirname(__file__))
import checked_agents
from offbeat.services.rollout.agents.task import AgentTask

task = AgentTask.of(json.loads(os.environ["OFFBEAT_TASK"]))
checked_agents.ask(task, [{"role": "user", "content": task.observation}])
print(RESULT)
"""


@pytest.mark.parametrize(("result", "found"), [("42", ["reward"]), ("'\"42\"'", []), ('\'{"answer": "42"}\'', [])])
def test_a_number_that_a_command_prints_for_a_question_is_named(tmp_path: Path, result: str, found: list[str]):
    (tmp_path / "rows.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n')
    (tmp_path / "answers.py").write_text(ANSWERS.replace("RESULT", result))
    runner = AgentRunner(command=(sys.executable, str(tmp_path / "answers.py")))
    config = {"dataset_name": str(tmp_path / "rows.jsonl")}
    env = CustomEnv(env_type="math", max_steps=1, agent_runner=runner, env_config=config)
    report = asyncio.run(check_agent("Math", env, num_episodes=1))
    assert [finding.rule for finding in report.findings if finding.rule != "sampling"] == found, report.findings


def test_the_command_checks_agents_by_name_and_by_configuration():
    sound = offbeat("checked_agents:walks", "--episodes", "1")
    assert sound.exit_code == 0, sound.output
    assert "holds the contract" in sound.output
    broken = offbeat("tests.played_agents:silent", "size=3")
    assert (broken.exit_code, "agent_silent" in broken.output) == (1, True)
    configured = offbeat("foreign_agent", "--episodes", "1")
    assert (configured.exit_code, "the agent of FrozenLake holds" in configured.output) == (0, True), configured.output
    assert offbeat("quickstart").exit_code == 2
    for option, value in (("--env", "frozen_lake"), ("--python", sys.executable)):
        unread = offbeat("foreign_agent", option, value)
        assert (unread.exit_code, option in unread.stderr) == (2, True)
    assert offbeat("checked_agents:walks", "nope=1").exit_code == 1


def test_train_refuses_an_agent_that_never_works(tmp_path: Path):
    def overrides(agent: str) -> list[str]:
        return [
            f"+custom_envs.FrozenLake.agent_runner={{path: '{agent}'}}",
            "warm_start=null",
            f"output_dir={tmp_path}/r",
        ]

    done = CliRunner().invoke(app, ["train", str(QUICKSTART), *overrides("tests.played_agents:raises_at_once")])
    assert done.exit_code == 2
    assert "custom_envs.FrozenLake.agent_runner: ConnectionError: no service" in done.output
    assert not (tmp_path / "r").exists()


def test_findings_that_depend_on_random_answers_do_not_refuse_a_run(caplog: pytest.LogCaptureFixture):
    agent = "+custom_envs.FrozenLake.agent_runner={path: 'tests.played_agents:raises'}"
    assert try_agents(load_run(QUICKSTART, [agent, "warm_start=null"])) == []
    assert "lost the thread" in caplog.text


def test_random_answers_go_to_the_tags_agent(tmp_path: Path):
    """As those of a policy do in `offbeat rollout`."""
    out = tmp_path / "episodes.parquet"
    agent = "+custom_envs.FrozenLake.agent_runner={path: 'tests.played_agents:plays'}"
    command = ["rollout", str(QUICKSTART), agent, "--agent", "random", "--episodes", "2", "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    played = read_parquet(out)
    assert len(played) == 2
    assert all(row.metrics["agent_calls"] >= 1 for row in played), played


def test_a_checked_agent_gets_the_rows_that_it_answers_and_need_not_reward_itself(tmp_path: Path):
    """An agent that can't answer without a row's messages fails its call."""
    row = {
        "messages": [
            {"role": "user", "content": "P"},
            {"role": "assistant", "content": "Up"},
            {"role": "user", "content": "G"},
        ]
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    agent = AgentRunner(path="tests.played_agents:answers_messages")
    env = CustomEnv(
        env_type="prompt", env_config={"dataset_name": str(tmp_path / "rows.jsonl")}, max_steps=1, agent_runner=agent
    )
    scored = asyncio.run(check_agent("Rows", env, num_episodes=1, is_scored=True))
    assert ([f.rule for f in scored.findings], scored.num_calls) == (["history"], 1), (
        "the row's own answer is unverified"
    )
    alone = asyncio.run(check_agent("Rows", env, num_episodes=1))
    assert [finding.rule for finding in alone.problems] == ["reward"]
    tools = {"env_type": "prompt", "env_config": env.env_config, "tools": [{"tool_id": "search", "corpus": "none"}]}
    wrapped = _read_row(env.model_copy(update={"env_type": "tools", "env_config": tools}), 3)
    assert wrapped is not None
    assert wrapped.turns == ("P", "Up", "G")

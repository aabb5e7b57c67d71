"""Commands of agents: their environment, and their output."""

import asyncio
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import httpx
import pytest

from offbeat.services.rollout.agents.environment import agent_environment, bypass_proxy, command_environment
from offbeat.services.rollout.agents.pool import AgentPool
from offbeat.services.rollout.agents.task import AgentTask
from offbeat.services.rollout.config import AgentRunner
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TASK = AgentTask("http://127.0.0.1:1/v1", "key", "http://h", "http://h/env", "policy", "Tag", 1, "", "", 3)
FINDS = """
import importlib.util, json
found = [name for name in ("own_module", "msgpack", "offbeat") if importlib.util.find_spec(name)]
print(json.dumps({"answer": ",".join(found)}))
"""


async def answer_of(*command: str) -> Any:
    outcome = await AgentPool().run(AgentRunner(command=command), TASK)
    return outcome.answer


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


async def test_a_commands_python_imports_no_package_of_ours(
    other_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own_module.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert await answer_of(other_python, "-c", FINDS) == "own_module"
    assert await answer_of(sys.executable, "-c", FINDS) == "own_module,msgpack,offbeat"


def test_folders_beside_installed_packages_stay_on_a_commands_path(monkeypatch: pytest.MonkeyPatch):
    """Such as `/usr/src/app` with `/usr/bin/python`, or `/opt/venv-agents` beside `/opt/venv`."""
    own = [f"{sys.prefix}/src/app", f"{sys.base_prefix}/src/app", f"{sys.prefix}-agents/src"]
    installed = [sysconfig.get_path("stdlib"), f"{sysconfig.get_path('purelib')}/package"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*installed, *own]))
    assert command_environment()["PYTHONPATH"].split(os.pathsep) == own


def test_a_command_has_no_token_of_the_machine_for_anthropic(monkeypatch: pytest.MonkeyPatch):
    """Claude Code would take it for `ANTHROPIC_API_KEY`."""
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "of-the-machine")
    assert "ANTHROPIC_AUTH_TOKEN" not in command_environment()


def test_each_variable_of_hosts_without_a_proxy_keeps_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "localhost")
    monkeypatch.setenv("NO_PROXY", "localhost,.corp")
    assert bypass_proxy() == {"no_proxy": "localhost,127.0.0.1", "NO_PROXY": "localhost,.corp,127.0.0.1"}


@pytest.mark.parametrize(
    ("variables", "excluded"),
    [({}, "127.0.0.1"), ({"NO_PROXY": "a.org,b.org"}, "a.org,b.org,127.0.0.1"), ({"no_proxy": "a.org,*"}, "a.org,*")],
)
async def test_an_agents_calls_do_not_go_to_the_proxy(
    variables: dict[str, str], excluded: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"http_proxy": "http://proxy.invalid:3128", **variables}.items():
        monkeypatch.setenv(name, value)
    shows = "import json, os; print(json.dumps({'answer': os.environ.get('no_proxy')}))"
    assert await answer_of(sys.executable, "-c", shows) == excluded
    environment = agent_environment("")
    assert [environment.get(name, excluded) for name in ("no_proxy", "NO_PROXY")] == [excluded] * 2
    monkeypatch.setattr(os, "environ", environment)

    async def reply(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server, httpx.AsyncClient() as client:
        port = server.sockets[0].getsockname()[1]
        assert (await client.get(f"http://127.0.0.1:{port}")).status_code == 204


async def test_what_a_command_prints_is_logged_while_it_runs(capfd: pytest.CaptureFixture[str]):
    prints = "import sys, time; print('working', file=sys.stderr, flush=True); time.sleep(1000)"
    running = asyncio.create_task(answer_of(sys.executable, "-c", prints))
    await wait_until(lambda: "working" in capfd.readouterr().err)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbeat.envs import registry
from offbeat.envs.tools import mcp_server
from offbeat.envs.tools.functions import Call, read_results, write_calls
from offbeat.services.process import free_port
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.slow

pytest.importorskip("mcp")
SERVER = str(Path(__file__).with_name("mcp_shop.py"))
STDIO = {"tool_id": "mcp", "command": [sys.executable, SERVER]}


def call(name: str, **arguments: Any) -> str:
    return f"Let me see. <tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def env_with(*tools: dict[str, Any], **settings: Any) -> Any:
    env = registry.make("tools", {"env_type": "frozen_lake", "tools": list(tools), **settings})
    env.reset(seed=1)
    return env


def observe(env: Any, answer: str) -> str:
    return env.step(answer)[0].removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


@pytest.fixture(scope="module")
def shop() -> Iterator[Any]:
    env = env_with(STDIO, tool_success_reward=0.5, max_tool_uses=100)
    yield env
    env.close()


def test_functions_are_described_and_called_as_in_chat_templates(shop: Any):
    assert (
        '{"type": "function", "function": {"name": "price", "description": "What so many cost."' in shop.system_prompt
    )
    assert shop.system_prompt.startswith("Walk P to G")
    observation, reward, terminated, _, info = shop.step(call("price", item="tea", count=2))
    assert (observation, reward, terminated) == ("<tool_response>\n2 tea: 6\n</tool_response>", 0.5, False)
    assert (info["tool_use_counter"], info["tool_success_counter"]) == (1, 1)


def test_a_servers_functions_are_offered_to_the_chat_template(shop: Any):
    env = env_with(STDIO, function_calling="template", tool_success_reward=0.5)
    try:
        price = next(schema["function"] for schema in env.functions if schema["function"]["name"] == "price")
        assert price["parameters"]["properties"]["count"]["type"] == "integer"
        assert "<tools>" in shop.system_prompt
        assert "<tools>" not in env.system_prompt
        calls = [Call("price", {"item": "tea", "count": 2}), Call("broken", {}), Call("steal", {})]
        observation, reward, terminated, _, info = env.step(write_calls("Let me see.", calls))
        bought, broken, stolen = read_results(observation, 3)
        assert (bought, reward, terminated) == ("2 tea: 6", 0.5, False)
        assert "executing tool broken" in broken
        assert stolen.startswith("there is no function 'steal'; there is price, broken")
        assert (info["tool_use_counter"], info["tool_success_counter"]) == (3, 1)
        assert env.step(call("price", item="tea", count=2).replace("\n", " "))[4]["tool_use_counter"] == 0
    finally:
        env.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (call("broken"), "executing tool broken"),
        (call("price"), "item"),
        (call("steal"), "no function 'steal'; there is price, broken"),
        ("<tool_call>price</tool_call>", "not of the form"),
        ('<tool_call>{"name": "price", "arguments": 3}</tool_call>', "must be"),
    ],
)
def test_a_failing_call_returns_its_error(shop: Any, answer: str, message: str):
    observation, reward, _, _, info = shop.step(answer)
    assert message in observation
    assert (reward, info["tool_success_counter"]) == (0.0, 0)


def test_envs_share_a_server_and_the_last_one_ends_it(shop: Any):
    other = env_with(STDIO)
    pid = int(observe(other, call("who")))
    assert int(observe(shop, call("who"))) == pid
    other.close()
    assert int(observe(shop, call("who"))) == pid
    alone = env_with({**STDIO, "timeout_s": 31.0})
    own_pid = int(observe(alone, call("who")))
    assert own_pid != pid
    alone.close()
    wait_until_sync(lambda: not Path(f"/proc/{own_pid}").exists())


def test_a_dead_server_is_restarted(shop: Any):
    pid = int(observe(shop, call("who")))
    os.kill(pid, signal.SIGKILL)
    wait_until_sync(lambda: not Path(f"/proc/{pid}").exists())
    shop.step(call("who"))  # may be the one that finds out
    assert int(observe(shop, call("who"))) != pid


def test_an_error_of_a_server_that_answers_leaves_its_connection(shop: Any):
    pid = observe(shop, call("who"))
    observation, _, _, _, info = shop.step(call("refuses"))
    assert "no such item" in observation
    assert info["tool_success_counter"] == 0
    assert observe(shop, call("who")) == pid


@pytest.mark.parametrize("last_cursor", [[], [""], ["1"]])
def test_functions_of_all_pages_are_offered(last_cursor: list[str]):
    pages = {"tool_id": "mcp", "command": [sys.executable, str(Path(__file__).with_name("mcp_pages.py")), *last_cursor]}
    env = env_with(pages, function_calling="template")
    assert [each["function"]["name"] for each in env.functions] == ["first", "second"]
    assert read_results(env.step(write_calls("", [Call("second", {})]))[0], 1) == ["second was called"]
    env.close()


def test_a_call_does_not_wait_for_a_server_that_starts_again_slowly(tmp_path: Path):
    """The next call has the connection."""
    go = tmp_path / "go"
    go.touch()
    script = f'while [ ! -e "{go}" ]; do sleep 0.1; done; exec "{sys.executable}" "{SERVER}"'
    env = env_with(
        {"tool_id": "mcp", "command": ["sh", "-c", script], "timeout_s": 10.0}, calls_timeout_s=2.0, max_tool_uses=100
    )
    pid = int(observe(env, call("who")))
    go.unlink()
    os.kill(pid, signal.SIGKILL)
    wait_until_sync(lambda: not Path(f"/proc/{pid}").exists())
    wait_until_sync(lambda: "gave no answer in 2 s" in observe(env, call("who")))
    go.touch()
    wait_until_sync(lambda: observe(env, call("who")).isdigit())
    env.close()


def test_a_hanging_call_times_out():
    env = env_with({**STDIO, "timeout_s": 2.0, "functions": ["sleeps", "price"]})
    assert "price" in env.system_prompt
    assert "broken" not in env.system_prompt
    assert "gave no answer in 2 s" in env.step(call("sleeps"))[0]
    assert observe(env, call("price", item="tea")) == "1 tea: 3"
    env.close()


def test_a_server_is_reached_over_http():
    port = free_port()
    server = subprocess.Popen([sys.executable, SERVER, str(port)])
    try:
        wait_until_sync(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        env = env_with({"tool_id": "mcp", "url": f"http://127.0.0.1:{port}/mcp", "functions": ["who"]}, STDIO)
        assert int(observe(env, call("who"))) == server.pid
        assert observe(env, call("price", item="tea")) == "1 tea: 3", (
            "the call goes to the server that has the function"
        )
        env.close()
    finally:
        server.kill()
        server.wait()


def test_an_unreachable_server_is_reported():
    for tool, message in (
        ({"tool_id": "mcp", "command": ["no-such-server"]}, "no-such-server failed"),
        ({"tool_id": "mcp", "url": "http://127.0.0.1:9/mcp"}, "127.0.0.1:9/mcp failed"),
        ({**STDIO, "functions": ["steal"]}, "no 'steal'; it has price"),
    ):
        with pytest.raises(ValueError, match=message):
            env_with(tool)
    assert "set either command or url" in "; ".join(
        registry.check_env_config("tools", {"env_type": "frozen_lake", "tools": [{"tool_id": "mcp"}]})
    )


def test_a_missing_sdk_is_named_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ValueError, match=r"mcp is not installed: .*offbeat\[mcp\]"):
        env_with({**STDIO, "timeout_s": 32.0})


def test_a_server_that_never_answers_is_given_up_without_a_trace(monkeypatch: pytest.MonkeyPatch):
    """Neither its process nor the connection's thread and descriptors are left."""
    monkeypatch.setattr(mcp_server, "CONNECT_TIMEOUT_S", 0.5)
    threads, descriptors = set(threading.enumerate()), os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match=r"the MCP server sleep 4711 failed: no connection in 0\.5 s"):
        env_with({"tool_id": "mcp", "command": ["sleep", "4711"]})
    wait_until_sync(lambda: set(threading.enumerate()) <= threads)
    wait_until_sync(lambda: len(os.listdir("/proc/self/fd")) <= len(descriptors))
    wait_until_sync(lambda: "sleep\x004711" not in "".join(map(read_command, filter(str.isdigit, os.listdir("/proc")))))


def read_command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""

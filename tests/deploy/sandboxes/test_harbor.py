"""Harbor's own trials on the kernel sandbox: `make test-harbor`, as Harbor needs Python 3.12 or newer."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor", reason="needs Python 3.12 with the extra harbor: make test-harbor")

from harbor.agents.base import BaseAgent
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

from offbeat.deploy.agents.harbor_trial import SANDBOX, play
from offbeat.envs.harbor import HarborConfig, HarborEnv
from offbeat.envs.harbor.images import require_image as build_image
from offbeat.envs.harbor.images import task_image
from offbeat.envs.harbor.task import find_tasks
from offbeat.envs.harbor.task_set import OWN_TASKS
from offbeat.envs.sandbox.shell import TASK_IMAGE
from offbeat.services.rollout.agents.task import AgentTask
from tests.envs.harbor.task_folder import TaskFolder, needs_shell, write_image_task
from tests.envs.sandbox.images import remove_images, require_image

pytestmark = needs_shell
HERE = "tests.deploy.sandboxes.test_harbor:"


async def run(task: Path, folder: Path, limits: dict[str, Any] | None = None, **agent: Any) -> Any:
    config = TrialConfig(
        task=TaskConfig(path=task),
        trials_dir=folder / "trials",
        agent=AgentConfig(**agent),
        environment=EnvironmentConfig(**SANDBOX, kwargs={"limits": limits or {}}),
    )
    return await (await Trial.create(config)).run()


@pytest.mark.parametrize("name", ["sort-names", "make-executable", "two-reports", "fix-mean"])
@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
async def test_harbors_oracle_solves_our_tasks_and_its_nop_does_not(
    tmp_path: Path, name: str, agent: str, reward: float
):
    result = await run(OWN_TASKS / name, tmp_path, name=agent)
    assert (result.exception_info, result.verifier_result.rewards) == (None, {"reward": reward})


class Cheat(BaseAgent):
    """Leaves a link to the expected answer, a reward, and a process that writes it again."""

    @staticmethod
    def name() -> str:
        return "cheat"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None: ...

    async def run(self, instruction: str, environment: Any, context: Any) -> None:  # noqa: ARG002
        await environment.exec("ln -s /tests/expected.txt sorted.txt; echo 1 > /logs/verifier/reward.txt")
        await environment.exec("setsid bash -c 'while sleep 0.05; do echo 1 > /logs/verifier/reward.json; done' &")


async def test_an_agents_leftovers_do_not_reach_the_verifier(tmp_path: Path):
    result = await run(OWN_TASKS / "sort-names", tmp_path, import_path=f"{HERE}Cheat")
    assert (result.exception_info, result.verifier_result.rewards) == (None, {"reward": 0.0})


class Prober(Cheat):
    """Uses each operation of the environment."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        given = self.logs_dir / "given"
        (given / "sub/empty").mkdir(parents=True)
        (given / "sub/a b.bin").write_bytes(bytes(range(256)) * 5000)
        await environment.upload_dir(given, "/data/given")
        await environment.download_dir("/data/given", self.logs_dir / "back")
        back = self.logs_dir / "back/sub"
        same = (back / "a b.bin").read_bytes() == (given / "sub/a b.bin").read_bytes() and (back / "empty").is_dir()
        seen = [same, await environment.is_dir("/data/given"), await environment.is_file("/data/none")]
        result = await environment.exec("pwd; echo $A; exit 3", cwd="/data", env={"A": "b"})
        seen += [result.stdout, result.return_code]
        for how in ({"timeout_sec": 1}, {"user": "nobody"}):
            try:
                await environment.exec("sleep 60", **how)
            except RuntimeError as error:
                seen.append(str(error))
        context.metadata = {"seen": seen, "instruction": instruction}


async def test_files_commands_limits_and_users(tmp_path: Path):
    result = await run(OWN_TASKS / "sort-names", tmp_path, import_path=f"{HERE}Prober")
    seen = result.agent_result.metadata["seen"]
    assert seen[:5] == [True, True, False, "/data\nb\n", 3]
    assert seen[5:] == ["Command timed out after 1 seconds", "the sandbox has one user, and the task asks for nobody"]


async def test_a_task_that_needs_a_container_is_refused(tmp_path: Path):
    folder = TaskFolder(tmp_path / "task")
    folder.write("environment/Dockerfile", "FROM postgres\n")
    with pytest.raises(ValueError, match="needs a container: its Dockerfile: its image postgres"):
        await run(folder.path, tmp_path, name="nop")


async def test_a_network_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"limits\.network: Harbor's environment has no network"):
        await run(OWN_TASKS / "sort-names", tmp_path, limits={"image": "ubuntu", "network": "task"}, name="nop")


@pytest.fixture
def image_task(tmp_path: Path) -> Iterator[Path]:
    """A task whose own image exists."""
    require_image()
    folder = write_image_task(tmp_path / "task", "for Harbor").path
    (task,) = find_tasks(folder)
    build_image(task, build=True)
    yield folder
    remove_images(task_image(task))


async def test_a_task_is_solved_in_its_own_image(image_task: Path, tmp_path: Path):
    result = await run(image_task, tmp_path, limits={"image": TASK_IMAGE}, name="oracle")
    assert (result.exception_info, result.verifier_result.rewards) == (None, {"reward": 1.0})


ANSWERS = ["I sort.\n```bash\nsort names.txt > sorted.txt\n```", "```bash\nsubmit\n```"]


class _Endpoint(BaseHTTPRequestHandler):
    """Answers by script, with token ids as Offbeat's gateway gives them (tests/services/gateway/test_clients.py)."""

    requests: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        text = ANSWERS[len(self.requests) - 1]
        ids = list(text.encode())
        entries = [{"token": chr(i), "logprob": -i / 1000, "bytes": [i], "top_logprobs": []} for i in ids]
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        choice |= {"logprobs": {"content": entries}, "token_ids": ids}
        usage = {"prompt_tokens": 2, "completion_tokens": len(ids), "total_tokens": 2 + len(ids)}
        head = {"id": "x", "object": "chat.completion", "created": 1, "model": "policy", "prompt_token_ids": [7, 8]}
        data = json.dumps({**head, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[ThreadingHTTPServer]:
    _Endpoint.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


async def test_an_episode_by_harbor_earns_the_verifiers_reward_and_leaves_rollout_details(
    endpoint: ThreadingHTTPServer, tmp_path: Path
):
    settings = {"split": "any", "played_by": "agent", "tasks": ("sort-names",), "trials_dir": tmp_path / "trials"}
    env = HarborEnv(HarborConfig.model_validate(settings))
    observation, _ = env.reset(seed=0)
    with pytest.raises(RuntimeError, match="Harbor runs the episodes"):
        env.step("ls")
    url = f"http://127.0.0.1:{endpoint.server_port}"
    task = AgentTask(f"{url}/v1", "key", url, url, "policy", "Terminal", 0, "", observation, 30)
    assert await play(task) == {"reward": 1.0, "metrics": {"success": 1.0}}
    (path,) = (tmp_path / "trials").glob("*/result.json")
    (detail,) = json.loads(path.read_text())["agent_result"]["rollout_details"]
    assert detail["prompt_token_ids"] == [[7, 8], [7, 8]]
    assert detail["completion_token_ids"] == [list(answer.encode()) for answer in ANSWERS]
    assert detail["logprobs"] == [[-i / 1000 for i in answer.encode()] for answer in ANSWERS]
    assert [message["role"] for message in _Endpoint.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert _Endpoint.requests[1]["messages"][2]["content"] == "(no output)"

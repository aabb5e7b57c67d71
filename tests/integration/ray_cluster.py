"""A Ray cluster of a test's own, started and used by the commands that a person types."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import yaml

from offbeat.deploy.token_file import TOKEN_FILE
from offbeat.services.process import free_port
from tests.integration.mesh import HTTP
from tests.paths import ROOT
from tests.waiting import wait_until_sync

BIN = ROOT / ".venv" / "bin"
MARK = "OFFBEAT_TEST"


class RayCluster:
    """`ray start --head` in `folder`, and what is deployed on it; everything carries a mark in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = {name: free_port() for name in ("gcs", "dashboard", "client", "api", "redis")}
        # Unix sockets lie in it, and have short names only.
        self._temp = Path(tempfile.mkdtemp(prefix="ob-", dir="/tmp"))
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._home = folder / "home"
        self._home.mkdir()
        (self._home / ".cache").symlink_to(Path.home() / ".cache")
        self._environment = {
            **{key: value for key, value in os.environ.items() if key != "RAY_AUTH_TOKEN"},
            "HOME": str(self._home),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(folder),
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": f"127.0.0.1:{self._ports['gcs']}",
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self._ports['dashboard']}",
            MARK: str(folder),
        }
        self.url = f"http://127.0.0.1:{self._ports['api']}"
        self.api = httpx.Client(base_url=self.url, timeout=20.0, trust_env=False, auth=self._authorize)

    @property
    def address(self) -> str:
        return self._environment["RAY_ADDRESS"]

    def start(self, num_cpus: int, num_gpus: int = 0) -> None:
        """Start the head; returns when its dashboard answers."""
        ports = self._ports
        self._command("ray", "get-auth-token", "--generate")
        self._start_node(
            *("--head", f"--port={ports['gcs']}", "--include-dashboard=true", f"--temp-dir={self._temp}"),
            *(f"--dashboard-port={ports['dashboard']}", f"--ray-client-server-port={ports['client']}"),
            f"--num-cpus={num_cpus}",
            f"--num-gpus={num_gpus}",
        )
        wait_until_sync(self._dashboard_answers, timeout_s=180, every_s=0.2)

    def join(self, num_cpus: int, num_gpus: int = 0) -> None:
        """Start a second node."""
        size = (f"--num-cpus={num_cpus}", f"--num-gpus={num_gpus}")
        self._start_node(f"--address={self._environment['RAY_ADDRESS']}", *size)

    def _start_node(self, *options: str) -> None:
        log = (self.folder / f"ray-{len(self._nodes)}.out").open("wb")
        # `RAY_ADDRESS` would make a head join somebody else.
        environment = {key: value for key, value in self._environment.items() if key != "RAY_ADDRESS"}
        command = [
            BIN / "ray",
            "start",
            "--block",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
            *options,
        ]
        self._nodes.append(
            subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        )

    def _dashboard_answers(self) -> bool:
        assert self._nodes[0].poll() is None, (self.folder / "ray-0.out").read_text()
        try:
            return HTTP.get(f"{self._environment['RAY_DASHBOARD_ADDRESS']}/api/version").status_code < 500
        except httpx.HTTPError:
            return False

    def _authorize(self, request: httpx.Request) -> httpx.Request:
        token = self.folder / TOKEN_FILE
        if token.is_file():  # not before the first deployment
            request.headers["Authorization"] = f"Bearer {token.read_text().strip()}"
        return request

    def serve(self, *arguments: str) -> str:
        """What a `serve` command prints."""
        return self._command("serve", *arguments)

    def offbeat(self, *arguments: str) -> str:
        """What an `offbeat` command prints."""
        return self._command("offbeat", *arguments)

    def python(self, script: Path, *arguments: str) -> str:
        """What a program of the tests prints."""
        done = self._run("python", str(script), *arguments, path=f"{self.folder}:{ROOT}", timeout_s=480)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def refusal(self, *command: str) -> str:
        """What a command that refuses its arguments prints."""
        done = self._run(*command)
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stderr

    def _command(self, *command: str) -> str:
        done = self._run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _run(
        self, *command: str, path: str | None = None, timeout_s: float = 180
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [BIN / command[0], *command[1:]],
            check=False,
            cwd=self.folder,
            env=self._environment if path is None else {**self._environment, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def status(self) -> dict[str, str]:
        """Application -> status, as `serve status` says."""
        listed = yaml.safe_load(self.serve("status"))
        return {name: app["status"] for name, app in listed["applications"].items()}

    def deploy(self, source: Path, change: Mapping[str, Any] = MappingProxyType({})) -> Path:
        """`serve deploy` the file `source` on ports of our own; `change`: `application.deployment` -> keys."""
        tree = yaml.safe_load(source.read_text())
        tree["http_options"]["port"] = self._ports["api"]
        for app in tree["applications"]:
            app["args"]["redis_url"] = f"redis://127.0.0.1:{self._ports['redis']}/0"
            for deployment in app.get("deployments", []):
                deployment.update(change.get(f"{app['name']}.{deployment['name']}", {}))
            app["args"].update(change.get(app["name"], {}))
        path = self.folder / "deploy.yaml"
        path.write_text(yaml.safe_dump(tree))
        self.serve("deploy", str(path))
        return path

    def run(self, run_id: str) -> dict[str, Any]:
        """The run as the API shows it, or nothing while it does not answer."""
        try:
            answer = self.api.get(f"/runs/{run_id}")
        except httpx.HTTPError:
            return {}
        return answer.json() if answer.status_code == httpx.codes.OK else {}

    def living(self, *marks: str) -> list[psutil.Process]:
        """Processes of this cluster whose command line holds one of `marks`."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                # redis-server writes over its environment.
                ours = process.environ().get(MARK) == str(self.folder) or process.cwd() == str(
                    self.folder / "runs/redis"
                )
                line = " ".join(process.cmdline())
                if ours and process.status() != psutil.STATUS_ZOMBIE and any(mark in line for mark in marks):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def actors(self) -> list[dict[str, Any]]:
        """Living actors, as Ray's dashboard lists them."""
        answer = HTTP.get(
            f"{self._environment['RAY_DASHBOARD_ADDRESS']}/api/v0/actors",
            params={"filter_keys": "state", "filter_predicates": "=", "filter_values": "ALIVE", "detail": "true"},
            headers={"Authorization": f"Bearer {(self._home / '.ray/auth_token').read_text().strip()}"},
            timeout=20.0,
        )
        return answer.raise_for_status().json()["data"]["result"]["result"]

    def end(self) -> None:
        """End all nodes and whatever is left of them."""
        self.api.close()
        for node in reversed(self._nodes):
            node.send_signal(signal.SIGTERM)
        for node in self._nodes:
            try:
                node.wait(5)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait(5)
        for process in self.living(""):
            process.kill()
        shutil.rmtree(self._temp, ignore_errors=True)

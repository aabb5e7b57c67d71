"""Recorded commands sent again to Tinker's API, and what commands leave, to the bit."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from offbeat.benchmarks.tinker.recording import CommandId, Commands

CALL_TIMEOUT_S, TIMEOUT_S = 60.0, 240.0
RETRY_S = 0.1
NOT_YET = 408, 503
"""Statuses while a command is in progress, and while Redis starts."""
SHOWN = 300


@dataclass(frozen=True, slots=True)
class CommandOutcomes:
    """What commands have left.

    found: results, metrics of optimizer steps and files of checkpoints, by name; problems: of the models' audits.
    """

    found: dict[str, bytes]
    problems: list[str]

    def differences(self, other: "CommandOutcomes") -> list[str]:
        """Return what differs from other outcomes of the same commands, and what is wrong with either."""
        pairs = {name: (self.found.get(name), other.found.get(name)) for name in self.found | other.found}
        differing = [f"{name}: {str(a)[:SHOWN]} and {str(b)[:SHOWN]}" for name, (a, b) in pairs.items() if a != b]
        return differing + self.problems + other.problems


class CommandReplay:
    def __init__(self, url: str, key: str, folder: Path, commands: Commands) -> None:
        """key: of the recorded models; folder: the server's, with the checkpoints."""
        self._http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=CALL_TIMEOUT_S)
        self._checkpoints = folder / "tinker" / "checkpoints"
        models = list(dict.fromkeys(each.model_id for each in commands))  # later ones may load what earlier ones save
        self._commands = dict(sorted(commands.items(), key=lambda item: (models.index(item[0].model_id), item[0])))
        self._sessions = sorted({each.session_id for each in commands})

    def recorded(self) -> CommandOutcomes:
        """Return what the recorded commands have left."""
        return self._collect({each: each for each in self._sessions})

    def repeat(self) -> CommandOutcomes:
        """Send the commands for new models, one at a time; return what they have left, under the recorded ids."""
        sessions = {each: self._call("POST", "create_session", b"{}").json()["session_id"] for each in self._sessions}
        for command_id, command in self._commands.items():
            body = self._with_seed(command_id, command.body) if command.route == "create_model" else command.body
            self._call("POST", command.route, _rename(body, sessions))
            self._result(_rename(command_id.request_id.encode(), sessions))
        return self._collect(sessions)

    def _with_seed(self, command_id: CommandId, body: bytes) -> bytes:
        """Return a model's creation with its seed, which the server draws for clients that give none."""
        fields = json.loads(body)
        fields["lora_config"]["seed"] = self._call("GET", f"training_runs/{command_id.model_id}").json()["lora_seed"]
        return json.dumps(fields).encode()

    def _collect(self, sessions: Mapping[str, str]) -> CommandOutcomes:
        """sessions: that of the models, by the recorded one."""
        found = {
            each.request_id: _rename(self._result(_rename(each.request_id.encode(), sessions)), _invert(sessions))
            for each in self._commands
        }
        problems: list[str] = []
        for model_id in sorted({each.model_id for each in self._commands}):
            current = _rename(model_id.encode(), sessions).decode()
            steps = self._call("GET", f"training_runs/{current}/metrics").json()["steps"]
            found[f"{model_id}: steps"] = json.dumps([{**step, "at": None} for step in steps]).encode()
            folder = self._checkpoints / current
            files = (path for path in folder.rglob("*") if path.is_file())
            found |= {f"{model_id}: {path.relative_to(folder)}": path.read_bytes() for path in files}
            problems += self._call("GET", f"training_runs/{current}/audit").json()["problems"]
        return CommandOutcomes(found, problems)

    def _result(self, request_id: bytes) -> bytes:
        body = json.dumps({"request_id": request_id.decode()}).encode()
        return self._call("POST", "retrieve_future", body).content

    def _call(self, method: str, route: str, body: bytes | None = None) -> httpx.Response:
        headers = {"Content-Type": "application/json", "Accept": "application/x-protobuf, application/json"}
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._http.request(method, route, content=body, headers=headers)
            if answer.status_code not in NOT_YET or time.monotonic() > deadline:
                return answer.raise_for_status()
            time.sleep(RETRY_S)


def _invert(sessions: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in sessions.items()}


def _rename(text: bytes, sessions: Mapping[str, str]) -> bytes:
    """Replace sessions' ids; lengths in protobuf stay right, as all ids are equally long."""
    for old, new in sessions.items():
        text = text.replace(old.encode(), new.encode())
    return text

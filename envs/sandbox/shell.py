"""A policy's shell in the kernel sandbox: it lives for an episode, with folders at absolute paths.

Invariants: commands share files and background processes, never the worker's; all end with the shell.
"""

import base64
import functools
import json
import os
import re
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from offbeat.envs.sandbox.folder import SandboxFolder
from offbeat.envs.sandbox.pipes import closing_on_error, open_pipes
from offbeat.envs.sandbox.run import (
    LAYERS,
    STARTUP_TIMEOUT_S,
    IsolationError,
    Limits,
    check_isolation,
    join_output,
    platform_isolation,
    start_supervisor,
)

HOME = "/sandbox"
READABLE = ("/etc/alternatives",)
"""Debian's commands are links into it."""
REPLY_TIMEOUT_S = 30.0
"""Beyond a command's own timeout."""
HEADER = struct.Struct("!I")
UPLOAD_BYTES = 1 << 20
"""Per request."""
IMAGE = r"^[A-Za-z0-9][\w.-]*(:\d+/[\w.-]+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?$"
"""Names of images, neither options nor transports such as `dir:/path`."""
TASK_IMAGE = "task"
"""In place of a name: each task's own image."""
PROBE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*:\d{1,5}")
OWN_NETWORK = IPv4Network("198.19.213.0/24")
"""Of a container and its gateway; rare, as no container can reach another with its addresses."""


class ShellLimits(Limits):
    timeout_s: float = Field(default=86_400.0, gt=0)
    """Life of a shell."""
    cpu_s: int = Field(default=60, ge=1)
    """CPU time per process."""
    memory_mib: int = Field(default=8192, ge=64)
    file_mib: int = Field(default=64, ge=1)
    disk_mib: int = Field(default=256, ge=1)
    max_files: int = Field(default=20_000, ge=10)
    max_processes: int = Field(default=32, ge=4)
    image: str | None = Field(default=None, pattern=IMAGE)
    """Image, present on the machine, of a container of podman or docker; `task`: each task's own, if it is one of
    Harbor's; None: the kernel sandbox.
    """
    runtime: Literal["runsc"] | None = None
    """With `image`: gVisor in place of the default runtime of podman or docker."""
    network: Literal["none", "verifier", "task"] = "none"
    """With `image`: `verifier`: the internet for a task's verifier; `task`: for the policy, too. Neither beyond what its
    `task.toml` allows.
    """
    allowed_networks: tuple[str, ...] = ()
    """With `network`: private addresses (10.1.2.3) and networks (10.1.0.0/16) that containers reach, too."""
    network_probe: tuple[str, ...] = ("pypi.org:443",)
    """With `network`: hosts and ports that must be reachable before and after a verifier, or the episode is repeated."""

    @field_validator("allowed_networks")
    @classmethod
    def _networks_are_ipv4(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            if IPv4Network(network).overlaps(OWN_NETWORK):
                raise ValueError(f"{network} overlaps {OWN_NETWORK}, which is a container's own")
        return networks

    @field_validator("network_probe")
    @classmethod
    def _probes_are_ports(cls, probes: tuple[str, ...]) -> tuple[str, ...]:
        for probe in probes:
            if not PROBE.fullmatch(probe):
                raise ValueError(f"{probe!r} is not a host and port, such as pypi.org:443")
        return probes

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> "ShellLimits":
        if self.image is None and self.network != "none":
            raise ValueError(f"network {self.network} needs image: the kernel sandbox has no network")
        if self.runtime and self.network != "none":
            raise ValueError("network has no effect with runtime runsc, whose network stack is its own")
        named = ("max_files", "isolation") if self.image else ("runtime",)
        if without := sorted(self.model_fields_set & {*named}):
            verb, where = ("have" if len(without) > 1 else "has"), "with" if self.image else "without"
            raise ValueError(f"{', '.join(without)} {verb} no effect {where} image")
        of_networks = self.model_fields_set & {"allowed_networks", "network_probe"}
        if self.network == "none" and of_networks:
            verb = "have" if len(of_networks) > 1 else "has"
            raise ValueError(f"{', '.join(sorted(of_networks))} {verb} no effect without network: verifier or task")
        return self


class ShellError(RuntimeError):
    """A lost shell, or a refused request."""


class CommandResult(NamedTuple):
    output: str
    """stdout and stderr; the middle is cut."""
    exit_code: int
    timed_out: bool
    wall_s: float = 0.0


class UploadedFile(NamedTuple):
    content: bytes | None
    """None: a folder."""
    mode: int = 0o644

    @classmethod
    def of(cls, path: Path) -> "UploadedFile":
        """Read a file with its mode."""
        return cls(path.read_bytes(), path.stat().st_mode & 0o777)


def check_shell(limits: ShellLimits) -> None:
    """Raise `IsolationError` if this machine can't isolate a shell."""
    check_isolation(limits.model_copy(update={"isolation": "require"}))
    if "mounts" not in platform_isolation():
        raise IsolationError("a shell needs mounts in a user namespace, which this machine's kernel or container lacks")


class Shell:
    """Shell of one episode; concurrent calls wait for each other."""

    bash = "bash"
    """Of verifiers."""

    def __init__(self, folders: Sequence[str], limits: ShellLimits, hidden: Sequence[str] = ()) -> None:
        """folders: writable, besides `HOME`. hidden: empty inside, if they are below Python's installation.

        Raises:
            IsolationError: the machine can't isolate a shell.
            ShellError: it did not start.
        """
        check_shell(limits)
        self._limits = limits
        self._lock = threading.Lock()
        self._temporary = SandboxFolder()
        try:
            self._start(folders, hidden)
        except BaseException:
            self._temporary.remove()
            raise

    def _start(self, folders: Sequence[str], hidden: Sequence[str]) -> None:
        self._folder = self._temporary.path
        (self._folder / "work").mkdir()
        their_read, self._write_fd, self._read_fd, their_write = open_pipes()
        with closing_on_error((self._read_fd, self._write_fd)):
            with closing_on_error((their_read, their_write)):
                source = Path(__file__).with_name("shell_runner.py").read_text()
                (self._folder / "main.py").write_text(f"{source}\nserve({their_read}, {their_write})")
                (self._folder / "stdin").touch()
            self._process: subprocess.Popen[bytes] | None = (
                _spawner(os.getpid())
                .submit(
                    start_supervisor,
                    self._folder,
                    self._limits,
                    LAYERS,
                    (their_read, their_write),
                    writable=tuple(folders),
                    readable=READABLE,
                    hidden=tuple(hidden),
                )
                .result()
            )
        self._receive(STARTUP_TIMEOUT_S)

    def run(self, command: Sequence[str], *, cwd: str, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        """Run a command in `env` alone; raises ShellError if the shell has ended or refuses it."""
        start = time.monotonic()
        reply = self._call(
            "run",
            timeout_s,
            command=list(command),
            cwd=cwd,
            env=dict(env),
            timeout_s=timeout_s,
            max_bytes=4 * self._limits.max_output_chars,
        )
        head, tail = (base64.b64decode(part) for part in reply["output"])
        output = join_output(head, tail, reply["num_dropped"], self._limits.max_output_chars)
        return CommandResult(output, reply["exit_code"], reply["timed_out"], time.monotonic() - start)

    def upload(self, folder: str, files: Mapping[str, UploadedFile]) -> None:
        """Write files below `folder`, replacing others."""
        batch: dict[str, tuple[int, str | None]] = {}
        num_bytes = 0
        for name, file in files.items():
            content = None if file.content is None else base64.b64encode(file.content).decode()
            batch[name] = (file.mode, content)
            num_bytes += len(content or "")
            if num_bytes >= UPLOAD_BYTES:
                self._call("upload", folder=folder, files=batch)
                batch, num_bytes = {}, 0
        self._call("upload", folder=folder, files=batch)

    def clear(self, *folders: str) -> None:
        """Remove the content of folders; create missing ones."""
        for folder in folders:
            self._call("clear", folder=folder)

    def unlink_to(self, folders: Sequence[str], targets: Sequence[str]) -> None:
        """Remove symbolic links below `folders` that lead into `targets`, or above them."""
        self._call("unlink_to", folders=list(folders), targets=list(targets))

    def read(self, path: str, max_bytes: int = 1 << 16) -> bytes | None:
        """Read a regular file, or return None."""
        content = self._call("read", path=path, max_bytes=max_bytes)["content"]
        return None if content is None else base64.b64decode(content)

    def kill_processes(self) -> None:
        self._call("kill")

    def secure(self) -> None:
        """Prepare for a verifier: end all processes."""
        self.kill_processes()

    def command_env(self) -> dict[str, str]:
        return command_env()

    def verifier_env(self) -> dict[str, str]:
        return command_env()

    def close(self) -> None:
        """Kill all processes and drop all files."""
        if self._process is None:
            return
        # The supervisor, whose death kills all in the sandbox
        self._process.kill()
        self._process.wait()
        self._process = None
        os.close(self._read_fd)
        os.close(self._write_fd)
        self._temporary.remove()

    def _call(self, operation: str, wait_s: float = 0.0, **arguments: Any) -> dict[str, Any]:
        data = json.dumps({"operation": operation, **arguments}).encode()
        with self._lock:
            self._send(HEADER.pack(len(data)) + data)
            reply = self._receive(wait_s + REPLY_TIMEOUT_S)
        if "error" in reply:
            raise ShellError(f"{operation}: {reply['error']}")
        return reply

    def _send(self, data: bytes) -> None:
        if self._process is None:
            raise ShellError("the shell is closed")
        try:
            while data:
                data = data[os.write(self._write_fd, data) :]
        except BrokenPipeError:
            raise self._lost() from None

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        (num_bytes,) = HEADER.unpack(self._read(HEADER.size, deadline))
        return json.loads(self._read(num_bytes, deadline))

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        poll = select.poll()  # `select.select` refuses descriptors above 1023
        poll.register(self._read_fd, select.POLLIN)
        data = bytearray()
        while len(data) < num_bytes:
            is_ready = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
            part = os.read(self._read_fd, num_bytes - len(data)) if is_ready else b""
            if not part:
                raise self._lost()
            data += part
        return bytes(data)

    def _lost(self) -> ShellError:
        stderr = self._folder / "stderr"
        lines = stderr.read_text(errors="replace").strip().splitlines() if stderr.is_file() else []
        self.close()
        return ShellError(f"the shell ended{f': {lines[-1]}' if lines else ''}")


def command_env() -> dict[str, str]:
    """Return a command's variables: the system's commands and Python, nothing of the worker's."""
    path = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{sys.base_prefix}/bin"
    return {"PATH": path, "HOME": HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb"}


@functools.cache
def _spawner(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001
    """Return the process's one thread that starts shells: a supervisor dies with the thread that started it."""
    return ThreadPoolExecutor(1, "shells")

"""A policy's shell in a container of podman or docker, with the operations of `Shell`.

Each operation is an `exec` from outside. Invariants: the image's files are read-only, but for folders in memory; the
container has neither network nor capabilities; it ends with the process that holds it, even one killed by SIGKILL.
"""

import functools
import io
import math
import os
import select
import subprocess
import tarfile
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Literal

from offbeat.envs.sandbox.container_engine import (
    find_image,
    read_pid,
    run_command,
    seccomp_profile,
    trusted_env,
)
from offbeat.envs.sandbox.links import MAX_LINKS, prefixes, resolve
from offbeat.envs.sandbox.network import ContainerNetwork, check_network
from offbeat.envs.sandbox.run import STARTUP_TIMEOUT_S, IsolationError, join_output
from offbeat.envs.sandbox.shell import (
    HOME,
    REPLY_TIMEOUT_S,
    CommandResult,
    ShellError,
    ShellLimits,
    UploadedFile,
)
from offbeat.envs.sandbox.shell_runner import PAST_S, Output, overlap

PROGRAMS = ("cat", "chmod", "env", "find", "head", "mkdir", "readlink", "rm", "sleep", "stat", "tar", "xargs")
"""Besides /bin/sh, those that an image needs."""
DETACH = 'exec 3<&0; "$@" <&3 3<&- &'
"""Starts a process whose parent is not the worker, as Ray kills an actor with its children."""
SUPERVISOR = """
trap '' PIPE
trap : HUP INT TERM
name=$1 life_s=$2 engine=$3
shift 2
folder=$(mktemp -d) && cd "$folder" || exit 1
timeout 120 "$@" >&2 </dev/null && echo started && timeout "$life_s" cat >/dev/null
for attempt in 1 2 3; do timeout 60 "$engine" rm --force --volumes "$name" >/dev/null 2>&1 && break; sleep 1; done
cd / && rm -rf "$folder"
"""
"""Starts a container; removes it at the end of its input, which the worker holds, or of its time.

Its folder is its own, as conmon writes a file `oom` there when memory runs out.
"""
RUN = 'cd -- "$1" && echo $$ && shift && exec env -i "$@" 2>&1'
UPLOAD = 'mkdir -p -- "$1" && tar -xf - -C "$1"'
READ = """
if [ -f "$1" ] && ! [ -h "$1" ]; then exec head -c "$2" -- "$1"; fi
if [ -e "$1" ] || [ -h "$1" ]; then echo "$1 is no regular file" >&2; exit 3; fi
exit 4
"""
MISSING = 4
CLEAR = """
for folder; do
  if [ -h "$folder" ] || [ -f "$folder" ]; then rm -f -- "$folder" || exit 1; fi
  mkdir -p -- "$folder" && chmod 755 -- "$folder" || exit 1
  find "$folder" -xdev -type d ! -perm -700 -exec chmod u+rwx {} \\; || exit 1
  find "$folder" -mindepth 1 -maxdepth 1 -exec rm -rf -- {} + || exit 1
done
"""
DEVICES = """
for path in /dev/* /dev/.[!.]*; do
  if [ -h "$path" ]; then echo "$path $(readlink "$path")"
  elif [ -c "$path" ]; then echo "$path $(stat -c %t:%T "$path")"; fi
done
"""
START = f"""
missing=
for program; do command -v "$program" >/dev/null || missing="$missing $program"; done
[ -z "$missing" ] || {{ echo "it lacks$missing, which its shell needs" >&2; exit 1; }}
{DEVICES}"""
KILL = f"""
kill -9 -1 2>/dev/null
for path in /proc/[0-9]*; do
  pid=${{path#/proc/}}
  [ "$pid" = 1 ] || [ "$pid" = $$ ] || while kill -9 "$pid" 2>/dev/null; do :; done
done
{DEVICES}"""
"""After the first line, what is left is dying, or the next `sleep` of the first process, which reaps all."""
LINKS = """
link=$1; shift
find "$@" -xdev -type d ! -perm -500 -exec chmod u+rwx {} \\;
find / /dev -xdev -maxdepth 1 -type l -exec sh -c "$link" sh {} + && find "$@" -xdev -type l -exec sh -c "$link" sh {} +
"""
LINK = """
for path; do
  [ -h "$path" ] || continue
  target=$(readlink -n "$path"; echo x)
  printf "%s\\0%s\\0" "$path" "${target%x}"
done
"""
READ_LINKS = 'exec xargs -0 sh -c "$1" sh'
CLOSE_TIMEOUT_S = 5.0
"""Of a supervisor; afterwards it removes its container without its worker."""
OWN_ENV = {"HOME": HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb"}
LIMITS = """
cd /sys/fs/cgroup
for file in memory.max memory/memory.limit_in_bytes; do [ -f $file ] && echo "memory $(cat $file)"; done
for file in pids.max pids/pids.max; do [ -f $file ] && echo "processes $(cat $file)"; done
:
"""


class ContainerShell:
    """Shell of one episode in a container; concurrent calls wait for each other."""

    is_writable = False
    """Whether the image's files are, too, on disk."""
    bash = "bash"
    """Of verifiers."""

    def __init__(self, folders: Sequence[str], limits: ShellLimits) -> None:
        """folders: writable, in memory, besides `HOME`.

        Raises:
            IsolationError: podman and docker, or the image, are missing.
            ShellError: the container did not start.
        """
        self.image = find_image(limits)
        self._limits = limits
        self._lock = threading.Lock()
        volumes = () if self.is_writable else self.image.volumes
        self._folders = tuple(dict.fromkeys((*folders, HOME, *volumes)))
        self._name = f"offbeat-{uuid.uuid4().hex}"
        self._supervisor: subprocess.Popen[bytes] | None = self._start()
        try:
            self._devices = self.call("start", START, *PROGRAMS)
        except ShellError:
            self.close()
            raise

    def run(self, command: Sequence[str], *, cwd: str, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        """Run a command in `env` alone; raises ShellError if the container has ended or refuses it."""
        variables = [f"{name}={value}" for name, value in env.items()]
        with self._lock, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                self._exec(RUN, cwd, *variables, *command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            try:
                pid = _read_line(_opened(process.stdout), REPLY_TIMEOUT_S)
                if not pid:
                    process.kill()
                    process.wait()
                    raise ShellError(f"run: {_last_line(errors) or 'the container does not answer'}")
                return self._read_output(process, pid.decode(), timeout_s)
            finally:
                process.kill()
                process.wait()
                _opened(process.stdout).close()

    def upload(self, folder: str, files: Mapping[str, UploadedFile]) -> None:
        """Write files below `folder`, replacing others."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name, file in files.items():
                entry = tarfile.TarInfo(name)
                entry.mtime, entry.mode = PAST_S, 0o755 if file.content is None else file.mode
                entry.type = tarfile.DIRTYPE if file.content is None else tarfile.REGTYPE
                entry.size = len(file.content or b"")
                tar.addfile(entry, io.BytesIO(file.content or b""))
        self.call("upload", UPLOAD, folder, data=archive.getvalue())

    def clear(self, *folders: str) -> None:
        """Remove the content of folders; create missing ones."""
        self.call("clear", CLEAR, *folders)

    def unlink_to(self, folders: Sequence[str], targets: Sequence[str]) -> None:
        """Remove symbolic links below `folders` that lead into `targets`, above them, or into /proc."""
        fields = os.fsdecode(self.call("unlink_to", LINKS, LINK, *folders)).split("\0")
        links = dict(zip(fields[::2], fields[1::2], strict=False))
        self.unlink(
            [path for path in links if any(path.startswith(f"{folder}/") for folder in folders)], links, targets
        )

    def unlink(self, paths: Sequence[str], links: dict[str, str], targets: Sequence[str]) -> None:
        """Remove those of `paths` that lead into `targets`, above them, or into /proc. links: known ones, to be extended."""
        asked = set(links)
        for _ in range(MAX_LINKS):
            unknown = {prefix for path in paths for prefix in prefixes(path, links)} - asked
            if not unknown:
                break
            links |= self.read_links(unknown)
            asked |= unknown
        bad = [path for path in paths if any(overlap(resolve(path, links), target) for target in (*targets, "/proc"))]
        if bad:
            self.call("unlink_to", "exec xargs -0 rm -f --", data=os.fsencode("\0".join(bad)))

    def read_links(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the targets of those paths that are symbolic links."""
        data = os.fsencode("\0".join(paths))
        fields = os.fsdecode(self.call("read_links", READ_LINKS, LINK, data=data)).split("\0") if data else []
        return dict(zip(fields[::2], fields[1::2], strict=False))

    def read(self, path: str, max_bytes: int = 1 << 16) -> bytes | None:
        """Read a regular file, or return None."""
        with self._lock:
            result = self._run(READ, path, str(max_bytes))
        if result.returncode == MISSING:
            return None
        return self._checked("read", result)

    def kill_processes(self) -> None:
        """Kill all commands and what they started; raises ShellError if they replaced devices of /dev."""
        if self.call("kill", KILL) != self._devices:
            raise ShellError("kill: a command replaced files of /dev")

    def secure(self) -> None:
        """Prepare for a verifier: end all processes; raises ShellError if operations may no longer do what they say."""
        self.kill_processes()

    def command_env(self) -> dict[str, str]:
        """Return a command's variables: the image's, less paths that a command could fill."""
        return {**trusted_env(self.image, self._folders), **OWN_ENV}

    def verifier_env(self) -> dict[str, str]:
        return self.command_env()

    def connect(self) -> ContainerNetwork:
        """Connect the container to a network.

        Raises:
            NetworkError: it can't be connected, or a host of `network_probe` can't be reached.
            ShellError: the container has ended.
            IsolationError: podman or docker does not answer, which no command in the container causes.
        """
        check_network(self._limits)
        return ContainerNetwork(read_pid(self.image, self._name), self._limits)

    def close(self) -> None:
        """Remove the container."""
        if self._supervisor is not None:
            _end(self._supervisor)
            self._supervisor = None

    def _start(self) -> "subprocess.Popen[bytes]":
        profile = seccomp_profile(self.image.command)
        with tempfile.TemporaryFile() as errors, tempfile.NamedTemporaryFile("w", suffix=".json") as seccomp:
            seccomp.write(profile or "")
            seccomp.flush()
            path, life_s = seccomp.name if profile else None, str(math.ceil(self._limits.timeout_s))
            command = run_command(
                self.image, self._name, self._folders, self._limits, writable=self.is_writable, seccomp=path
            )
            supervisor = subprocess.Popen(
                ["/bin/sh", "-c", DETACH, "sh", "/bin/sh", "-c", SUPERVISOR, "sh", self._name, life_s, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            supervisor.wait()
            if _read_line(_opened(supervisor.stdout), 2 * STARTUP_TIMEOUT_S) != b"started":
                _end(supervisor)
                raise ShellError(f"the container did not start: {_last_line(errors)}")
            return supervisor

    def _read_output(self, process: "subprocess.Popen[bytes]", pid: str, timeout_s: float) -> CommandResult:
        start = time.monotonic()
        output, timed_out, deadline = Output(4 * self._limits.max_output_chars), False, start + timeout_s
        fd = _opened(process.stdout).fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while True:
            ready = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
            if ready and not output.read(fd):
                break
            if time.monotonic() >= deadline:
                if timed_out:
                    break
                timed_out, deadline = True, time.monotonic() + REPLY_TIMEOUT_S
                self._run('kill -9 "-$1"', pid)
        text = join_output(output.head, output.tail, output.num_dropped, self._limits.max_output_chars)
        try:
            exit_code = -9 if timed_out else process.wait(REPLY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ShellError("run: the container does not answer") from None
        return CommandResult(text, exit_code, timed_out, time.monotonic() - start)

    def call(self, operation: str, script: str, *arguments: str, data: bytes = b"") -> bytes:
        """Run a script in the container and return its output; raises `ShellError`, named by the operation, if it fails."""
        with self._lock:
            return self._checked(operation, self._run(script, *arguments, data=data))

    def _run(self, script: str, *arguments: str, data: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        try:
            return subprocess.run(
                self._exec(script, *arguments),
                input=data,
                capture_output=True,
                check=False,
                timeout=2 * REPLY_TIMEOUT_S,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise ShellError("the container does not answer") from None

    def _checked(self, operation: str, result: "subprocess.CompletedProcess[bytes]") -> bytes:
        if result.returncode:
            lines = result.stderr.decode(errors="replace").strip().splitlines()
            raise ShellError(f"{operation}: {lines[-1] if lines else f'exit code {result.returncode}'}")
        return result.stdout

    def _exec(self, script: str, *arguments: str) -> list[str]:
        if self._supervisor is None:
            raise ShellError("the shell is closed")
        return [
            *self.image.command,
            "exec",
            "-i",
            "--user",
            "0:0",
            self._name,
            "/bin/sh",
            "-c",
            script,
            "sh",
            *arguments,
        ]


def check_container(limits: ShellLimits) -> None:
    """Raise `IsolationError` if containers of the image don't start here, with its programs and within the limits."""
    _check(limits.image, limits.runtime, limits.memory_mib, limits.max_processes)


@functools.cache
def _check(image: str | None, runtime: Literal["runsc"] | None, memory_mib: int, max_processes: int) -> None:
    limits = ShellLimits(image=image, runtime=runtime, memory_mib=memory_mib, max_processes=max_processes)
    try:
        shell = ContainerShell(("/tmp",), limits)
        try:
            lines = shell.call("check", LIMITS).decode().split("\n")[:-1]
        finally:
            shell.close()
    except ShellError as error:
        raise IsolationError(f"image {image}: {error}") from error
    limited = {"memory": f"memory {memory_mib << 20}", "processes": f"processes {max_processes}"}
    without = [name for name, line in limited.items() if line not in lines]
    if runtime is None and without:
        raise IsolationError(
            f"{shell.image.command[0]} does not limit {' and '.join(without)} of containers here: its cgroups need these "
            "controllers, and another user than root needs cgroups v2, delegated to it"
        )


def _read_line(pipe: IO[bytes], timeout_s: float) -> bytes | None:
    """Read a line byte by byte, as what follows is read elsewhere; return None without one."""
    deadline, line = time.monotonic() + timeout_s, b""
    poll = select.poll()
    poll.register(pipe.fileno(), select.POLLIN)
    while not line.endswith(b"\n"):
        is_ready = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
        byte = os.read(pipe.fileno(), 1) if is_ready else b""
        if not byte:
            return None
        line += byte
    return line[:-1]


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _end(supervisor: "subprocess.Popen[bytes]") -> None:
    """End a supervisor's input, at which it removes its container; wait for the end of its output."""
    _opened(supervisor.stdin).close()
    _read_line(_opened(supervisor.stdout), CLOSE_TIMEOUT_S)
    _opened(supervisor.stdout).close()


def _opened(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe

# pyright: basic
"""Command server, first process of a sandbox: requests and replies are JSON with a length, over two pipes.

Invariants: standard library only, as its source runs in the sandbox; commands inherit neither pipe; signals from
commands are without effect. A command's output is read until it ends, though others may still hold it.
"""

import base64
import contextlib
import json
import os
import select
import signal
import stat
import struct
import subprocess
import time
from pathlib import Path

HEADER = struct.Struct("!I")
PAST_S = 1_577_836_800
"""Time of uploaded files: equal episodes list equal times."""
READ_BYTES = 1 << 16


def serve(read_fd, write_fd):
    for fd in (read_fd, write_fd):
        os.set_inheritable(fd, False)
    wake_fd, signal_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # reset in commands, unlike SIG_IGN
    signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)
    operations = {"upload": upload, "clear": clear, "unlink_to": unlink_to, "read": read, "kill": kill}
    _send(write_fd, {"ready": True})
    while (request := _receive(read_fd)) is not None:
        operation = request.pop("operation")
        try:
            reply = run(wake_fd, **request) if operation == "run" else operations[operation](**request)
        except Exception as error:  # what commands left behind may break any of them
            reply = {"error": f"{type(error).__name__}: {error}"}
        _send(write_fd, reply)


def run(wake_fd, command, cwd, env, timeout_s, max_bytes):
    """Run a command; the reply has the head and tail of its output."""
    deadline = time.monotonic() + timeout_s
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    pipe = process.stdout
    assert pipe is not None
    fd = pipe.fileno()
    os.set_blocking(fd, False)
    output, timed_out, is_open = Output(max_bytes), False, True
    while process.poll() is None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            timed_out = True
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            break
        ready, _, _ = select.select([wake_fd, *([fd] if is_open else [])], [], [], remaining_s)
        if wake_fd in ready:
            os.read(wake_fd, READ_BYTES)
        if fd in ready:
            is_open = output.read(fd)
    if is_open:
        output.drain(fd)
    pipe.close()
    _reap()
    text, num_dropped = output.text()
    return {"exit_code": process.returncode, "timed_out": timed_out, "output": text, "num_dropped": num_dropped}


class Output:
    def __init__(self, max_bytes: int):
        self.half, self.num_bytes = max_bytes // 2, 0
        self.head: bytes = b""
        self.tail: bytes = b""

    def read(self, fd: int) -> bool:
        """Read once; return False at the end."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return True
        self.num_bytes += len(data)
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail = (self.tail + data[room:])[-self.half :]
        return bool(data)

    def drain(self, fd):
        """Read what is there, at most a pipe's content: others may write on."""
        for _ in range(16):
            if not select.select([fd], [], [], 0)[0] or not self.read(fd):
                return

    @property
    def num_dropped(self) -> int:
        return self.num_bytes - len(self.head) - len(self.tail)

    def text(self):
        return [base64.b64encode(part).decode() for part in (self.head, self.tail)], self.num_dropped


def upload(folder, files):
    """Write files: path -> (mode, content), None for a folder."""
    os.makedirs(folder, exist_ok=True)
    for name, (mode, content) in files.items():
        path = Path(folder, name)
        if path.is_symlink():
            path.unlink()
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content))
        path.chmod(mode)
        os.utime(path, (PAST_S, PAST_S))
    return {}


def clear(folder):
    """Remove a folder's content, except mounts of the system; create it if missing."""
    if os.path.islink(folder) or os.path.isfile(folder):
        os.unlink(folder)
    os.makedirs(folder, exist_ok=True)
    os.chmod(folder, 0o755)
    device, seen, with_mounts = os.stat(folder).st_dev, [], set()
    for parent, names, others in os.walk(folder):
        links = [name for name in names if os.path.islink(os.path.join(parent, name))]
        for name in (name for name in names if name not in links):
            status = os.stat(path := os.path.join(parent, name))
            if status.st_dev == device and status.st_uid == os.geteuid():
                os.chmod(path, 0o700)
            else:  # a mount, or a folder that was made for one
                with_mounts |= _with_parents(path, folder)
        names[:] = [name for name in names if name not in links and os.path.join(parent, name) not in with_mounts]
        seen.append((parent, [*others, *links]))
    for parent, others in reversed(seen):
        for name in others:
            os.unlink(os.path.join(parent, name))
        if parent != folder and parent not in with_mounts:
            os.rmdir(parent)
    return {}


def _with_parents(path, folder):
    found = {path}
    while (path := os.path.dirname(path)) != folder:
        found.add(path)
    return found


def unlink_to(folders, targets):
    """Remove symbolic links below `folders` that lead into `targets`, or above them."""
    for folder in folders:
        device = os.stat(folder).st_dev
        for parent, names, others in os.walk(folder):
            if os.stat(parent).st_dev != device:  # read-only, of the system
                names.clear()
                continue
            for path in (os.path.join(parent, name) for name in (*names, *others)):
                _make_readable(path)
                if os.path.islink(path) and any(overlap(os.path.realpath(path), target) for target in targets):
                    os.unlink(path)
    return {}


def _make_readable(path):
    """Let `os.walk` list a folder of the policy's that could be traversed alone."""
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o500 != 0o500 and status.st_uid == os.geteuid():
        os.chmod(path, status.st_mode | 0o700)


def overlap(path: str, target: str) -> bool:
    """Return whether one of two paths is below the other."""
    return os.path.commonpath([path, target]) in (path, target)


def read(path, max_bytes):
    """Read a regular file; the reply's content is None without one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {"content": None}
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is no regular file")
        return {"content": base64.b64encode(file.read(min(max_bytes, status.st_size))).decode()}


def kill():
    """Kill all commands and what they started."""
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return {}


def _reap():
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _send(fd, message):
    data = json.dumps(message).encode()
    data = HEADER.pack(len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


def _receive(fd):
    header = _read_exactly(fd, HEADER.size)
    return json.loads(_read_exactly(fd, HEADER.unpack(header)[0])) if header else None


def _read_exactly(fd, num_bytes):
    data = b""
    while len(data) < num_bytes:
        part = os.read(fd, num_bytes - len(data))
        if not part:
            return b""
        data += part
    return data

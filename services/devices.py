"""Device numbers over the cluster, and claims of a node's devices by processes.

Invariants: devices are numbered node by node; two holders of one role never share a device.
"""

import ast
import fcntl
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Annotated, NamedTuple, TypeVar, cast

from pydantic import BeforeValidator

from offbeat.services.errors import MeshError

VISIBLE = "CUDA_VISIBLE_DEVICES"
MAX_DEVICES = 65_536
Numbers = TypeVar("Numbers", bound=Sequence[int])
EXAMPLES = "[0, 1] or `list(range(0, 2))`"


def parse_device_mapping(value: object) -> object:
    """Convert a list, or ROLL's expression of lists and ranges, to sorted device numbers.

    Raises:
        ValueError: another expression; negative or repeated numbers.
    """
    if isinstance(value, str):
        try:
            value = _evaluate(ast.parse(value.strip(), mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"not an expression of device numbers, such as {EXAMPLES}: {value!r}") from None
    if not isinstance(value, list | tuple):
        return value
    numbers = cast(Sequence[object], value)
    devices = [each for each in numbers if isinstance(each, int) and not isinstance(each, bool)]
    if len(devices) < len(numbers) or any(each < 0 for each in devices):
        raise ValueError(f"device numbers are integers from 0 on, such as {EXAMPLES}")
    if not devices:
        raise ValueError("names no device: leave it out, and devices are chosen")
    if twice := sorted({each for each in devices if devices.count(each) > 1}):
        raise ValueError(f"device {twice[0]} is named twice")
    return tuple(sorted(devices))


DeviceMapping = Annotated[
    tuple[int, ...], BeforeValidator(parse_device_mapping, json_schema_input_type=tuple[int, ...] | str)
]


def _evaluate(node: ast.expr) -> list[int]:
    """Evaluate integers in lists, `list(range(...))` and their sums."""
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_integer(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _limited([*_evaluate(left), *_evaluate(right)])
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            return _evaluate(inner)
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]) if 1 <= len(args) <= 3:
            return list(_limited(range(*(_integer(arg) for arg in args))))
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not a list of device numbers, such as {EXAMPLES}")


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_integer(operand)
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not an integer")


def _limited(numbers: Numbers) -> Numbers:
    if len(numbers) > MAX_DEVICES:
        raise ValueError(f"names {len(numbers):,} devices: at most {MAX_DEVICES:,}")
    return numbers


class EngineDevices(NamedTuple):
    node_id: str
    devices: tuple[int, ...]
    """Numbers on the node."""
    is_shared: bool = False
    """Whether the learner has one of them, too."""


class NoDeviceError(MeshError):
    """All slots of a node are claimed."""


class DeviceClaim:
    """Claim of a slot, released by the kernel when the process ends."""

    def __init__(self, slots: Sequence[EngineDevices], node_id: str, role: str, folder: Path | None = None) -> None:
        """Claim the first free slot on the node; raises `NoDeviceError`, also if another user can write to `folder`."""
        self._folder = folder or Path(tempfile.gettempdir()) / f"offbeat-devices-{os.getuid()}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        status = self._folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise NoDeviceError(f"{self._folder} is not a folder of this user alone (mode 0700): remove it")
        self._locks: list[IO[bytes]] = []
        here = [slot for slot in slots if slot.node_id == node_id]
        for slot in here:
            if self._lock([f"{node_id}-{role}-{device}" for device in slot.devices]):
                self.slot = slot
                return
        held = ", ".join(str(list(slot.devices)) for slot in here) or "none"
        raise NoDeviceError(f"no free device for the role {role} on this node; its slots are {held}")

    def _lock(self, names: Sequence[str]) -> bool:
        for name in names:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.fdopen(os.open(self._folder / name, flags, 0o600), "r+b")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                self.release()
                return False
            self._locks.append(file)
        return True

    def release(self) -> None:
        for file in self._locks:
            file.close()
        self._locks = []


def visible_devices(devices: Sequence[int], node_visible: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for devices of a node. node_visible: the node's own value."""
    names = [name.strip() for name in (node_visible or "").split(",") if name.strip()]
    return ",".join(names[device] if device < len(names) else str(device) for device in devices)


def parent_visible(pid: int | None = None) -> str | None:
    """Return CUDA_VISIBLE_DEVICES at a process's start (None: the parent, of a Ray worker its node)."""
    try:
        variables = Path(f"/proc/{os.getppid() if pid is None else pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    start = f"{VISIBLE}=".encode()
    return next((each[len(start) :].decode() for each in variables if each.startswith(start)), None)

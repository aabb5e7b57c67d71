"""podman or docker on this machine: an image, and the command of a container with a shell's limits."""

import errno
import functools
import json
import math
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.envs.sandbox.run import IsolationError
from offbeat.envs.sandbox.shell import TASK_IMAGE, ShellError, ShellLimits

ENGINES = ("podman", "docker")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAM_FOLDERS = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""In which `layer.check_layer` finds changes; the PATH of operations where the image is writable."""
FILE_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID")
"""Of a root whose image is writable: to change files of the image's other users."""
MAX_OPEN_FILES = 1024
MAX_NPROC = 4096
"""Of the user who is the container's root; `max_processes` limits the container."""
NOBODY = "65534:65534"
"""User of the first process, which the commands' root can't trace, as it has no capability to."""
FIRST_PROCESS = "trap '' HUP INT QUIT TERM; while :; do sleep 3600 & wait; done"
"""Reaps what commands leave. A namespace's first process gets their signals only where it has a handler, as dash for INT."""
OF_PODMAN = ("--read-only-tmpfs=false", "--http-proxy=false", "--image-volume=ignore")
REFUSED_CALLS = (
    *("unshare", "setns", "mount", "umount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen"),
    *("fsconfig", "fsmount", "fspick", "mount_setattr", "keyctl", "add_key", "request_key", "bpf", "userfaultfd"),
    *("ptrace", "process_vm_readv", "process_vm_writev"),
    *("socketcall", "io_uring_setup"),  # which make sockets of any family
)
AF_NETLINK, NETLINK_AUDIT, AF_VSOCK = 16, 9, 40
SOCKET_RULES = (
    ("SCMP_ACT_ALLOW", ((0, AF_NETLINK, "SCMP_CMP_LT"),)),
    ("SCMP_ACT_ALLOW", ((0, AF_VSOCK, "SCMP_CMP_LT"), (2, NETLINK_AUDIT, "SCMP_CMP_NE"))),
    ("SCMP_ACT_ERRNO", ((0, AF_VSOCK, "SCMP_CMP_GE"),)),
)
"""Of `socket`, in place of the profile's: network namespaces do not confine AF_VSOCK. Families above it are refused, too, as
the kernel reads 32 bits of an argument, and a rule of seccomp 64.
"""
NAMESPACE_FLAGS = 0x7E020000
"""Of `clone`."""
INSPECT_TIMEOUT_S = 60.0
MOUNTED = {"resolv.conf": "/etc/resolv.conf", "hosts": "/etc/hosts", "apt.conf": "/etc/apt/apt.conf.d/zz-offbeat"}
"""Read-only files of containers that a network can be connected to."""
SPARE_S = 300
"""After a container's time, for its supervisor to remove it, before podman ends it without one."""


class Image(NamedTuple):
    command: tuple[str, ...]
    """podman or docker, with options of all its commands."""
    name: str
    env: dict[str, str]
    volumes: tuple[str, ...]
    workdir: str = "/"
    user: str = ""


def find_image(limits: ShellLimits) -> Image:
    """Find the image, first in podman; raises IsolationError without podman and docker, or without the image."""
    assert limits.image is not None
    return _find(limits.image, limits.runtime)


def is_in_podman(name: str) -> bool:
    """Return whether podman has an image; raises IsolationError without podman."""
    if shutil.which("podman") is None:
        raise IsolationError(f"image {name}: podman is not on PATH, which writable images need")
    return run_engine("podman", "image", "inspect", name).returncode == 0


@functools.lru_cache(maxsize=4096)
def _find(name: str, runtime: str | None) -> Image:
    if name == TASK_IMAGE:
        raise IsolationError(f"image {name}: only tasks in Harbor's format have images of their own")
    found = [engine for engine in ENGINES if shutil.which(engine)]
    if not found:
        raise IsolationError(
            f"image {name}: neither podman nor docker is on PATH. Install one, or leave out `image` for the kernel sandbox"
        )
    errors: list[str] = []
    for engine in found:
        command = ("podman", *(("--runtime", runtime) if runtime else ())) if engine == "podman" else ("docker",)
        result = run_engine(*command, "image", "inspect", name)
        if not result.returncode:
            config: dict[str, Any] = json.loads(result.stdout)[0].get("Config") or {}
            env = dict(text.split("=", 1) for text in config.get("Env") or () if "=" in text)
            return Image(command, name, env, tuple(config.get("Volumes") or ()), *_start_of(config))
        errors.append(f"{engine}: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")
    how = (
        "and a run builds none" if name.startswith("localhost/") else f"and a run pulls none (`{found[0]} pull {name}`)"
    )
    raise IsolationError(f"image {name} is not on this machine, {how}: {'; '.join(errors)}")


def read_pid(image: Image, name: str) -> int:
    """Return the id of a container's first process; raises ShellError unless it runs."""
    result = run_engine(*image.command, "inspect", "--format", "{{.State.Pid}}", name)
    if not result.stdout.strip().isdigit() or int(result.stdout) == 0:
        raise ShellError(f"inspect: {(result.stderr.strip().splitlines() or ['the container does not run'])[-1]}")
    return int(result.stdout)


def _start_of(config: dict[str, Any]) -> tuple[str, str]:
    return config.get("WorkingDir") or "/", config.get("User") or ""


def run_command(
    image: Image,
    name: str,
    folders: Sequence[str],
    limits: ShellLimits,
    *,
    writable: bool = False,
    seccomp: str | None = None,
) -> list[str]:
    """Return the command that starts container `name`.

    folders: in memory; podman copies the image's files into them. writable: the image's files, too, in a layer of the
    container's own. seccomp: a file, in place of the default profile.
    """
    memory = f"{limits.memory_mib}m"
    options = ["--detach", "--name", name, "--pull", "never", "--network", "none", "--user", NOBODY]
    options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--log-driver", "none", "--no-healthcheck"]
    options += [f"--cap-add={name}" for name in FILE_CAPABILITIES] if writable else ["--read-only"]
    options += ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.max_processes)]
    limited = {"cpu": limits.cpu_s, "fsize": limits.file_mib << 20, "core": 0}
    limited |= {"nofile": _at_most(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)}
    limited |= {"nproc": _at_most(resource.RLIMIT_NPROC, MAX_NPROC)}
    for key, value in limited.items():
        options += ["--ulimit", f"{key}={value}:{value}"]
    for folder in folders:
        mode = "1777" if folder == "/tmp" else "755"
        options += ["--tmpfs", f"{folder}:rw,exec,nosuid,nodev,size={limits.disk_mib}m,mode={mode}"]
    for variable in image.env:
        options += ["--env", f"{variable}="]
    if limits.network != "none":  # which is connected later
        folder = Path(__file__).with_name("mounted")
        options += ["--hostname", "container"]  # as in `hosts`
        options += [word for name, path in MOUNTED.items() for word in ("--volume", f"{folder / name}:{path}:ro")]
    path = ":".join(PROGRAM_FOLDERS) if writable else SYSTEM_PATH
    options += ["--env", f"PATH={path}", "--stop-timeout", "0", "--workdir", "/", "--entrypoint", "/bin/sh"]
    if seccomp is not None:
        options += ["--security-opt", f"seccomp={seccomp}"]
    if image.command[0] == "podman":
        options += [*OF_PODMAN, "--timeout", str(math.ceil(limits.timeout_s) + SPARE_S)]
    elif limits.runtime:
        options += ["--runtime", limits.runtime]
    return [*image.command, "run", *options, image.name, "-c", FIRST_PROCESS]


@functools.cache
def seccomp_profile(command: tuple[str, ...]) -> str | None:
    """Return podman's profile without namespaces, mounts and AF_VSOCK, as docker's has none; None: the default."""
    if command[0] != "podman":
        return None
    result = run_engine(*command, "info", "--format", "{{.Host.Security.SECCOMPProfilePath}}")
    path = Path(result.stdout.strip())
    if not path.is_file():
        return None
    profile: dict[str, Any] = json.loads(path.read_text())
    for rule in profile["syscalls"]:
        rule["names"] = [name for name in rule["names"] if name not in ("clone", "clone3", "socket", *REFUSED_CALLS)]
    without_namespaces = {"index": 0, "value": NAMESPACE_FLAGS, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    profile["syscalls"] = [rule for rule in profile["syscalls"] if rule["names"]] + [
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [without_namespaces]},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
        {"names": list(REFUSED_CALLS), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM},
        *(_of_socket(action, arguments) for action, arguments in SOCKET_RULES),
    ]
    return json.dumps(profile)


def _of_socket(action: str, arguments: Sequence[tuple[int, int, str]]) -> dict[str, Any]:
    args = [{"index": index, "value": value, "valueTwo": 0, "op": op} for index, value, op in arguments]
    return {"names": ["socket"], "action": action, "args": args, "errnoRet": errno.EPERM}


def trusted_env(image: Image, folders: Sequence[str]) -> dict[str, str]:
    """Return the image's variables, less the entries of paths in writable folders, which the policy may fill."""
    kept: dict[str, str] = {}
    for name, value in image.env.items():
        entries = [entry for entry in value.split(":") if not _is_below(entry, folders)]
        if entries:
            kept[name] = ":".join(entries)
    return {"PATH": SYSTEM_PATH, **kept}


def run_engine(*command: str, folder: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run podman or docker; raises IsolationError if it does not answer. folder: its current one."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="surrogateescape",  # paths of a policy's
            check=False,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            timeout=INSPECT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise IsolationError(f"`{' '.join(command)}` did not answer within {INSPECT_TIMEOUT_S:g} s") from error


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _at_most(limit: int, value: int) -> int:
    hard = resource.getrlimit(limit)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)

"""Containers: what they refuse, attacks from within, and that none outlives its worker."""

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from offbeat.envs.sandbox import IsolationError
from offbeat.envs.sandbox.backend import check_sandbox
from offbeat.envs.sandbox.container import SUPERVISOR, ContainerShell
from offbeat.envs.sandbox.container_engine import Image, find_image, run_command, trusted_env
from offbeat.envs.sandbox.links import resolve
from offbeat.envs.sandbox.shell import ShellError, ShellLimits, UploadedFile
from tests.envs.sandbox.images import require_image
from tests.envs.sandbox.test_shell import bash
from tests.waiting import wait_until_sync

FOLDERS = ("/app", "/opt", "/tmp")


def limits(**values: object) -> ShellLimits:
    return ShellLimits.model_validate({"image": require_image(), **values})


def names() -> list[str]:
    require_image()
    command = ["podman", "ps", "--all", "--format", "{{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def shell() -> Iterator[ContainerShell]:
    shell = ContainerShell(FOLDERS, limits(memory_mib=256, disk_mib=8, file_mib=4, max_processes=16))
    yield shell
    shell.close()


def test_the_command_has_each_limit_and_no_network():
    image = Image(("docker",), "ubuntu:24.04", {"LD_PRELOAD": "x"}, ("/data",))
    values = ShellLimits(image=image.name, runtime="runsc", memory_mib=100, disk_mib=3, file_mib=2, cpu_s=7)
    words = run_command(image, "one", ("/app", "/tmp"), values)
    text = " ".join(words)
    for part in (
        *("--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges", "--pull never"),
        *("--memory 100m --memory-swap 100m", "--pids-limit 32", "cpu=7:7", "fsize=2097152:2097152", "--runtime runsc"),
        *("--tmpfs /app:rw,exec,nosuid,nodev,size=3m,mode=755", "--env LD_PRELOAD= ", "--entrypoint /bin/sh"),
    ):
        assert part in text
    assert words[words.index("ubuntu:24.04") + 1] == "-c"
    assert not any(word.startswith("--read-only-tmpfs") for word in words), "podman's alone"


@pytest.mark.parametrize("name", ["--privileged", "dir:/etc", "docker-archive:/x.tar", "", "a b", "../x", "oci:/x:y"])
def test_an_image_is_neither_an_option_nor_a_folder(name: str):
    with pytest.raises(ValidationError, match="image"):
        ShellLimits(image=name)


@pytest.mark.parametrize("name", ["ubuntu", "ubuntu:24.04", "localhost:5000/a/b:1", "ghcr.io/a/b@sha256:" + "0" * 64])
def test_names_of_images_are_accepted(name: str):
    assert ShellLimits(image=name).image == name


def test_a_key_of_the_other_backend_is_refused():
    with pytest.raises(ValidationError, match="runtime has no effect without image"):
        ShellLimits(runtime="runsc")
    with pytest.raises(ValidationError, match="isolation, max_files have no effect with image"):
        ShellLimits(image="ubuntu", max_files=20, isolation="warn")


def test_without_podman_and_docker_they_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(IsolationError, match="neither podman nor docker is on PATH"):
        find_image(ShellLimits(image=f"none-{uuid.uuid4().hex}"))


def test_an_engine_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "podman").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("offbeat.envs.sandbox.container_engine.INSPECT_TIMEOUT_S", 0.2)
    with pytest.raises(IsolationError, match=r"`podman image inspect none-.*` did not answer within 0\.2 s"):
        find_image(ShellLimits(image=f"none-{uuid.uuid4().hex}"))


def test_paths_that_a_command_could_fill_are_no_part_of_the_environment():
    env = {"PATH": "/opt/own:/usr/bin", "LD_PRELOAD": "/opt/own/x.so", "A": "b:c"}
    assert trusted_env(Image((), "", env, ()), FOLDERS) == {"PATH": "/usr/bin", "A": "b:c"}


def test_links_are_followed_as_the_kernel_does():
    links = {
        "/app/a": "../tests/x",
        "/app/b": "a",
        "/app/c": "/",
        "/app/d": "c/tests",
        "/app/l": "l",
        "/bin": "usr/bin",
    }
    assert [resolve(f"/app/{name}", links) for name in "abcd"] == ["/tests/x", "/tests/x", "/", "/tests"]
    assert resolve("/app/c/proc/self/cwd/x", links) == "/proc"
    assert resolve("/bin/ls", links) == "/usr/bin/ls"
    assert resolve("/app/l", links) == "/app"


def test_a_missing_image_is_named_with_what_to_do():
    require_image()
    with pytest.raises(IsolationError, match=r"image none:1 is not on this machine.*`podman pull none:1`"):
        check_sandbox(ShellLimits(image="none:1"))


def test_a_runtime_that_is_not_installed_is_named():
    with pytest.raises(IsolationError, match="runsc"):
        check_sandbox(limits(runtime="runsc"))


def test_an_image_without_the_programs_is_refused(tmp_path: Path):
    require_image()
    (tmp_path / "empty").mkdir()
    name = f"localhost/offbeat-empty:{uuid.uuid4().hex[:8]}"
    subprocess.run(["tar", "-C", tmp_path, "-cf", tmp_path / "x.tar", "empty"], check=True)
    subprocess.run(["podman", "import", tmp_path / "x.tar", name], check=True, capture_output=True)
    try:
        with pytest.raises(IsolationError, match=r"did not start.*/bin/sh"):
            check_sandbox(ShellLimits(image=name))
    finally:
        subprocess.run(["podman", "rmi", name], check=True, capture_output=True)


ATTACKS = {
    "the image's programs": "echo x > /usr/bin/ls",
    "a new file of the image": "touch /etc/x",
    "a mount": "mount -t tmpfs none /app",
    "a remount": "mount -o remount,rw /",
    "a device": "mknod /app/disk b 8 0",
    "a user namespace": "unshare -U true",
    "a mount namespace": "unshare -m true",
    "kernel settings": "echo 1 > /proc/sys/kernel/panic",
    "a request to the kernel": "echo b > /proc/sysrq-trigger",
    "cgroups": "mkdir /sys/fs/cgroup/x || mkdir /sys/fs/cgroup/memory/x",
    "another owner": "touch f && chmod 4755 f && chown 1 f",
    "a higher limit": "ulimit -f unlimited",
    "the first process": "cat /proc/1/environ",
    "a file above its limit": "head -c 5M /dev/zero > f",
    "files above the limit of a folder": "for i in 1 2 3; do head -c 3M /dev/zero > f$i || exit 1; done",
    "more memory": "x=$(head -c 400M /dev/zero | tr '\\0' a)",
    "more processes": "! (for i in $(seq 40); do sleep 1 & done) 2>&1 | grep fork",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_fails(shell: ContainerShell, attack: str):
    shell.kill_processes()
    shell.clear("/app")
    assert bash(shell, ATTACKS[attack]).exit_code != 0
    assert bash(shell, "echo alive").output == "alive\n"


def test_neither_worker_nor_machine_can_be_seen(shell: ContainerShell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OFFBEAT_SECRET", "x")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:password@proxy")
    seen = bash(shell, "cat /proc/*/environ | tr '\\0' '\\n'; ps -e; ls /proc; env").output
    assert "OFFBEAT_SECRET" not in seen
    assert "password" not in seen
    assert "python" not in seen
    assert bash(shell, "ls -A /sys/class/net").output.split() == ["lo"]
    assert bash(shell, "grep -E 'Cap(Prm|Eff|Bnd)' /proc/self/status | grep -v 0000000000000000").output == ""


def test_the_images_own_files_are_there_and_its_volumes_are_bounded(shell: ContainerShell):
    assert bash(shell, "ls /opt").output == "own\n"
    assert "No space left" in bash(shell, "for i in 1 2 3; do head -c 3M /dev/zero > /volume/$i; done").output


SOCKETS = """
print join " ", map { $! = 0; syscall($ARGV[0], $_, 1, 0); int($!) } (1, 2, 40, 41, (1 << 32) + 40);
"""
"""Prints an errno for each family."""
SOCKET = {"x86_64": 41, "aarch64": 198}


def test_sockets_that_no_network_namespace_confines_are_refused():
    """perl, as of each Debian, calls the kernel by number; those of the last family are read as AF_VSOCK by the kernel."""
    perl = shutil.which("perl")
    if perl is None or os.uname().machine not in SOCKET:
        pytest.skip("this test needs perl on x86-64 or ARM")
    files = {"perl": UploadedFile(Path(perl).read_bytes(), 0o755)}
    listed = subprocess.run(["ldd", perl], capture_output=True, text=True, check=True).stdout
    for library in re.findall(r"=> (/\S+) \(0x", listed):
        files[Path(library).name] = UploadedFile(Path(library).read_bytes(), 0o755)
    shell = ContainerShell(FOLDERS, limits())
    try:
        shell.upload("/app", files)
        command = f"LC_ALL=C LD_LIBRARY_PATH=/app ./perl -e '{SOCKETS}' {SOCKET[os.uname().machine]}"
        assert bash(shell, command).output.split() == ["0", "0", "1", "1", "1"]
    finally:
        shell.close()


def test_replaced_devices_are_noticed():
    shell = ContainerShell(FOLDERS, limits())
    try:
        shell.kill_processes()
        bash(shell, "mv /dev/full /dev/x; mv /dev/zero /dev/full; mv /dev/x /dev/zero")
        with pytest.raises(ShellError, match="replaced files of /dev"):
            shell.kill_processes()
    finally:
        shell.close()


def test_planted_programs_do_not_serve_the_shell(shell: ContainerShell):
    """The image's PATH names a folder that commands can write."""
    plant = "for name in tar find env rm; do printf '#!/bin/sh\\necho planted\\n' > $name; chmod +x $name; done"
    bash(shell, f"cd /opt/own; {plant}")
    assert bash(shell, "/opt/own/find").output == "planted\n"
    shell.clear("/app")
    assert bash(shell, "find /app").output == "/app\n"


def test_the_end_of_its_time_removes_the_container():
    shell = ContainerShell(FOLDERS, limits(timeout_s=2.0))
    with suppress(ShellError):  # its time may be over before the command begins
        bash(shell, "sleep 60", timeout_s=60)
    with pytest.raises(ShellError, match="run: "):
        bash(shell, "true")
    wait_until_sync(lambda: shell._name not in names())
    shell.close()


WORKER = """
import sys, uuid
from offbeat.envs.sandbox.container import ContainerShell
from offbeat.envs.sandbox.shell import ShellLimits
uuid.uuid4 = lambda: uuid.UUID(sys.argv[2])
shell = ContainerShell(("/app",), ShellLimits(image=sys.argv[1]))
print("started", flush=True)
shell.run(("bash", "-c", "setsid sleep 600 & sleep 600"), cwd="/app", env=shell.command_env(), timeout_s=600)
"""


def kill_with_children(worker: int) -> None:
    """Kill a worker as Ray kills an actor: with its children, but not theirs."""
    for child in psutil.Process(worker).children():
        child.kill()
    os.kill(worker, signal.SIGKILL)


def end_supervisor(name: str) -> None:
    """End a supervisor and its processes as `scancel` does."""
    [process] = [each for each in psutil.process_iter(["cmdline"]) if supervises(each.info["cmdline"] or (), name)]
    for each in (*process.children(recursive=True), process):
        with suppress(psutil.NoSuchProcess):
            each.terminate()


def supervises(command: Sequence[str], name: str) -> bool:
    return command[:3] == ["/bin/sh", "-c", SUPERVISOR] and name in command


@pytest.mark.parametrize(
    "moment", ["while it starts", "while a command runs", "with its children", "by its supervisor"]
)
def test_a_killed_worker_leaves_no_container(moment: str):
    name = f"offbeat-{(identity := uuid.uuid4().hex)}"
    command = [sys.executable, "-c", WORKER, require_image(), identity]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        wait_until_sync(lambda: name in names())
        if moment != "while it starts":
            assert worker.stdout is not None
            assert worker.stdout.readline() == "started\n"
        if moment == "with its children":
            kill_with_children(worker.pid)
        if moment == "by its supervisor":
            end_supervisor(name)
            wait_until_sync(lambda: name not in names())
    finally:
        worker.kill()
        worker.communicate()
    wait_until_sync(lambda: name not in names())

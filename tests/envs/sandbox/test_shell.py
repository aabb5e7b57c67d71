"""A shell's commands, its limits, and attacks on its verifier's paths and its first process, in both backends."""

import os
import resource
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from offbeat.envs.sandbox import platform_isolation
from offbeat.envs.sandbox.backend import AnyShell, open_shell
from offbeat.envs.sandbox.shell import (
    CommandResult,
    Shell,
    ShellError,
    ShellLimits,
    UploadedFile,
    check_shell,
)
from tests.envs.sandbox.images import require_image
from tests.waiting import wait_until_sync

FOLDERS = ("/app", "/tests", "/logs", "/srv", "/tmp")

needs_shell = pytest.mark.skipif(
    not {"namespaces", "mounts"} <= set(platform_isolation()), reason="this machine has no mounts in a user namespace"
)
BACKENDS = (
    pytest.param(False, marks=needs_shell, id="kernel"),
    pytest.param(True, id="image"),
)
backends = pytest.mark.parametrize("image", BACKENDS)


def limits_of(image: bool, **limits: float) -> ShellLimits:
    return ShellLimits.model_validate({**limits, **({"image": require_image()} if image else {})})


@pytest.fixture(scope="module", params=BACKENDS)
def of_module(request: pytest.FixtureRequest) -> Iterator[AnyShell]:
    shell = open_shell(FOLDERS, limits_of(request.param, max_output_chars=200))
    yield shell
    shell.close()


@pytest.fixture
def shell(of_module: AnyShell) -> AnyShell:
    of_module.kill_processes()
    of_module.clear(*FOLDERS)
    return of_module


def bash(shell: AnyShell, command: str, timeout_s: float = 20.0) -> CommandResult:
    return shell.run(("bash", "-c", command), cwd="/app", env=shell.command_env(), timeout_s=timeout_s)


def test_files_stay_between_commands_and_errors_are_reported(shell: AnyShell):
    assert bash(shell, "pwd; echo one > a; exit 3")[:3] == ("/app\n", 3, False)
    assert bash(shell, "cat a; ls /nowhere")[1] == 2
    assert bash(shell, "awk '{ print $1 }' a | sort | sed s/one/two/").output == "two\n"
    assert shell.read("/app/a") == b"one\n"
    assert shell.read("/app/b") is None


def test_uploads_have_modes_and_replace_links(shell: AnyShell):
    bash(shell, "ln -s /app/other /tests/run.sh")
    shell.upload("/tests", {"run.sh": UploadedFile(b"echo ran\n", 0o755), "empty": UploadedFile(None)})
    assert bash(shell, "/tests/run.sh; ls /app /tests").output == "ran\n/app:\n\n/tests:\nempty\nrun.sh\n"


def test_a_large_upload_arrives(shell: AnyShell):
    content = bytes(range(256)) * 12_000
    shell.upload("/app", {f"{number}.bin": UploadedFile(content) for number in range(3)})
    assert bash(shell, "stat -c %s *").output.split() == [str(len(content))] * 3


def test_a_slow_command_is_killed_with_its_children(shell: AnyShell):
    result = bash(shell, "sleep 600 & sleep 600", timeout_s=0.5)
    assert (result.exit_code, result.timed_out) == (-9, True)
    assert bash(shell, "echo alive").output == "alive\n"


def test_long_output_keeps_head_and_tail(shell: AnyShell):
    result = bash(shell, "echo first; yes | head -c 1000000; echo last")
    assert result.output.startswith("first\n")
    assert result.output.endswith("last\n")
    assert len(result.output) < 300
    assert "left out" in result.output


def test_a_background_process_lives_on_and_dies_on_request(shell: AnyShell):
    started = bash(shell, "(while true; do date > /app/beat; sleep 0.05; done) & echo started")
    assert (started.output, started.timed_out) == ("started\n", False)
    wait_until_sync(lambda: shell.read("/app/beat") is not None)
    shell.kill_processes()
    shell.clear("/app")
    assert bash(shell, "sleep 0.3; ls").output == ""


def test_the_first_process_ignores_its_commands_signals(shell: AnyShell):
    bash(shell, "for s in INT TERM KILL HUP USR1 CHLD STOP; do kill -$s 1; done")
    assert bash(shell, "echo alive").output == "alive\n"


@pytest.mark.parametrize("of_module", BACKENDS[:1], indirect=True)
def test_neither_worker_nor_machine_can_be_seen(shell: AnyShell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OFFBEAT_SECRET", "x")
    seen = bash(
        shell, "env; cat /etc/passwd; ls /proc /work; echo > /usr/bin/x; mount; exec 3<>/dev/tcp/127.0.0.1/22"
    ).output
    assert "OFFBEAT_SECRET" not in seen
    assert "root:" not in seen
    assert bash(shell, "ls -A /sandbox").output == "", "the folders have one path each"


def test_links_to_protected_folders_are_found_however_they_are_made(shell: AnyShell):
    bash(
        shell,
        "ln -s /tests/expected out; ln -s / up; ln -s ../tests near; mkdir d; ln -s ../out d/chain; ln -s d good; "
        "mkdir -p /srv/x; ln -s /logs/verifier/reward.txt /srv/x/r",
    )
    shell.unlink_to(FOLDERS, ("/tests", "/logs/verifier"))
    left = set(bash(shell, "find /app /srv -type l").output.split())
    assert left - {"/app/d/chain"} == {"/app/good"}, "a link to a removed link leads nowhere, and may stay"
    assert not bash(shell, "readlink -f d/chain").output.startswith("/tests")


def test_a_locked_deep_folder_is_cleared(shell: AnyShell):
    bash(shell, "mkdir -p a/b/c; touch a/b/c/f; ln -s /srv a/l; touch /srv/kept; chmod 000 a/b")
    shell.clear("/app")
    assert bash(shell, "ls -A; ls /srv").output == "kept\n"


def test_a_folder_that_can_be_traversed_alone_hides_no_link(shell: AnyShell):
    bash(shell, "mkdir d; ln -s /tests/expected d/out; chmod 111 d; mkdir 0; chmod 0 0")
    shell.unlink_to(FOLDERS, ("/tests",))
    assert bash(shell, "ls d").output == ""


@needs_shell
def test_disk_and_processes_are_limited():
    shell = Shell(FOLDERS, ShellLimits(disk_mib=2, max_files=100, max_processes=8))
    try:
        assert "No space left" in bash(shell, "head -c 8M /dev/zero > /tmp/big").output
        with pytest.raises(ShellError, match="No space left"):
            shell.upload("/tests", {"big": UploadedFile(b"x" * 4096 * 4)})
        forks = "(for i in 1 2 3 4 5 6 7 8 9; do sleep 9 & done) 2> said & until read -r line < said; do :; done"
        assert "fork" in bash(shell, f"rm /tmp/big; : > said; {forks}; echo $line").output
    finally:
        shell.close()


@backends
def test_a_shell_outlives_the_thread_that_started_it(image: bool):
    made: list[AnyShell] = []
    limits = limits_of(image)
    thread = threading.Thread(target=lambda: made.append(open_shell(FOLDERS, limits)))
    thread.start()
    thread.join()
    assert bash(made[0], "echo alive").output == "alive\n"
    made[0].close()


@backends
def test_a_worker_with_many_open_files_has_shells(image: bool):
    """`select.select` refuses descriptors above 1023."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2048:
        pytest.skip("this machine allows fewer than 2048 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        shell = open_shell(FOLDERS, limits_of(image))
        assert bash(shell, "echo alive").output == "alive\n"
        shell.close()
    finally:
        for fd in others:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def processes_of(shell: AnyShell) -> set[int]:
    """Return a shell's processes; a container's are no children of the worker."""
    if isinstance(shell, Shell):
        return {child.pid for child in psutil.Process().children(recursive=True)}
    each = psutil.process_iter(["cmdline"])
    return {process.pid for process in each if shell._name in " ".join(process.info["cmdline"] or ())}


@backends
def test_closing_leaves_no_process_and_ends_further_calls(image: bool):
    before = {child.pid for child in psutil.Process().children(recursive=True)}  # of other tests' shells
    shell = open_shell(FOLDERS, limits_of(image))
    bash(shell, "sleep 600 & setsid sleep 600 & echo")
    ours = processes_of(shell) - before
    assert ours
    shell.close()
    wait_until_sync(lambda: not any(psutil.pid_exists(pid) for pid in ours))
    with pytest.raises(ShellError, match="closed"):
        bash(shell, "true")


@needs_shell
def test_the_end_of_its_time_is_an_error_not_a_hang():
    shell = Shell(FOLDERS, ShellLimits(timeout_s=5.0))
    start = time.monotonic()
    with pytest.raises(ShellError, match="the shell ended"):
        bash(shell, "sleep 600", timeout_s=600)
    assert time.monotonic() - start < 60


@needs_shell
def test_a_kernel_without_mounts_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.envs.sandbox.shell.platform_isolation", lambda: ("namespaces", "landlock", "seccomp"))
    with pytest.raises(ValueError, match="a shell needs mounts in a user namespace"):
        check_shell(ShellLimits())

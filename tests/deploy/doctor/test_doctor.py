"""What `offbeat doctor` finds, and what it says to do."""

import socket
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from redis import Redis
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.deploy.doctor import libraries, machine, services
from offbeat.deploy.doctor.finding import InstallationFinding
from offbeat.deploy.doctor.installation import check_installation
from offbeat.deploy.doctor.libraries import check_versions
from offbeat.deploy.doctor.machine import check_machine
from offbeat.deploy.doctor.services import check_services

SUBJECTS = {
    *("python", "torch", "vllm", "redis-server", "C++ compiler", "sandbox", "CPU features", "CPUs", "memory"),
    *("shared memory", "open files", "disk", "GPUs"),
}


def found(subject: str, findings: list[InstallationFinding]) -> InstallationFinding:
    return next(finding for finding in findings if finding.subject == subject)


def test_this_installation_has_no_problem():
    findings = list(check_installation())
    assert [finding for finding in findings if finding.state == "problem"] == []
    assert {each.subject for each in findings} >= SUBJECTS
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0


def test_a_missing_library_is_a_problem_with_its_remedy(monkeypatch: pytest.MonkeyPatch):
    installed = libraries._installed
    monkeypatch.setattr(libraries, "_installed", lambda name: None if "vllm" in name else installed(name))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "problem vllm: not installed: pip install 'offbeat[cpu]'" in done.output


def test_a_torchvision_that_can_not_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(libraries, "find_mismatched", lambda: {"torchvision": "torchvision 1 needs torch 2"})
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "pip uninstall torchvision torchaudio torchcodec" in done.output


def test_a_version_that_a_library_does_not_take_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    installed = libraries._installed
    monkeypatch.setattr(libraries, "_installed", lambda name: "0.1" if name == "ray" else installed(name))
    assert InstallationFinding(
        "ray", "problem", "0.1 is installed, offbeat needs ray==2.60.0: pip install 'ray==2.60.0'"
    ) in list(check_versions())


@pytest.mark.parametrize(
    ("flags", "shown", "advice"),
    [
        ("fpu avx2 avx512f avx512_bf16", "AVX2, AVX-512, bfloat16 (AVX-512)", ""),
        ("fpu avx2 avx512f", "AVX2, AVX-512", "dtype: float32"),
        ("fpu avx2", "AVX2", "hf_infer"),
        ("fpu", "neither AVX2 nor AVX-512", "hf_infer"),
    ],
)
def test_lacking_cpu_features_come_with_a_way_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, shown: str, advice: str
):
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags\t\t: {flags}\nbugs:\n")
    finding = machine._check_cpu_features(tmp_path / "cpuinfo")
    assert finding.state == ("advice" if advice else "ok")
    assert finding.detail.startswith(shown)
    assert advice in finding.detail


def test_a_container_s_limits_are_those_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = f"anon {1 << 29}\ninactive_anon {1 << 29}\ninactive_file {1 << 29}\nactive_file 0\n"
    limits = {"CPU_QUOTA": "150000 100000", "MEMORY_LIMIT": str(2 << 30), "MEMORY_USED": str(1 << 30)}
    for name, text in {**limits, "MEMORY_STAT": cache}.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(machine, name, tmp_path / name)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(8))
    findings = list(check_machine())
    assert "8, of which this container may use 1.5" in found("CPUs", findings).detail
    assert "`ray start --num-cpus 1`" in found("CPUs", findings).detail
    assert found("memory", findings).detail.startswith("1.5 of 2.0 GiB available, the container's limit: ")


def test_little_shared_memory_and_few_open_files_name_the_remedy(monkeypatch: pytest.MonkeyPatch):
    usage = SimpleNamespace(free=64 << 20, used=97, total=100)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (1024, 4096))
    findings = list(check_machine())
    assert "--shm-size" in found("shared memory", findings).detail
    assert "`ulimit -n 4096`" in found("open files", findings).detail
    assert "--temp-dir" in found("disk", findings).detail


@pytest.mark.parametrize(
    ("gpus", "cuda", "driver", "state", "words"),
    [
        (0, None, None, "ok", "everything runs on the CPU"),
        (0, "12", None, "advice", "offbeat[cpu]"),
        (2, None, 580, "advice", "pip install 'offbeat[gpu]'"),
        (2, "13", 550, "problem", "install 580 or newer"),
        (2, "12", 550, "ok", "CUDA 12, driver 550"),
    ],
)
def test_gpus_are_compared_with_driver_and_installation(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cuda: str | None, driver: int | None, state: str, words: str
):
    monkeypatch.setattr(machine, "count_gpus", lambda: gpus)
    monkeypatch.setattr(machine, "_cuda_version", lambda: cuda)
    monkeypatch.setattr(machine, "_driver_version", lambda: driver)
    monkeypatch.setattr(machine, "is_installed", lambda _: True)
    finding = machine._check_gpus()
    assert (finding.state, words in finding.detail) == (state, True)


def test_a_redis_is_asked_for_what_runs_need(redis_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(services.REDIS_VARIABLE, redis_url)
    with Redis.from_url(redis_url) as redis:
        before = redis.config_get("maxmemory-policy")["maxmemory-policy"]  # type: ignore[index]
        durable = redis.info()["aof_enabled"]  # type: ignore[index]
        try:
            (sound,) = [each for each in check_services() if each.subject.startswith("Redis at")]
            assert sound.state == ("ok" if durable else "advice")
            redis.config_set("maxmemory-policy", "allkeys-lru")
            (evicting,) = [each for each in check_services() if each.subject.startswith("Redis at")]
            assert evicting.state == "problem"
            assert "set it to noeviction" in evicting.detail
        finally:
            redis.config_set("maxmemory-policy", before)


def test_a_redis_that_does_not_answer_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(services.REDIS_VARIABLE, "redis://:secret@127.0.0.1:1/0")
    (finding,) = [each for each in check_services() if each.subject.startswith("Redis at")]
    assert "does not answer" in finding.detail
    assert "secret" not in str(finding)


def answer_with(reply: bytes, listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            while connection.recv(65536):
                connection.sendall(reply)


@pytest.mark.parametrize("reply", ["NOAUTH Authentication required.", "WRONGPASS invalid username-password pair"])
def test_a_redis_that_refuses_the_password_is_a_problem(monkeypatch: pytest.MonkeyPatch, reply: str):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=answer_with, args=(f"-{reply}\r\n".encode(), listener), daemon=True).start()
        monkeypatch.setenv(services.REDIS_VARIABLE, f"redis://:secret@127.0.0.1:{listener.getsockname()[1]}/0")
        (finding,) = services._check_redis(Path())
        listener.shutdown(socket.SHUT_RDWR)
    assert finding.state == "problem"
    assert finding.detail.startswith("refuses the connection (")


@pytest.mark.parametrize("url", ["redis://localhost:port/0", "redis://:secret/x@host:6379/0", "http://localhost"])
def test_an_address_of_redis_that_is_none_is_a_problem(monkeypatch: pytest.MonkeyPatch, url: str):
    monkeypatch.setenv(services.REDIS_VARIABLE, url)
    (finding,) = services._check_redis(Path())
    assert (finding.subject, finding.state) == ("Redis", "problem")
    assert "secret" not in finding.detail


def test_a_file_without_the_address_of_redis_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "url"
    file.touch()
    monkeypatch.setenv(services.REDIS_VARIABLE, str(file))
    (finding,) = services._check_redis(tmp_path)
    assert finding.detail.startswith(f"its address can't be read: {file}: expected redis://HOST:PORT")


def test_a_running_cluster_needs_its_authentication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str):
    address = redis_url.removeprefix("redis://").partition("/")[0]
    (tmp_path / "cluster").write_text(address)
    monkeypatch.setattr(services, "CURRENT_CLUSTER", tmp_path / "cluster")
    monkeypatch.delenv(services.AUTH_VARIABLE, raising=False)
    assert "`export RAY_AUTH_MODE=token`" in found("Ray cluster", list(check_services())).detail
    monkeypatch.setenv(services.AUTH_VARIABLE, "token")
    assert found("Ray cluster", list(check_services())).state == "ok"

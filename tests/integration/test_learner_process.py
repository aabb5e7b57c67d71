"""The learner as a process over a real Redis: what it leaves when it ends, is killed, stopped or replaced."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from redis import Redis
from rich.console import Console

from offbeat.deploy.cli.audit import audit_run
from offbeat.deploy.config.errors import ConfigError
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.keys import RunKeys
from offbeat.services.metric_registry import find_metric
from offbeat.services.redis.lease import LearnerLease
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.services.redis.url import connection_problem
from offbeat.trainer.watchdog import EXIT_HUNG
from tests.integration.learner_run import ENVIRONMENT, Run, a_run
from tests.services.redis import tls_redis
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def secured(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Redis behind TLS and a password; of a plain one where nothing makes certificates."""
    if shutil.which("openssl") is None:
        yield redis_server
        return
    folder = tmp_path_factory.mktemp("secured")
    made = tls_redis.certificates(folder)
    serve = tls_redis.real_tls_redis if tls_redis.server_with_tls() else tls_redis.proxied_tls_redis
    with serve(folder, made) as port:
        url = f"rediss://:{tls_redis.QUOTED}@127.0.0.1:{port}/0?ssl_ca_certs={made.authority}"
        wait_until_sync(lambda: not connection_problem(url))
        yield url


@pytest.fixture(scope="module")
def undisturbed(secured: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """An undisturbed run."""
    with a_run(secured, tmp_path_factory.mktemp("undisturbed"), "undisturbed") as run:
        assert run.start().wait(timeout=240) == 0
        yield run


def test_a_run_trains_every_step_and_says_so(undisturbed: Run) -> None:
    counters = undisturbed.counters()
    assert (counters.admitted, counters.trained, counters.in_flight) == (12, 12, 0)
    assert undisturbed.published() == 6
    steps = [r for r in undisturbed.records() if r.source == "learner" and r.step is not None]
    assert [record.step for record in steps] == [1, 2, 3, 4, 5, 6]
    assert {"success", "reward", "staleness_max", "tokens_trained", "actor/mismatch_kl", "actor/grad_norm"} <= set(
        steps[-1].values
    )
    assert [name for r in undisturbed.records() for name in r.values if find_metric(r.source, name) is None] == []
    found = {(r.labels["when"], r.labels["sampling"], r.step) for r in undisturbed.records() if r.source == "eval"}
    assert found == {
        ("before", "sampled", 0),
        ("before", "greedy", 0),
        ("during", "sampled", 2),
        ("during", "sampled", 4),
        ("after", "sampled", 6),
        ("after", "greedy", 6),
    }
    assert undisturbed.phase() == "finished"


def test_a_run_is_audited_over_tls_without_storing_its_password(
    undisturbed: Run, secured: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = undisturbed.config.output_dir
    (folder / "config.yaml").write_text(undisturbed.config.model_dump_json())
    assert audit_run(str(folder), console=Console(width=200), redis_url=secured) == 0
    printed = capfd.readouterr().out
    assert "PROVEN" in printed
    assert "does not answer" not in printed
    wrong = secured.replace(tls_redis.QUOTED, "wrong")
    if wrong != secured:
        assert audit_run(str(folder), console=Console(width=200), redis_url=wrong) == 0
        assert "its Redis does not answer" in capfd.readouterr().out
    for path in (each for each in folder.rglob("*") if each.is_file()):
        assert tls_redis.PASSWORD.encode() not in (content := path.read_bytes()), path
        assert tls_redis.QUOTED.encode() not in content, path


def test_the_run_folder_holds_what_people_look_for(undisturbed: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = undisturbed.config.output_dir
    newest = folder / "checkpoints" / "step-000006"
    model = AutoModelForCausalLM.from_pretrained(newest)
    weights = undisturbed.weights(6)
    assert torch.equal(model.get_input_embeddings().weight, weights["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(newest)("Down")["input_ids"]
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert {"step-000004", "step-000006", "best"} <= kept
    assert (folder / "checkpoints" / "best").resolve().name in kept
    assert list((folder / "tensorboard").iterdir())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(undisturbed.records())
    assert (folder / "evaluations" / "after-sampled-6.jsonl").is_file()
    assert "training" in (folder / "logs" / "learner.log").read_text()


@pytest.mark.parametrize("version", [0, 3])
def test_a_killed_learners_successor_ends_with_the_same_weights(
    redis_server: str, tmp_path: Path, undisturbed: Run, version: int
) -> None:
    with a_run(redis_server, tmp_path, f"killed{version}") as run:
        victim = run.start()
        wait_until_sync(lambda: run.published() >= version, timeout_s=240)
        victim.kill()
        victim.wait()
        assert run.start().wait(timeout=240) == 0
        counters = run.counters()
        assert (counters.admitted, counters.trained, counters.in_flight) == (12, 12, 0)
        for name, tensor in undisturbed.weights(6).items():
            assert torch.equal(tensor, run.weights(6)[name]), name


def test_sigterm_leaves_a_checkpoint_and_a_later_learner_continues(
    redis_server: str, tmp_path: Path, undisturbed: Run
) -> None:
    with a_run(redis_server, tmp_path, "stopped", ["save_steps=100"]) as run:
        first = run.start()
        wait_until_sync(lambda: run.published() >= 2, timeout_s=240)
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=120) == 0
        assert not run.redis.exists(run.keys.lease)
        state = json.loads(
            next((run.config.output_dir / "checkpoints").glob("step-00000[2-6]/learner.json")).read_text()
        )
        assert run.counters().trained == 2 * state["step"]
        assert run.start().wait(timeout=240) == 0
        assert run.counters().trained == 12
        for name, tensor in undisturbed.weights(6).items():
            assert torch.equal(tensor, run.weights(6)[name]), name


def test_sigterm_during_the_warm_start_ends_it(redis_server: str, tmp_path: Path) -> None:
    with a_run(redis_server, tmp_path, "early", ["warm_start.steps=100000"]) as run:
        learner = run.start()
        wait_until_sync(lambda: run.phase().startswith("warming up 1"), timeout_s=240)
        learner.send_signal(signal.SIGTERM)
        assert learner.wait(timeout=120) == 0
        assert run.published() == -1


def test_a_learner_that_lost_its_lease_stops_with_its_own_code(redis_server: str, tmp_path: Path) -> None:
    with a_run(redis_server, tmp_path, "fenced", ["max_steps=100000"]) as run:
        learner = run.start()
        wait_until_sync(lambda: run.published() >= 1, timeout_s=240)
        learner.send_signal(signal.SIGSTOP)
        with LearnerLease(run.redis, run.config.exp_name, "successor", 10.0) as lease:
            lease.acquire(wait_s=60.0)
            learner.send_signal(signal.SIGCONT)
            assert learner.wait(timeout=120) == 3
        assert "offbeat learner: run fenced: " in run.complaint()


def test_a_hung_learner_exits_and_its_successor_trains_all(
    redis_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is renewed all the while: no other check would notice."""
    monkeypatch.setitem(ENVIRONMENT, "HANGS_ONCE", str(tmp_path / "hung"))
    hangs = ("zero_variance=mask", "group_filter_cls=tests.integration.hanging_filter:HangsOnce", "eval_steps=0")
    with a_run(redis_server, tmp_path, "hangs", (*hangs, "actor_train.backend_timeout=0.25", "max_steps=3")) as run:
        assert run.start().wait(timeout=240) == EXIT_HUNG
        assert "hanging_filter.py" in (run.config.output_dir / "logs" / "learner.log").read_text(), "it names the file"
        assert run.counters().trained < 6
        assert run.start().wait(timeout=240) == 0, run.complaint()
        assert run.counters().trained == 6


def log_of(run: Run) -> str:
    return (run.config.output_dir / "logs" / "learner.log").read_text()


@contextmanager
def without_memory(run: Run) -> Iterator[None]:
    """The run's Redis refuses writes."""
    run.redis.config_set("maxmemory", "1")
    try:
        yield
    finally:
        run.redis.config_set("maxmemory", "0")


def test_a_learner_waits_for_a_read_only_redis_and_trains_once(
    redis_server: str, tmp_path: Path, undisturbed: Run
) -> None:
    """For longer than its patience, than its lease, and than its main thread may come no further."""
    hung_s = 15.0
    with a_run(redis_server, tmp_path, "refused", [f"actor_train.backend_timeout={hung_s / 60}"]) as run:
        learner = run.start(patience_s=0.5)
        wait_until_sync(lambda: run.published() >= 2, timeout_s=240)
        with without_memory(run):
            wait_until_sync(lambda: "Redis refuses writes: OOM" in log_of(run))
            began = time.monotonic()
            wait_until_sync(lambda: time.monotonic() > began + 1.5 * hung_s)
            assert not run.redis.exists(run.keys.lease)
            assert learner.poll() is None, run.complaint()
            assert run.published() < 6
        assert learner.wait(timeout=240) == 0, run.complaint()
        counters = run.counters()
        assert (counters.admitted, counters.trained, counters.in_flight) == (12, 12, 0)
        steps = [r.step for r in run.records() if r.source == "learner" and r.step is not None]
        assert steps == [1, 2, 3, 4, 5, 6], "nothing was repeated"
        assert run.redis.get(run.keys.epoch) == b"1"
        for name, tensor in undisturbed.weights(6).items():
            assert torch.equal(tensor, run.weights(6)[name]), name


def test_a_learner_that_waits_for_redis_ends_at_a_signal_and_says_why(redis_server: str, tmp_path: Path) -> None:
    with a_run(redis_server, tmp_path, "refused-stop", ["save_steps=1"]) as run:
        learner = run.start(patience_s=0.5)
        wait_until_sync(lambda: run.published() >= 2, timeout_s=240)
        with without_memory(run):
            wait_until_sync(lambda: "Redis refuses writes: OOM" in log_of(run))
            learner.send_signal(signal.SIGTERM)
            assert learner.wait(timeout=240) == 1
        assert "offbeat learner: run refused-stop: Redis refuses writes: OOM" in run.complaint()
        assert run.start().wait(timeout=240) == 0, run.complaint()
        assert run.counters().trained == 12


def test_a_learner_waits_for_a_redis_that_is_gone(tmp_path: Path) -> None:
    with (
        EmbeddedRedis(tmp_path / "redis", RedisConfig()) as server,
        a_run(server.url, tmp_path, "redis-gone") as run,
    ):
        learner = run.start(patience_s=0.5)
        wait_until_sync(lambda: run.published() >= 2, timeout_s=240)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_until_sync(lambda: "Redis does not answer: " in log_of(run))
        assert learner.poll() is None, run.complaint()
        server.restart()
        assert learner.wait(timeout=240) == 0, run.complaint()
        assert run.counters().trained == 12
        assert run.redis.get(run.keys.epoch) == b"1"


def test_a_checkpoint_that_can_not_be_used_is_refused_with_one_line(redis_server: str, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    overrides = [f"resume_from_checkpoint={nothing}"]
    with pytest.raises(ConfigError, match="not a complete checkpoint"), a_run(redis_server, tmp_path, "no", overrides):
        pass


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({}, b"there is no run"),
        ({"config": '{"seed": -1}'}, b"seed"),
    ],
)
def test_a_run_that_can_not_be_read_is_refused_with_one_line(
    redis_server: str, record: dict[str, str], complaint: bytes
) -> None:
    with Redis.from_url(redis_server) as redis:
        redis.delete(RunKeys("broken").record)
        if record:
            redis.hset(RunKeys("broken").record, mapping=cast(dict[Any, Any], record))
        command = [sys.executable, "-m", "offbeat.trainer.cli", "broken", "--redis", redis_server]
        ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False, timeout=240)
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if line.startswith(b"offbeat learner: ")]
    assert len(lines) == 1
    assert complaint in lines[0]


def test_a_value_head_trains_on_two_ranks_and_is_not_published(redis_server: str, tmp_path: Path) -> None:
    head = ("adv_estimator=gae", "reward_normalization.method=identity", "critic.backbone=policy", "critic_warmup=2")
    several = ("actor_train.num_processes=2", "actor_train.strategy_args.zero_stage=2")
    with a_run(redis_server, tmp_path, "value-head", (*head, *several, "max_steps=4")) as run:
        assert run.start().wait(timeout=240) == 0, run.complaint()
        steps = [r.values for r in run.records() if r.source == "learner" and r.step is not None]
        assert all("critic/loss" in values for values in steps)
        assert ["actor/pg_loss" in values for values in steps] == [False, False, True, True]
        start, trained = run.weights(2), run.weights(4)
        assert not [name for name in trained if "value_head" in name]
        assert any(not torch.equal(tensor, start[name]) for name, tensor in trained.items())
        assert run.published() == 4

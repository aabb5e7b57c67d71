import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.child_process import MAX_PRINTED_BYTES
from offbeat.services.rollout.envs.process_env import ProcessEnv
from offbeat.services.rollout.envs.runners import (
    EnvRunner,
    EnvSpec,
    InlineEnv,
    StepResult,
    ThreadEnv,
)
from offbeat.services.threads import DaemonThreads, HungError
from tests.fakes_rollout import HERE, CountingEnv
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow


def spec(env: str, *, timeout_s: float = PATIENCE_S, **config: Any) -> EnvSpec:
    return EnvSpec(env if env == "frozen_lake" else HERE + env, config, PATIENCE_S, timeout_s)


@contextlib.asynccontextmanager
async def running(kind: str, env: EnvSpec) -> AsyncIterator[EnvRunner]:
    threads = DaemonThreads(2)
    runner: EnvRunner = (
        {"inline": InlineEnv, "process": ProcessEnv}[kind](env) if kind != "thread" else ThreadEnv(env, threads)
    )
    try:
        yield runner
    finally:
        await runner.close()
        threads.close()


KINDS = ("inline", "thread", "process")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it is reaped between opening and reading
        return False


@pytest.mark.parametrize("kind", KINDS)
async def test_the_same_seed_gives_the_same_episode_in_every_runner(kind: str):
    expected = InlineEnv(spec("frozen_lake", is_slippery=True))
    await expected.start()
    async with running(kind, spec("frozen_lake", is_slippery=True)) as runner:
        traits = await runner.start()
        assert traits.system_prompt == "Walk P to G . Avoid O ."
        for seed in (5, 6, 5):
            assert await runner.reset(seed) == await expected.reset(seed)
            for answer in ("Right", "Down", "?", "Left"):
                assert await runner.step(answer) == await expected.step(answer)
        assert runner.healthy


@pytest.mark.parametrize("kind", KINDS)
async def test_a_step_returns_plain_values(kind: str):
    async with running(kind, spec("CountingEnv", length=1)) as runner:
        traits = await runner.start()
        assert traits.metrics_agg_mode["total"] == "sum"
        assert (await runner.reset(0)).observation.startswith("P ")
        metrics = {"total": 1.0, "first_step": 1.0, "highest": 1.0, "action_is_valid": 1.0, "success": 1.0}
        assert await runner.step("x") == StepResult("_ 1", 0.5, True, False, metrics)


class Undescribed(CountingEnv):
    system_prompt = None  # type: ignore[assignment]


async def test_an_env_whose_system_prompt_is_none_has_none():
    runner = InlineEnv(EnvSpec(f"{__name__}:Undescribed", {}, 20.0, 20.0))
    assert (await runner.start()).system_prompt == ""


async def play_two_steps(runner: EnvRunner) -> None:
    await runner.start()
    await runner.reset(0)
    await runner.step("a")
    await runner.step("b")


RAISING = [
    ("make", "raise", "make_error"),
    ("reset", "raise", "reset_error"),
    ("step", "raise", "step_error"),
    ("step", "stop_iteration", "step_error"),
    ("step", "exit", "step_error"),
    ("step", "nan", "step_error"),
    ("step", "no_text", "step_error"),
    ("step", "no_utf8", "step_error"),
]


@pytest.mark.parametrize(
    ("kind", "when", "how", "reason"),
    [(kind, *case) for kind in ("inline", "thread") for case in RAISING]
    + [("process", *RAISING[0]), ("process", *RAISING[4]), ("process", *RAISING[-1])],
)
async def test_whatever_an_env_raises_is_an_episodes_failure(kind: str, when: str, how: str, reason: str):
    async with running(kind, spec("BadEnv", how=how, when=when)) as runner:
        with pytest.raises(EpisodeError) as failed:
            await play_two_steps(runner)
        assert failed.value.reason == reason
        assert not runner.healthy


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("when", ["reset", "step"])
async def test_a_hung_env_is_given_up_in_time(kind: str, when: str, tmp_path: Path):
    env = EnvSpec(HERE + "BadEnv", {"how": "hang", "when": when, "marker": str(tmp_path / "m")}, PATIENCE_S, PATIENCE_S)
    async with running(kind, env) as runner:
        await runner.start()
        if when == "step":
            await runner.reset(0)
            await runner.step("a")
        runner._spec = EnvSpec(env.env_type, env.env_config, 0.3, 0.3)
        with pytest.raises(EpisodeError) as failed:
            await (runner.reset(0) if when == "reset" else runner.step("b"))
        assert failed.value.reason == f"{when}_timeout"
        assert not runner.healthy


async def test_a_hung_process_is_killed_with_its_children(tmp_path: Path):
    marker = tmp_path / "m"
    async with running("process", spec("BadEnv", timeout_s=3.0, how="hang_with_child", marker=str(marker))) as runner:
        assert isinstance(runner, ProcessEnv)
        await runner.start()
        await runner.reset(0)
        await runner.step("a")
        pid = runner.pid
        assert pid is not None
        with pytest.raises(EpisodeError):
            await runner.step("b")
        grandchild = int(marker.read_text())
        await wait_until(lambda: not alive(pid) and not alive(grandchild))


async def test_a_daemon_that_holds_the_pipes_of_a_failed_process_delays_nobody(tmp_path: Path):
    """It is in a session of its own, so it is not killed."""
    marker = tmp_path / "m"
    async with running("process", spec("BadEnv", how="leave_daemon", when="reset", marker=str(marker))) as runner:
        await runner.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(EpisodeError, match="reset_error"):
                    await runner.reset(0)
        finally:
            os.kill(int(marker.read_text()), signal.SIGKILL)


async def test_output_is_forwarded_again_after_a_while(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("offbeat.services.rollout.child_process.PRINT_INTERVAL_S", 0.0)
    (tmp_path / "flood").touch()
    printed = 0

    def is_over_a_megabyte() -> bool:
        nonlocal printed
        printed += len(capfd.readouterr().err)
        return printed > MAX_PRINTED_BYTES

    async with running("process", on_order(tmp_path)) as runner:
        await runner.start()
        await runner.reset(0)
        step = asyncio.create_task(runner.step("Right"))
        await wait_until(is_over_a_megabyte)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step


async def test_a_process_that_dies_is_a_crash_with_its_exit_status(tmp_path: Path):
    async with running("process", spec("BadEnv", how="crash", marker=str(tmp_path / "m"))) as runner:
        await runner.start()
        await runner.reset(0)
        await runner.step("a")
        with pytest.raises(EpisodeError, match="exit status 7") as failed:
            await runner.step("b")
        assert failed.value.reason == "env_crashed"


async def test_an_envs_output_does_not_reach_the_protocol(tmp_path: Path):
    async with running("process", spec("BadEnv", how="print", marker=str(tmp_path / "m"))) as runner:
        await runner.start()
        await runner.reset(0)
        assert [(await runner.step("a")).observation for _ in range(3)] == ["_ 1", "_ 2", "_ 3"]
        assert (tmp_path / "m").exists()


def on_order(orders: Path, **limits: float) -> EnvSpec:
    env, config = "offbeat.benchmarks.chaos.faulty_env:FaultyLakeEnv", {"orders": str(orders)}
    return EnvSpec(env, config, PATIENCE_S, limits.pop("timeout_s", PATIENCE_S), **limits)


async def test_an_out_of_memory_process_fails_only_its_episode(tmp_path: Path):
    (tmp_path / "hog").touch()
    async with running("process", on_order(tmp_path, memory_gib=0.5)) as runner:
        await runner.start()
        await runner.reset(0)
        with pytest.raises(EpisodeError, match="MemoryError") as failed:
            await runner.step("Right")
        assert failed.value.reason == "step_error"


async def test_endless_output_of_an_env_is_forwarded_up_to_a_megabyte(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "flood").touch()
    async with running("process", on_order(tmp_path, timeout_s=5.0)) as runner:
        await runner.start()
        await runner.reset(0)
        turns = 0
        step = asyncio.create_task(runner.step("Right"))
        while not step.done():  # the worker's loop continues beside it
            turns += 1
            await asyncio.sleep(0.01)
        with pytest.raises(EpisodeError) as failed:
            await step
        assert failed.value.reason == "step_timeout"
    printed = len(capfd.readouterr().err)
    assert MAX_PRINTED_BYTES / 2 < printed <= MAX_PRINTED_BYTES
    assert turns > 5


@pytest.mark.parametrize("during", ["step", "open step", "idle"])
async def test_a_cancelled_or_closed_process_env_leaves_no_process(tmp_path: Path, during: str):
    runner = ProcessEnv(spec("WaitingEnv", wait_s=0.0, gate=str(tmp_path / "gate")))
    await runner.start()
    await runner.reset(0)
    pid = runner.pid
    assert pid is not None
    step = None
    if during != "idle":
        step = asyncio.create_task(runner.step("a"))
        await wait_until((tmp_path / "gate.waits").exists)
    if step and during == "step":
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
    await runner.close()
    assert not alive(pid)
    if step and during == "open step":
        with pytest.raises(EpisodeError):
            await step


async def test_env_processes_die_with_their_worker():
    program = (
        "import asyncio, sys\n"
        "from offbeat.services.rollout.envs.runners import EnvSpec\n"
        "from offbeat.services.rollout.envs.process_env import ProcessEnv\n"
        "async def main():\n"
        "    env = ProcessEnv(EnvSpec('frozen_lake', {}, 60, 60))\n"
        "    await env.start()\n"
        "    print(env.pid, flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    pid = int(await worker.stdout.readline())
    assert alive(pid)
    os.kill(worker.pid, signal.SIGKILL)
    await worker.wait()
    await wait_until(lambda: not alive(pid))


async def test_a_thread_that_hangs_is_replaced_and_counted_until_it_returns(tmp_path: Path):
    gate, closed, threads = tmp_path / "gate", tmp_path / "gate.closed", DaemonThreads(1)
    runner = ThreadEnv(spec("WaitingEnv", wait_s=0.0, gate=str(gate), timeout_s=2.0), threads)
    await runner.start()
    await runner.reset(0)
    with pytest.raises(EpisodeError):
        await runner.step("a")
    assert threads.num_hung == 1
    assert await threads.run(lambda: 5, 10.0) == 5
    await runner.close()
    assert not closed.exists()
    gate.touch()
    await wait_until(lambda: threads.num_hung == 0)
    await wait_until(closed.exists)
    threads.close()


async def test_a_cancelled_call_holds_its_thread_then_closes_the_env(tmp_path: Path):
    gate, closed, threads = tmp_path / "gate", tmp_path / "gate.closed", DaemonThreads(1)
    runner = ThreadEnv(spec("WaitingEnv", wait_s=0.0, gate=str(gate)), threads)
    await runner.start()
    await runner.reset(0)
    step = asyncio.create_task(runner.step("a"))
    await wait_until((tmp_path / "gate.waits").exists)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await runner.close()
    other = asyncio.create_task(threads.run(lambda: 5, 10.0))
    done, _ = await asyncio.wait([other], timeout=0.02)
    assert not done
    gate.touch()
    assert await other == 5
    assert closed.exists()
    assert threads.num_hung == 0
    threads.close()


async def test_calls_in_threads_run_side_by_side_up_to_their_number():
    threads, running_now, max_running = DaemonThreads(3), 0, 0
    lock, together = threading.Lock(), threading.Barrier(3)

    def call() -> None:
        nonlocal running_now, max_running
        with lock:
            running_now += 1
            max_running = max(max_running, running_now)
        together.wait(PATIENCE_S)
        with lock:
            running_now -= 1

    await asyncio.gather(*(threads.run(call, PATIENCE_S) for _ in range(9)))
    assert max_running == 3
    threads.close()


async def test_the_time_limit_counts_from_when_a_thread_is_free():
    threads, gates = DaemonThreads(1), [threading.Event(), threading.Event()]
    first = asyncio.create_task(threads.run(gates[0].wait, PATIENCE_S))
    second = asyncio.create_task(threads.run(lambda: 5, 1.5))
    done, _ = await asyncio.wait([first, second], timeout=2.0)
    assert not done
    gates[0].set()
    assert await asyncio.gather(first, second) == [True, 5]
    with pytest.raises(HungError):
        await threads.run(gates[1].wait, 0.05)
    gates[1].set()
    await wait_until(lambda: threads.num_hung == 0)
    threads.close()

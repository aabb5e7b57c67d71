"""`offbeat bench turn`: CPU and wall time of a turn by part, in the mesh and on three floors, in turn.

The mesh is a real env worker on FrozenLake, its buffer, Ray Serve and a replica; nothing is trained. A part within a
process is timed on its thread; `rest` of a process is what its parts leave. `hf_infer` computes in the replica.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from offbeat.benchmarks.generation import SHARE_OF_GPU, publish_start, running_service
from offbeat.benchmarks.harness.environment import TAG, BenchEnvironment, bench_environment, manager
from offbeat.benchmarks.harness.process_actor import ProcessActor
from offbeat.benchmarks.harness.result import Spread, console
from offbeat.benchmarks.harness.rollout_process import PolicySpec, RolloutProcess
from offbeat.benchmarks.turn.cpu import MESH, cpu_by_part, cpu_s, family
from offbeat.benchmarks.turn.engine_parts import ENGINE_PARTS, EXTENSION, FILE
from offbeat.benchmarks.turn.floors import GROUP_SIZE, BareTurns, EnvAlone, EpisodeShape, ForwardAlone
from offbeat.benchmarks.turn.part_times import PartTime, PartTimes
from offbeat.benchmarks.turn.smollm2 import make_smollm2
from offbeat.benchmarks.turn.table import show_turns
from offbeat.benchmarks.turn.worker_parts import TURN, WORKER_PARTS
from offbeat.deploy.config.run import RunConfig
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.generation.config import Dtype, EngineModelArgs, EngineStrategy, GenerationConfig
from offbeat.services.messages.types import Trajectory
from offbeat.services.rollout.config import CustomEnv, RolloutConfig

EngineName = Literal["vllm", "hf_infer"]
ANSWER_TOKENS = 2
"""A word and the end, as a trained policy answers."""
UNREACHED_STEPS = 10**6


@dataclass(frozen=True, slots=True)
class TurnOptions:
    model: Path | None = None
    """Hugging Face folder; None: the tiny policy."""
    smollm2: bool = False
    """Random weights of SmolLM2-135M's shape, instead of `model`."""
    dtype: Dtype = "float32"
    concurrency: tuple[int, ...] = (1, 16, 192, 1024)
    """Episodes at a time."""
    window_s: float = 5.0
    """Of a side in a round."""
    idle_s: float = 5.0
    """Time without episodes, in which the idle processes' CPU time is measured."""
    rounds: int = 3
    coalesce_s: float = 0.0
    sessions: bool = True
    """`actor_infer.keep_sessions`."""
    engine: EngineName = "vllm"
    """Of the mesh; the floor is vLLM's with either."""
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True, slots=True)
class Side:
    """A round of one side; times are ms a turn."""

    turns_per_s: float
    cpu_ms: dict[str, float]
    """By process."""
    parts: dict[str, PartTime]
    """Calls, CPU and wall time a turn; of the mesh and the bare engine."""


def run(options: TurnOptions) -> dict[str, Any]:
    with console().status("starting") as status, bench_environment() as base, ExitStack() as stack:
        mesh, floors = _start(options, base, stack)
        idle = mesh.measure_idle(options.idle_s)
        rounds: dict[int, list[dict[str, Side]]] = {count: [] for count in options.concurrency}
        for number in range(options.rounds):
            for count in options.concurrency:
                status.update(f"round {number + 1} of {options.rounds}: {count} episodes at a time")
                side, shape = mesh.play(count, options.window_s)
                sides = {name: floor.play(shape, count, options.window_s) for name, floor in floors.items()}
                rounds[count].append({"mesh": side, **sides})
    result = {"idle_cpu_ms_per_s": idle, "levels": [_level(count, sides) for count, sides in rounds.items()]}
    show_turns(result)
    return result


def _start(options: TurnOptions, base: BenchEnvironment, stack: ExitStack) -> tuple["Mesh", dict[str, "Floor"]]:
    model = make_smollm2(base) if options.smollm2 else options.model
    config, floor = _run_config(base, options, model)
    model = model or config.output_dir / "policy"
    publish_start(base, config, model)
    files = {name: base.folder / f"{name}.parts" for name in ("bare", "engine", "worker")}
    bare = BareTurns(floor, model, config.sequence_length, {FILE: str(files["bare"])})
    floors: dict[str, Any] = {
        "bare": bare,
        "forward": ForwardAlone(model, options.dtype, options.device, 1),
        "env": EnvAlone(),
    }
    actors = {name: stack.enter_context(ProcessActor(it, base.folder / f"{name}.log")) for name, it in floors.items()}
    address = stack.enter_context(running_service(base, config, model, {FILE: str(files["engine"])}))
    policy = PolicySpec("service", ray_address=address, parts=files["worker"])
    rollouts = stack.enter_context(RolloutProcess(policy, model, sequence_length=config.sequence_length))
    engine_times = {name: PartTimes(files[name], ENGINE_PARTS) for name in ("bare", "engine")}
    mesh = Mesh(base, config, rollouts, engine_times["engine"], PartTimes(files["worker"], WORKER_PARTS), actors)
    return mesh, {name: Floor(each, engine_times.get(name)) for name, each in actors.items()}


def _run_config(base: BenchEnvironment, options: TurnOptions, model: Path | None) -> tuple[RunConfig, GenerationConfig]:
    """Return the mesh's configuration and that of the bare engine."""
    lake = CustomEnv(env_type="frozen_lake", max_steps=12, max_tokens_per_step=ANSWER_TOKENS, execution="inline")
    most = max(options.concurrency)
    first = base.run_config(
        "bench-turn",
        custom_envs={TAG: lake},
        train_env_manager=manager(-(-most // GROUP_SIZE) + 1, GROUP_SIZE),
        rollout=RolloutConfig(max_env_num_per_worker=most, coalesce_s=options.coalesce_s),
        max_staleness=1e6,
        max_steps=UNREACHED_STEPS,
        **({} if model is None else {"pretrain": str(model.resolve())}),
    )
    timed = first.actor_infer.engine.model_copy(
        update={"worker_extension_cls": EXTENSION, "gpu_memory_utilization": SHARE_OF_GPU}
    )
    common = {
        "device": options.device,
        "model_args": EngineModelArgs(dtype=options.dtype),
        "keep_sessions": options.sessions,
    }
    floor = first.actor_infer.model_copy(
        update={**common, "strategy_args": EngineStrategy.model_construct(strategy_name="vllm", strategy_config=timed)}
    )
    mesh = floor
    if options.engine == "hf_infer":
        strategy = EngineStrategy(strategy_name="hf_infer", strategy_config=first.actor_infer.engine)
        mesh = floor.model_copy(update={"strategy_args": strategy})
    config = first.model_copy(update={"actor_infer": mesh})
    base.prepare(config)
    return config, floor


class Mesh:
    def __init__(
        self,
        base: BenchEnvironment,
        config: RunConfig,
        rollouts: RolloutProcess,
        engine: PartTimes,
        worker: PartTimes,
        floors: dict[str, ProcessActor],
    ) -> None:
        self._base = base
        self._config = config
        self._rollouts = rollouts
        self._engine = engine
        self._worker = worker
        self._floors = [each.pid for each in floors.values()]
        self._buffer = RedisLearnerBuffer(base.redis, config.exp_name, 1)

    def measure_idle(self, seconds: float) -> dict[str, float]:
        """Return ms of CPU a second, by part, while nothing is played."""
        before = self._cpu()
        time.sleep(seconds)
        after = self._cpu()
        return {part: 1e3 * (after[part] - before[part]) / seconds for part in MESH}

    def play(self, count: int, seconds: float) -> tuple[Side, EpisodeShape]:
        """Play for `seconds` after a group has ended."""
        settings = self._base.worker_settings(self._config)
        rollout = settings.rollout.model_copy(update={"max_env_num_per_worker": count})
        self._rollouts.start_run(settings.model_copy(update={"rollout": rollout}))
        shape = EpisodeShape.of(self._take_group())
        cpu, parts, began = self._cpu(), self._parts(), time.monotonic()
        while time.monotonic() < began + seconds:
            self._take_group(wait=False)
        wall_s, after = time.monotonic() - began, self._cpu()
        passed = {name: part.since(parts[name]) for name, part in self._parts().items()}
        self._rollouts.stop()
        turns = passed[TURN].calls
        cpu_ms = {part: 1e3 * (after[part] - cpu[part]) / turns for part in MESH}
        return Side(turns / wall_s, cpu_ms, _per_turn(passed, turns)), shape

    def _take_group(self, *, wait: bool = True) -> tuple[Trajectory, ...]:
        while True:
            self._rollouts.check()
            if (group := self._buffer.take(0.1)) is not None:
                self._buffer.ack([group.entry_id], 1)
                return group.trajectories
            if not wait:
                return ()

    def _cpu(self) -> dict[str, float]:
        return cpu_by_part(self._rollouts.pid, self._floors)

    def _parts(self) -> dict[str, PartTime]:
        return self._worker.read() | self._engine.read()


class Floor:
    def __init__(self, actor: ProcessActor, engine: PartTimes | None) -> None:
        self._actor = actor
        self._engine = engine

    def play(self, shape: EpisodeShape, count: int, seconds: float) -> Side:
        mine, *children = family(self._actor.pid)
        before = cpu_s([mine]), cpu_s(children)
        parts = self._parts()
        turns, wall_s = self._actor.call("play", shape, count, seconds)
        after = cpu_s([mine]), cpu_s(children)
        passed = {name: part.since(parts[name]) for name, part in self._parts().items()}
        used = [1e3 * (now - then) / turns for now, then in zip(after, before, strict=True)]
        return Side(turns / wall_s, dict(zip(("caller", "engine"), used, strict=True)), _per_turn(passed, turns))

    def _parts(self) -> dict[str, PartTime]:
        return self._engine.read() if self._engine else {}


def _per_turn(parts: dict[str, PartTime], turns: float) -> dict[str, PartTime]:
    return {
        name: PartTime(part.calls / turns, 1e3 * part.cpu_s / turns, 1e3 * part.wall_s / turns)
        for name, part in parts.items()
    }


def _level(count: int, rounds: Sequence[dict[str, Side]]) -> dict[str, Any]:
    sides = {name: summary([each[name] for each in rounds]) for name in rounds[0]}
    mesh, bare = ([sum(each[name].cpu_ms.values()) for each in rounds] for name in ("mesh", "bare"))
    added = Spread.of(ours - theirs for ours, theirs in zip(mesh, bare, strict=True))
    return {"concurrency": count, "sides": sides, "added_cpu_ms": added}


def summary(rounds: Sequence[Side]) -> dict[str, Any]:
    """Return medians of a side: turns/s, ms of CPU a turn in all and by process, and parts."""
    first = rounds[0]
    return {
        "turns_per_s": Spread.of(each.turns_per_s for each in rounds),
        "cpu_ms": Spread.of(sum(each.cpu_ms.values()) for each in rounds),
        "process_cpu_ms": {name: Spread.of(each.cpu_ms[name] for each in rounds).median for name in first.cpu_ms},
        "parts": {
            name: {
                "calls": Spread.of(each.parts[name].calls for each in rounds).median,
                "cpu_ms": Spread.of(each.parts[name].cpu_s for each in rounds).median,
                "wall_ms": Spread.of(each.parts[name].wall_s for each in rounds).median,
            }
            for name in first.parts
        },
    }

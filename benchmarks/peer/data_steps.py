"""Settings `sft` and `dpo` of `offbeat bench peer`: tokens/s and peak memory of an optimizer step, as of TRL's
SFTTrainer and DPOTrainer.

Invariant: both sides' steps are measured in turn, on equal batches; their losses are compared.
"""

import importlib.metadata
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.benchmarks.harness.pace import PacedProcess
from offbeat.benchmarks.harness.result import Spread, console, show
from offbeat.benchmarks.learner import LearnerOptions, make_model
from offbeat.benchmarks.peer.data_worker import read_steps
from offbeat.benchmarks.peer.options import OFFBEAT, TRL, PeerOptions
from offbeat.benchmarks.peer.processes import GUEST, guest_environment
from offbeat.benchmarks.peer.trl_worker.data import DataJob
from offbeat.benchmarks.peer.venv import TRL_VENV
from offbeat.deploy.config.loader import dump_yaml, load_run
from offbeat.deploy.config.run import RunConfig

CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"
STEPS = 10
VOCABULARY = 2000
MIB = 1 << 20
LENGTHS = ("equal", "ragged")
SHARED = "offbeat, shared prefix"


@dataclass(frozen=True, slots=True)
class Shape:
    """Words of a row, without the chat template."""

    prompt: int = 64
    answer: int = 160
    shortest: int = 16
    """Of ragged rows' prompt and answer together."""
    rows_per_step: int = 16
    rows_per_pass: int = 8
    """TRL's; Offbeat's passes hold as many padded tokens."""
    sequence_length: int = 256


SHAPES = {"sft": Shape(), "dpo": Shape(rows_per_step=8, rows_per_pass=4)}
"""Of 16 trajectories a step and 8 a pass."""


def run(options: PeerOptions, pipeline: str, log: Callable[[str], None]) -> dict[str, Any]:
    folder = (options.folder / pipeline).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    if not (model / "model.safetensors").exists():
        make_model(model, LearnerOptions(longest=512, vocabulary=VOCABULARY + 48, threads=options.threads))
    batches = {}
    for lengths in LENGTHS:
        log(f"{pipeline}, {lengths} lengths")
        batches[lengths] = _measure(options, pipeline, lengths, model, folder)
    return {"setting": pipeline, "title": f"{pipeline.upper()}, 1M parameters", "batches": batches}


def write_rows(path: Path, pipeline: str, count: int, *, ragged: bool, vocabulary: int) -> None:
    """Write rows of random words; ragged lengths are log-spaced, shuffled within each step."""
    shape, rng = SHAPES[pipeline], random.Random(1)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        lengths = list(_scales(shape)) if ragged else [1.0] * shape.rows_per_step
        rng.shuffle(lengths)
        rows += [_row(pipeline, shape, scale, rng, vocabulary, ragged=ragged) for scale in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]), encoding="utf-8")


def _scales(shape: Shape) -> Iterator[float]:
    least = shape.shortest / (shape.prompt + shape.answer)
    for i in range(shape.rows_per_step):
        yield least ** (i / (shape.rows_per_step - 1))


def _row(
    pipeline: str, shape: Shape, scale: float, rng: random.Random, vocabulary: int, *, ragged: bool
) -> dict[str, Any]:
    def words(count: float) -> str:
        return " ".join(f"w{rng.randrange(vocabulary)}" for _ in range(max(1, round(count))))

    prompt = [{"role": "user", "content": words(scale * shape.prompt)}]
    if pipeline == "sft":
        return {"messages": [*prompt, {"role": "assistant", "content": words(scale * shape.answer)}]}
    shorter = rng.uniform(0.5, 1.0) if ragged else 1.0
    answers = [words(scale * shape.answer), words(scale * shape.answer * shorter)]
    rng.shuffle(answers)
    return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}


def side_config(
    options: PeerOptions, pipeline: str, lengths: str, model: Path, folder: Path, *, shared: bool
) -> RunConfig:
    shape = SHAPES[pipeline]
    trajectories = shape.rows_per_step * (1 if pipeline == "sft" else 2)
    budget = shape.rows_per_pass * trajectories // shape.rows_per_step * shape.sequence_length
    return load_run(
        CONFIGS / f"{pipeline}.yaml",
        [
            f"output_dir={folder / 'run'}",
            f"pretrain={model}",
            f"data.dataset_name={folder / lengths}.jsonl",
            "data.val_dataset_name=null",
            "eval_steps=0",
            "data.num_train_epochs=null",
            "data.shuffle=false",
            f"max_steps={_num_steps(options) + 1}",
            f"rollout_batch_size={trajectories}",
            f"sequence_length={shape.sequence_length}",
            f"actor_train.model_args.shared_prefix={str(shared).lower()}",
            f"actor_train.num_threads={options.threads}",
            "actor_train.device=cpu",
            f"actor_train.training_args.max_tokens_per_microbatch={budget}",
            "actor_train.training_args.lr_scheduler_type=constant",
            "actor_train.training_args.warmup_steps=0",
            "actor_train.training_args.learning_rate=1e-5",
            *options.overrides,
        ],
    )


def trl_job(config: RunConfig, folder: Path, threads: int) -> DataJob:
    args, shape = config.actor_train.training_args, SHAPES[config.pipeline]
    assert config.data is not None
    return DataJob(
        pipeline=config.pipeline,
        policy=config.pretrain,
        rows=str(config.data.dataset_name),
        output=str(folder / TRL),
        rows_per_step=shape.rows_per_step,
        rows_per_pass=shape.rows_per_pass,
        steps=config.max_steps,
        max_length=config.sequence_length,
        learning_rate=args.learning_rate,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_epsilon=args.adam_epsilon,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        beta=config.dpo.beta,
        threads=threads,
    )


def _num_steps(options: PeerOptions) -> int:
    return options.steps or STEPS


def _measure(options: PeerOptions, pipeline: str, lengths: str, model: Path, folder: Path) -> dict[str, Any]:
    rows = SHAPES[pipeline].rows_per_step * (_num_steps(options) + 1)
    write_rows(folder / f"{lengths}.jsonl", pipeline, rows, ragged=lengths == "ragged", vocabulary=VOCABULARY)
    config = side_config(options, pipeline, lengths, model, folder, shared=False)
    tokens = [
        sum(len(s.tokens) for g in groups for t in g.trajectories for s in t.segments) for groups in read_steps(config)
    ]
    with ExitStack() as stack:
        sides: dict[str, PacedProcess] = {}
        if OFFBEAT in options.sides:
            sides[OFFBEAT] = stack.enter_context(_start_offbeat(OFFBEAT, config, folder, options.threads))
        if OFFBEAT in options.sides and pipeline == "dpo":
            shared = side_config(options, pipeline, lengths, model, folder, shared=True)
            sides[SHARED] = stack.enter_context(_start_offbeat("shared", shared, folder, options.threads))
        if TRL in options.sides:
            sides[TRL] = stack.enter_context(_start_trl(options, config, folder))
        for side in sides.values():
            side.wait_until_ready()
        taken = {name: [side.step()] for name, side in sides.items()}  # the first one compiles and allocates
        for _ in range(_num_steps(options)):
            for name, side in sides.items():
                taken[name].append(side.step())
    return summarize(taken, tokens)


def summarize(taken: dict[str, list[dict[str, float]]], tokens: list[int]) -> dict[str, Any]:
    """Return rates without the first step, and the greatest difference of losses. tokens: of each step, without
    padding."""
    reference = taken.get(TRL, next(iter(taken.values())))
    seconds = {name: [step["seconds"] for step in steps[1:]] for name, steps in taken.items()}
    base = statistics.median(seconds.get(TRL, next(iter(seconds.values()))))
    return {
        "tokens_per_step": statistics.mean(tokens),
        "sides": {
            name: {
                "tokens_per_s": Spread.of(n / s for n, s in zip(tokens[1:], seconds[name], strict=True)),
                "peak_mib": steps[-1]["bytes"] / MIB,
                "ratio": base / statistics.median(seconds[name]),
                "loss": steps[-1]["loss"],
                "loss_difference": max(abs(a["loss"] - b["loss"]) for a, b in zip(steps, reference, strict=True)),
            }
            for name, steps in taken.items()
        },
    }


def _start_offbeat(name: str, config: RunConfig, folder: Path, threads: int) -> PacedProcess:
    file = folder / f"{name}.yaml"
    file.write_text(dump_yaml(config), encoding="utf-8")
    command = [sys.executable, "-m", "offbeat.benchmarks.peer.data_worker", str(file)]
    return PacedProcess(name, command, folder, guest_environment(folder, threads))


def _start_trl(options: PeerOptions, config: RunConfig, folder: Path) -> PacedProcess:
    job, file = trl_job(config, folder, options.threads), folder / "trl.json"
    job.write(file)
    command = [str(_python_with_trl(options)), "-m", f"{GUEST}.data", str(file)]
    return PacedProcess(TRL, command, folder, guest_environment(folder, options.threads))


def _python_with_trl(options: PeerOptions) -> Path:
    """Return the interpreter of TRL's venv, or this one with the pinned version."""
    if python := TRL_VENV.python_of(options.venv):
        return python
    try:
        if f"trl=={importlib.metadata.version('trl')}" in TRL_VENV.pins:
            return Path(sys.executable)
    except importlib.metadata.PackageNotFoundError:
        pass
    return TRL_VENV.ensure(options.venv)


def show_result(result: dict[str, Any]) -> None:
    rows = [
        (lengths, side, each["tokens_per_s"].median, each["tokens_per_s"].low, each["tokens_per_s"].high,
         each["ratio"], each["peak_mib"], f"{each['loss']:.5f}", f"{each['loss_difference']:.1e}")
        for lengths, batch in result["batches"].items()
        for side, each in batch["sides"].items()
    ]  # fmt: skip
    columns = ("lengths", "side", "tokens/s", "lowest", "highest", "x TRL's", "peak MiB", "last loss", "differs by")
    show(f"({result['setting']}) {result['title']}", columns, rows)
    console().print("A step of 16 trajectories; tokens without padding; memory above that before the model.")

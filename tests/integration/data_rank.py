"""One rank of a data pipeline's learner: trains a few steps of rows under each engine, and writes losses and weights."""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
from safetensors.torch import save_file

from offbeat.deploy import run_setup
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.config.run import RunConfig
from offbeat.services.messages.types import Group
from offbeat.services.rollout.data.config import GROUP_SIZES
from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.policy_trainer import PolicyTrainer
from tests.paths import CONFIGS

STEPS = 3
ROWS = 8
"""Of a step."""
TRAIN = "actor_train"
SMALL = (
    "data.num_train_epochs=null",
    f"max_steps={STEPS}",
    "tiny.num_hidden_layers=1",
    f"{TRAIN}.training_args.adam_epsilon=1e-3",  # gradients that are mere rounding make no steps
    f"{TRAIN}.training_args.learning_rate=1e-2",
    f"{TRAIN}.training_args.warmup_steps=0",
    f"{TRAIN}.model_args.shared_prefix=false",
)
LORA = (f"{TRAIN}.model_args.lora_target=all-linear",)
SHARED = (f"{TRAIN}.model_args.shared_prefix=true",)
FSDP2 = (f"{TRAIN}.strategy_args.strategy_name=fsdp2_train",)
BUDGET = (f"{TRAIN}.training_args.max_tokens_per_microbatch=300",)


def stage(number: int) -> tuple[str, ...]:
    return (f"{TRAIN}.strategy_args.zero_stage={number}",)


CASES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "cut": BUDGET,
    "shared": SHARED,
    "zero1": stage(1),
    "zero2": (*stage(2), *BUDGET),
    "zero3": stage(3),
    "fsdp2": (*FSDP2, *BUDGET),
    "fsdp2 shared": (*FSDP2, *SHARED),
    "lora": LORA,
    "lora zero1": (*LORA, *stage(1), *BUDGET),
    "lora zero3 shared": (*LORA, *stage(3), *SHARED),
}
"""Of each pipeline; all with LoRA have the losses of `lora`, all others those of `plain`."""
PIPELINES = ("sft", "dpo")


def accumulated(pipeline: str, ranks: Ranks) -> tuple[str, ...]:
    """One optimizer step per batch, of trajectories counted per process and pass."""
    size = ROWS * GROUP_SIZES[pipeline]
    passes = 4 // ranks.world_size
    args = f"{TRAIN}.training_args"
    per_pass = size // (passes * ranks.world_size)
    return (
        f"{args}.per_device_train_batch_size={per_pass}",
        f"{args}.gradient_accumulation_steps={passes}",
        f"~{args}.max_tokens_per_microbatch",
        f"{TRAIN}.num_processes={ranks.world_size}",
    )


def configuration(folder: Path, pipeline: str, out: Path, overrides: tuple[str, ...]) -> RunConfig:
    """folder: holds the rows of both pipelines."""
    files = (f"data.dataset_name={folder / pipeline}.jsonl", f"data.val_dataset_name={folder / pipeline}_val.jsonl")
    size = f"rollout_batch_size={ROWS * GROUP_SIZES[pipeline]}"
    return load_run(CONFIGS / f"{pipeline}.yaml", [f"output_dir={out}", size, *files, *SMALL, *overrides])


def read_groups(config: RunConfig, numbers: range) -> tuple[Group, ...]:
    assert config.data is not None
    model = run_setup.model_folder(config)
    source = DataSource(config.data, config.pipeline, model, seed=config.seed, max_tokens=config.sequence_length)
    size = GROUP_SIZES[config.pipeline]
    members = [tuple(source.trajectory(number, index, 0) for index in range(size)) for number in numbers]
    return tuple(
        Group(f"{n}-0", str(n), n, config.pipeline, 0, 0, each) for n, each in zip(numbers, members, strict=True)
    )


def train(config: RunConfig, ranks: Ranks, out: Path, name: str) -> None:
    """Write losses before each step and on validation rows after the last, and the merged weights."""
    trainer = PolicyTrainer(LearnerRun(name, name, config.output_dir, config), ranks)
    trainer.begin(lambda *_: None, lambda: False)
    curve: list[dict[str, float]] = []
    for step in range(STEPS):
        groups = read_groups(config, range(step * ROWS, (step + 1) * ROWS))
        gauges = trainer.train(StepBatch(step, groups, groups))
        curve.append({key: partial.value for key, partial in gauges.items() if key in KEPT})
    gauges = trainer.evaluate(read_groups(config, range(5 * ROWS, 6 * ROWS)))
    curve.append({key: partial.value for key, partial in gauges.items() if key in KEPT})
    weights = {each: tensor.clone() for each, tensor in trainer.exported_tensors()}
    if ranks.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}-of-{ranks.world_size}.json").write_text(json.dumps(curve))
        save_file(weights, out / f"{name}-of-{ranks.world_size}.safetensors")


KEPT = ("loss", "actor/grad_norm", "rewards/margins", "rewards/accuracies", "tokens_trained")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = ranks_of_environment("cpu")
    with process_group(ranks):
        for pipeline in PIPELINES:
            for name, overrides in {**CASES, "accumulated": accumulated(pipeline, ranks)}.items():
                run = folder / f"{pipeline}-{name.replace(' ', '-')}-{ranks.world_size}-{ranks.rank}"
                config = configuration(folder, pipeline, run, overrides)
                run_setup.prepare_folder(config)
                train(config, ranks, folder / "out", f"{pipeline} {name}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # other ranks wait for this one

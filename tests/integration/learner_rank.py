"""One rank of a data-parallel learner: trains two steps on a fixed batch under each ZeRO stage or with FSDP2, writes the
weights; and what frozen models say of the batch.

LEARNER_DEVICE: `cpu` by default, or `cuda`.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offbeat.trainer.config.actor_train import ModelArgs, StrategyArgs, TrainingArgs
from offbeat.trainer.engines.base import Hyperparameters, TrainEngine
from offbeat.trainer.engines.deepspeed import DeepSpeedEngine, DeepSpeedLogprobModel
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.fsdp2 import FSDP2Engine
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.losses.policy_loss import all_of, values_of
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import Sampled
from tests.copying import replace

KEPT = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
SHARDED = {"zero_optimization": {f"stage3_{limit}": 0 for limit in KEPT}}
"""ZeRO-3 that keeps no parameter whole between passes, as it does small ones."""
DTYPES: dict[str, Literal["float16", "bfloat16"]] = {"half": "float16", "bf16": "bfloat16"}
SMOOTH = TrainingArgs(adam_epsilon=1e-3, weight_decay=0.1)
"""Adam with its usual epsilon makes full steps of gradients that are mere rounding, such as those of key biases."""


LENGTHS = (5, 4, 9, 6, 7, 8)
RAGGED = (5, 4, 150, 6, 7, 8)
"""Of which one micro-batch is padded to two lengths, the others to one."""


def fixed_batch(micro_batches: int = 3, lengths: Sequence[int] = LENGTHS) -> list[PackedInput]:
    """Sequences of 4 to 9 tokens, cut into micro-batches; the same ones however they are cut."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 11, (n,), generator=generator) for n in lengths]
    size = len(sequences) // micro_batches
    batch: list[PackedInput] = []
    for start in range(0, len(sequences), size):
        chosen = sequences[start : start + size]
        borders = torch.tensor([0, *(len(s) for s in chosen)]).cumsum(0)
        batch.append(PackedInput.of(torch.cat(chosen), borders, borders[1:] - 1))
    return batch


def engine_of(name: str, model: Path, ranks: Ranks) -> TrainEngine[Any]:
    """name: a ZeRO stage, `fsdp2`, or `tp` or `pp`, over all ranks; with `-head`, of a policy with a value head; with
    `-half`, in float16; with `-bf16`, in bfloat16; with `-lora`, of adapters; with `-checkpointing`, activations
    recomputed; with `-ragged`, likewise, on `RAGGED`, with `-lora-ragged`, of adapters."""
    kind, _, variant = name.partition("-")
    args = ModelArgs(
        dtype=DTYPES.get(variant, "float32"),
        lora_target="all-linear" if variant.startswith("lora") else None,
        disable_gradient_checkpointing=variant not in ("checkpointing", "ragged"),
    )
    policy = load_policy(model, args, seed=1, value_head=variant == "head")
    if kind == "fsdp2":
        return FSDP2Engine(policy, SMOOTH, ranks)
    if kind in ("tp", "pp"):
        return FSDP2Engine(policy, SMOOTH, ranks, **{f"{kind}_size": ranks.world_size})
    settings = SHARDED if name.startswith("3-") and name.endswith(("lora", "ragged")) else {}
    strategy = StrategyArgs.model_validate({"zero_stage": int(kind), "strategy_config": settings})
    return DeepSpeedEngine(policy, SMOOTH, strategy, ranks)


class GatherCounter(TorchDispatchMode):
    """Counts the elements that all-gathers return."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "all_gather" in func.name() or "allgather" in func.name():
            self.elements += sum(each.numel() for each in tree_leaves(result) if isinstance(each, Tensor))
        return result


def gathered(engine: TrainEngine[Any]) -> dict[str, Tensor]:
    """Count the elements gathered for adapters alone, and for base and adapters; and those of either."""
    counts: dict[str, Tensor] = {}
    for form in ("adapter", "parts"):
        with GatherCounter() as counter:
            elements = sum(tensor.numel() for _, tensor in engine.tensors(form))
        counts[form] = torch.tensor([counter.elements, elements])
    return counts


def head_learned(engine: TrainEngine[Sampled]) -> dict[str, Tensor]:
    """A step without it, as in a warm start, one of it alone, and two of both; the weights, and what it says then.

    Raises:
        ValueError: the step of the head alone moved something else.
    """
    batch = fixed_batch()
    alone = [replace(x, head_alone=True) for x in batch]

    def miss(_: int, said: Sampled) -> Tensor:
        return ((values_of(said) - 1.0) ** 2).sum() / 6

    engine.train(batch, lambda _, said: -said.logprobs.sum() / 6, Hyperparameters(1e-2, 0.1))
    engine.reset_optimizer()
    before = {name: tensor.clone() for name, tensor in engine.tensors()}
    engine.train(alone, miss, Hyperparameters(1e-2, 0.1, head_learning_rate=1e-1, head_alone=True))
    if moved := [name for name, tensor in engine.tensors() if not torch.equal(tensor, before[name])]:
        raise ValueError(f"{', '.join(moved)} moved while the head learnt alone")
    for _ in range(2):
        both = Hyperparameters(1e-2, 0.1, head_learning_rate=1e-1)
        engine.train(batch, lambda i, said: miss(i, said) - said.logprobs.sum() / 6, both)
    weights = {name: tensor.clone() for name, tensor in engine.tensors()}
    return weights | {"said": torch.cat(engine.infer(batch, all_of), -1)}


def half_learned(engine: TrainEngine[Sampled], rank: int) -> dict[str, Tensor]:
    """Two steps beside those that find the scale, and one that overflows on the first rank alone."""
    batch, hyper = fixed_batch(), Hyperparameters(1e-3, 0.1)
    left = 2
    while left:
        left -= engine.train(batch, lambda _, said: -said.logprobs.sum() / 6, hyper).applied
    factor = 1e6 if rank == 0 else 1.0
    overflow = engine.train(batch, lambda _, said: -said.logprobs.sum() / 6 * factor, hyper)
    after = engine.train(batch, lambda _, said: -said.logprobs.sum() / 6, hyper)
    scales = torch.tensor([overflow.loss_scale or 0.0, after.loss_scale or 0.0, float(overflow.applied)])
    return {name: tensor.clone() for name, tensor in engine.tensors()} | {"scales": scales}


def main(model: Path, out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    ranks = ranks_of_environment("cuda" if os.environ.get("LEARNER_DEVICE") == "cuda" else "cpu")
    with process_group(ranks):
        for name, kind in (("hf_infer", FrozenModel), ("deepspeed_infer", DeepSpeedLogprobModel)):
            said = torch.cat(kind(load_policy(model, ModelArgs(), seed=1), ranks).infer(fixed_batch()))
            save_file({"logprobs": said}, out / f"{name}-{ranks.rank}-of-{ranks.world_size}.safetensors")
        for name in names:
            engine = engine_of(name, model, ranks)
            if name.endswith("-head"):
                weights = head_learned(engine)
                if ranks.rank == 0:
                    save_file(weights, out / f"{name}-of-{ranks.world_size}.safetensors")
                continue
            if name.endswith("-half"):
                save_file(
                    half_learned(engine, ranks.rank), out / f"{name}-{ranks.rank}-of-{ranks.world_size}.safetensors"
                )
                continue
            batch = fixed_batch(lengths=RAGGED if name.endswith("-ragged") else LENGTHS)
            for _ in range(2):
                engine.train(batch, lambda _, said: -said.logprobs.sum() / 6, Hyperparameters(1e-2, 0.1))
            weights = {each: tensor.cpu().clone() for each, tensor in engine.tensors()}
            weights["logprobs"] = torch.cat(engine.infer(batch)).cpu()
            counts = gathered(engine) if name.endswith("-lora") else {}
            if ranks.rank == 0:
                save_file(weights, out / f"{name}-of-{ranks.world_size}.safetensors")
                save_file(counts, out / f"{name}-gathered-of-{ranks.world_size}.safetensors")
            if name == "fsdp2":  # what one process wrote, two continue from
                if ranks.world_size == 1:
                    engine.save(out / "state")
                else:
                    engine = engine_of(name, model, ranks)
                    engine.load(out / "state")
                    resumed = {each: tensor.clone() for each, tensor in engine.tensors()}
                    if ranks.rank == 0:
                        save_file(resumed, out / "resumed.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])

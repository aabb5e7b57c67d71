"""One of four ranks that train small models in layouts of tensor, pipeline, sequence and data parallelism; see
`test_layouts`.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.engines.base import Hyperparameters, StepOutcome
from offbeat.trainer.engines.frozen import FirstPolicyReference
from offbeat.trainer.engines.fsdp2 import FSDP2Engine
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.losses.policy_loss import all_of, values_of
from offbeat.trainer.models.distillation import TopQuery
from offbeat.trainer.models.loading import load_critic, load_policy
from tests.integration.learner_rank import SMOOTH, fixed_batch

HYPER = Hyperparameters(1e-2, 0.1, head_learning_rate=1e-1)
STEPS = 2


Layout = tuple[int, int] | tuple[int, int, int]
"""`tp_size`, `pp_size` and, if any, `ulysses_size` of four ranks."""
LAYOUTS: dict[str, dict[str, Layout]] = {
    "tied": {"4x1": (4, 1), "1x2": (1, 2), "2x2": (2, 2), "u2": (1, 1, 2)},
    "untied": {"2x1": (2, 1), "1x4": (1, 4), "2x2": (2, 2), "u4": (1, 1, 4)},
}
"""By model, as the others."""
RESUMED: dict[str, dict[str, tuple[str, Layout]]] = {
    "tied": {"4x1-2x2": ("4x1", (2, 2)), "1x2-2x1": ("1x2", (2, 1))},
    "untied": {"2x1-4x1": ("2x1", (4, 1)), "u4-2x1": ("u4", (2, 1)), "2x1-u2": ("2x1", (1, 1, 2))},
}
"""Layouts that continue from checkpoints of others."""
ADAPTER = "adapter"
"""Folder of a model's, from which its adapters start."""
TARGETS = {"tied": "all-linear", "untied": "q_proj,o_proj,down_proj,lm_head"}
"""Layers with adapters."""
ADAPTED: dict[str, dict[str, Layout]] = {
    "tied": {"1x1": (1, 1), "2x1": (2, 1), "u4": (1, 1, 4)},
    "untied": {"1x2": (1, 2)},
}
ADAPTED_RESUMED: dict[str, dict[str, tuple[str, Layout]]] = {
    "tied": {"1x1-2x2": ("1x1", (2, 2)), "2x1-1x2": ("2x1", (1, 2))},
    "untied": {"1x2-1x1": ("1x2", (1, 1))},
}
CRITICS: dict[str, dict[str, Layout]] = {
    "tied": {"2x1": (2, 1), "u2": (1, 1, 2)},
    "untied": {"2x2": (2, 2)},
}
HALF: dict[str, Layout] = {"2x1": (2, 1), "1x2": (1, 2), "u2": (1, 1, 2)}
"""In 16 bits, of the tied model."""


def sizes_of(layout: Layout) -> dict[str, int]:
    return dict(zip(("tp_size", "pp_size", "ulysses_size"), layout, strict=False))


def engine_of(model: Path, ranks: Ranks, layout: Layout, dtype: str = "float32") -> FSDP2Engine:
    policy = load_policy(model, model_args(model, dtype=dtype), seed=1, value_head=True)
    return FSDP2Engine(policy, SMOOTH, ranks, **sizes_of(layout))


def model_args(model: Path, **settings: Any) -> ModelArgs:
    return ModelArgs.model_validate({"disable_gradient_checkpointing": "untied" not in model.name, **settings})


def adapted_of(
    model: Path, ranks: Ranks, layout: Layout, dtype: str = "float32"
) -> tuple[FSDP2Engine, FirstPolicyReference]:
    adapter = str(model / ADAPTER) if (model / ADAPTER).is_dir() else None
    args = model_args(model, dtype=dtype, lora_target=TARGETS[model.name], lora_rank=3, adapter_name_or_path=adapter)
    policy = load_policy(model, args, seed=1, value_head=True)
    engine = FSDP2Engine(policy, SMOOTH, ranks, **sizes_of(layout))
    return engine, FirstPolicyReference(engine, policy)


def adapters_learned(engine: FSDP2Engine, reference: FirstPolicyReference, steps: int = STEPS) -> dict[str, Tensor]:
    """Return what `learn` does, the adapters' factors, and what the reference says before and after."""
    said = {"reference": torch.cat(reference.infer(fixed_batch()))}
    learned = learn(engine, steps)
    said["reference_after"] = torch.cat(reference.infer(fixed_batch()))
    factors = {name: tensor.clone() for name, tensor in engine.tensors("adapter")}
    return learned | factors | said


def learn(engine: FSDP2Engine, steps: int) -> dict[str, Tensor]:
    """Return weights, norms of the gradients, and what the policy then says."""
    batch = fixed_batch()

    def loss(_: int, said: Any) -> Tensor:
        return ((values_of(said) - 1.0) ** 2).sum() / 6 - said.logprobs.sum() / 6

    outcomes: list[StepOutcome] = []
    for _ in range(steps):
        outcomes.append(engine.train(batch, loss, HYPER))
        leave_and_return(engine)
    weights = {name: tensor.clone() for name, tensor in engine.tensors()}
    norms = torch.tensor([outcome.grad_norm for outcome in outcomes])
    top = [replace(x, top=TopQuery(3, 1.0, 11)) for x in batch]
    said = {"said": torch.cat(engine.infer(batch, all_of), -1), "top": torch.cat(engine.infer(top), -1)}
    return weights | said | {"norms": norms}


def leave_and_return(engine: FSDP2Engine) -> None:
    """Take turns with an engine on the same devices; on a CPU, copies stand for another device's memory."""
    engine.offload_states()
    if engine.device.type == "cpu":
        engine._module._apply(torch.clone)
    engine.load_states()


def critic_learned(model: Path, ranks: Ranks, layout: Layout) -> dict[str, Tensor]:
    """Return what a critic of its own says after its steps."""
    critic = load_critic(model, ModelArgs(), seed=1)
    engine = FSDP2Engine(critic, SMOOTH, ranks, **sizes_of(layout))
    batch = fixed_batch()
    for _ in range(STEPS):
        engine.train(batch, lambda _, values: ((values - 1.0) ** 2).sum() / 6, HYPER)
    return {"said": torch.cat(engine.infer(batch), -1)}


def half_learned(engine: FSDP2Engine, factor: float) -> dict[str, Tensor]:
    """Steps in float16 that find the scale, and one whose gradient overflows by `factor`."""
    batch = fixed_batch()
    left = STEPS
    while left:
        left -= engine.train(batch, lambda _, said: -said.logprobs.sum() / 6, HYPER).applied
    overflow = engine.train(batch, lambda _, said: -said.logprobs.sum() / 6 * factor, HYPER)
    scales = torch.tensor([overflow.loss_scale or 0.0, float(overflow.applied)])
    return {name: tensor.clone() for name, tensor in engine.tensors()} | {"scales": scales}


def main(models: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with process_group(ranks_of_environment("cpu")) as ranks:
        results: dict[str, dict[str, Tensor]] = {}
        for model in sorted(models.iterdir()):
            kind = model.name
            for name, layout in LAYOUTS[kind].items():
                engine = engine_of(model, ranks, layout)
                results[f"{kind}-{name}"] = learn(engine, STEPS)
                engine.save(out / f"{kind}-{name}-state")
            for name, (saved, layout) in RESUMED[kind].items():
                engine = engine_of(model, ranks, layout)
                engine.load(out / f"{kind}-{saved}-state")
                results[f"{kind}-{name}"] = learn(engine, 1)
            for name, layout in ADAPTED[kind].items():
                engine, reference = adapted_of(model, ranks, layout)
                results[f"{kind}-{name}-lora"] = adapters_learned(engine, reference)
                engine.save(out / f"{kind}-{name}-lora-state")
            for name, (saved, layout) in ADAPTED_RESUMED[kind].items():
                engine, reference = adapted_of(model, ranks, layout)
                engine.load(out / f"{kind}-{saved}-lora-state")
                results[f"{kind}-{name}-lora"] = adapters_learned(engine, reference, 1)
            for name, layout in CRITICS[kind].items():
                results[f"{kind}-{name}-critic"] = critic_learned(model, ranks, layout)
        for name, layout in HALF.items():
            engine, reference = adapted_of(models / "tied", ranks, layout, "bfloat16")
            results[f"{name}-lora-bfloat16"] = adapters_learned(engine, reference)
            half = engine_of(models / "tied", ranks, layout, "float16")
            results[f"{name}-half"] = half_learned(half, 1e6 if ranks.rank == 0 else 1.0)
        if ranks.rank == 0:
            for name, tensors in results.items():
                save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, out / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

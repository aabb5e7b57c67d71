# pyright: basic
"""A training engine on DeepSpeed: ZeRO 0 to 3, on CPUs over gloo or on GPUs over nccl.

Invariants: the loss arrives globally normalised, so gradients are summed over micro-batches and ranks, never averaged; a
step whose gradient is not finite changes neither weights nor moments, on any rank; every rank runs equally many passes.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from offbeat.trainer.config.learner import StrategyArgs, TrainingArgs
from offbeat.trainer.engines.base import Hyperparameters, LossFunction, StepOutcome
from offbeat.trainer.engines.param_groups import (
    adam_settings,
    adopt,
    forget,
    parameter_groups,
)
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.engines.rank_passes import OnRanks
from offbeat.trainer.models.lora import weights_apart, whole_weights
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.value_head import HEAD

WRAPPER = "model."
"""What the packed models put in front of the Hugging Face names."""
TAG = "state"
STAGE = "zero_stage.json"
"""What the state in a folder was written by."""
BUCKET = 500_000_000
"""Elements of the largest bucket of gradients that are reduced at once: DeepSpeed's default."""


class ClippingAdamW(torch.optim.AdamW):
    """AdamW that clips by the global norm first, and leaves everything as it is when that is not finite.

    ZeRO's optimizers do both by themselves; DeepSpeed reads the two attributes from whichever it has.
    """

    overflow = False
    _global_grad_norm = math.nan

    def __init__(self, params: Any, max_grad_norm: float, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self._max_grad_norm = max_grad_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self._global_grad_norm = float(norm)
        self.overflow = not math.isfinite(self._global_grad_norm)
        if not self.overflow:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
            super().step(closure)


class DeepSpeedEngine(OnRanks):
    """`TrainEngine` for one module whose forward takes a `PackedInput`."""

    def __init__(self, module: nn.Module, training: TrainingArgs, strategy: StrategyArgs, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._training = training
        module.to(ranks.device)
        bf16 = next(module.parameters()).dtype == torch.bfloat16
        # bf16 keeps its float32 masters in ZeRO's sharded optimizer, on one process as on many
        stage = max(strategy.zero_stage, 1) if bf16 else strategy.zero_stage
        self._moments = _adamw(module, training, clips=stage == 0)
        config = engine_config(module, stage, bf16, 0.0 if stage == 0 else training.max_grad_norm)
        self._engine = _deepspeed().initialize(
            model=module, optimizer=self._moments, config=merged(config, strategy.strategy_config)
        )[0]

    def train(
        self, batch: Sequence[PackedInput], loss: LossFunction[Any], hyperparameters: Hyperparameters
    ) -> StepOutcome:
        adopt(self._engine.optimizer.param_groups, hyperparameters)
        self._engine.train()
        for share in self.shares(self._engine, batch, loss):
            self._engine.backward(share, scale_wrt_gas=False)
        self._engine.step()
        if hyperparameters.head_alone:
            forget(self._states_beside_the_head())
        applied = bool(self._engine.was_step_applied())
        return StepOutcome(applied, float(self._engine.get_global_grad_norm()) if applied else math.nan)

    @torch.no_grad()
    def infer(self, batch: Sequence[PackedInput], read: Callable[[Any], Tensor] | None = None) -> list[Tensor]:
        self._engine.eval()
        return self.outputs(self._engine, batch, read)

    def tensors(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.tensors`. Under ZeRO-3 one weight, with its adapter, is gathered at a time."""
        module = self._engine.module
        gathered = _deepspeed().zero.GatheredParameters if self._stage == 3 else None
        for whole in whole_weights(module) if merged else weights_apart(module, WRAPPER):
            if whole.name.startswith(HEAD):
                continue
            with gathered(whole.parts) if gathered else nullcontext():
                yield whole.name.removeprefix(WRAPPER), whole.tensor()

    def reset_optimizer(self) -> None:
        forget(self._moments.state.values())

    @property
    def _stage(self) -> int:
        return int(self._engine.zero_optimization_stage())

    def _states_beside_the_head(self) -> list[dict[str, Any]]:
        """Of the first group of parameters; ZeRO-3 shows its shards to AdamW for the time of a step alone."""
        optimizer = self._engine.optimizer
        held = self._moments.param_groups[0]["params"]
        if self._stage == 3:
            shards, group_of = optimizer.fp32_partitioned_groups_flat, optimizer.sub_group_to_group_id
            held = [shard for number, shard in enumerate(shards) if group_of[number] == 0]
        return [self._moments.state[parameter] for parameter in held]

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
        if self.rank == 0:
            (folder / STAGE).write_text(json.dumps(self._stage))

    def load(self, folder: Path) -> None:
        """See `TrainEngine.load`. Raises RuntimeError if the folder is not a whole checkpoint of this module, or of another
        ZeRO stage, whose optimizer lies there in another form."""
        written_by = json.loads((folder / STAGE).read_text()) if (folder / STAGE).is_file() else self._stage
        if written_by != self._stage:
            raise RuntimeError(
                f"{folder} was written at ZeRO stage {written_by}, and this engine is at {self._stage}: set "
                f"actor_train.strategy_args.zero_stage={written_by}"
            )
        path, _ = self._engine.load_checkpoint(str(folder), tag=TAG)
        if path is None:
            raise RuntimeError(f"{folder} holds no state of this engine")
        optimizer = self._engine.optimizer
        for group in optimizer.param_groups:
            group.update(adam_settings(self._training))
        if self._stage > 0:
            optimizer.clip_grad = self._training.max_grad_norm


class DeepSpeedLogprobModel(OnRanks):
    """`deepspeed_infer`: a frozen model whose weights are dealt out to ranks (ZeRO-3) and made whole layer by layer."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        super().__init__(ranks)
        module.eval().requires_grad_(False).to(ranks.device)
        bf16 = next(module.parameters()).dtype == torch.bfloat16
        self._engine = _deepspeed().initialize(model=module, config=engine_config(module, 3, bf16, 0.0))[0]
        self._engine.eval()

    @torch.no_grad()
    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        return self.outputs(self._engine, batch)


def _adamw(module: nn.Module, training: TrainingArgs, *, clips: bool) -> torch.optim.AdamW:
    settings: dict[str, Any] = {
        "lr": training.learning_rate,
        "weight_decay": training.weight_decay,
        "fused": True,
        **adam_settings(training),
    }
    if clips:
        return ClippingAdamW(parameter_groups(module), training.max_grad_norm, **settings)
    return torch.optim.AdamW(parameter_groups(module), **settings)


def engine_config(module: nn.Module, zero_stage: int, bf16: bool, max_grad_norm: float) -> dict[str, Any]:
    """DeepSpeed's configuration of a run: the caller decides when a batch is complete, and sets the learning rate.

    ZeRO allocates a bucket whole, however small the model: no larger than all weights, then.
    """
    num_weights = sum(getattr(each, "ds_numel", each.numel()) for each in module.parameters())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": {
            "stage": zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": min(BUCKET, max(1, num_weights)),
        },
        "steps_per_print": 1_000_000_000,
    }
    if bf16:
        config["bf16"] = {"enabled": True}
    return config


def merged(ours: Mapping[str, Any], theirs: Mapping[str, JsonValue]) -> dict[str, Any]:
    """`theirs` over `ours`, nested tables too."""
    out = dict(ours)
    for key, value in theirs.items():
        below = out.get(key)
        out[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return out


def _deepspeed() -> Any:
    """Import DeepSpeed quietly, and tell it of no operator to compile: the one it wants on a CPU (all-reduce through shared
    memory) takes 20 s to build, does what gloo does, and leaves files in /dev/shm when the learner is killed."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # noqa: PLC0415
    import deepspeed.ops  # noqa: PLC0415

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__ = {}  # pyright: ignore[reportAttributeAccessIssue]
    return deepspeed

# pyright: basic
"""Training engine on DeepSpeed: ZeRO 0 to 3, on CPUs (gloo) or GPUs (NCCL).

Invariants: the loss is normalized globally, so gradients are summed; a non-finite gradient changes nothing on any rank.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from offbeat.services.process import uncollected_imports
from offbeat.trainer.config.actor_train import StrategyArgs, TrainingArgs
from offbeat.trainer.engines.adamw import make_adamw
from offbeat.trainer.engines.base import MIN_LOSS_SCALE, Hyperparameters, LossFunction, StepOutcome
from offbeat.trainer.engines.group_layout import check_layout, write_layout
from offbeat.trainer.engines.offload import move_moments
from offbeat.trainer.engines.param_groups import (
    adam_settings,
    adopt,
    forget,
    parameter_groups,
)
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.engines.rank_passes import OnRanks
from offbeat.trainer.engines.state_files import load_deepspeed_state
from offbeat.trainer.models.lora import WeightForm, exported_weights
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.quantization import quantized_layers
from offbeat.trainer.models.recurrent_layers import recurrent_layers
from offbeat.trainer.models.value_head import HEAD

WRAPPER = "model."
"""Prefix before Hugging Face names."""
TAG = "state"
STAGE_FILE = "zero_stage.json"
"""ZeRO stage and type of gradient sums, which decide DeepSpeed's optimizer at stage 1."""
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""Added by DeepSpeed to checkpoints."""
NAME_OF_DTYPE = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
MAX_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default."""


class DeepSpeedEngine(OnRanks):
    def __init__(self, module: nn.Module, training: TrainingArgs, strategy: StrategyArgs, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._training = training
        module.to(ranks.device)
        dtype = next(module.parameters()).dtype
        # 16 bits need ZeRO's sharded optimizer for its float32 master weights, even on one process
        stage = strategy.zero_stage if dtype == torch.float32 else max(strategy.zero_stage, 1)
        groups = parameter_groups(module, training)
        self._kinds = tuple(groups)
        self._moments = make_adamw(list(groups.values()), training, clips=stage == 0)
        config = engine_config(module, stage, dtype, 0.0 if stage == 0 else training.max_grad_norm)
        self._engine = _initialize(module, self._moments, merge_settings(config, strategy.strategy_config), ranks)
        self._engine.checkpoint_engine.load = load_deepspeed_state
        self._keep_minimum_scale()

    def train(
        self, batch: Sequence[PackedInput], loss: LossFunction[Any], hyperparameters: Hyperparameters
    ) -> StepOutcome:
        adopt(self._engine.optimizer.param_groups, self._kinds, hyperparameters)
        self._engine.train()
        scale = self._loss_scale
        for share in self.shares(self._engine, batch, loss):
            self._engine.backward(share, scale_wrt_gas=False)
        self._engine.step()
        if hyperparameters.head_alone:
            forget(self._states_without_head())
        applied = bool(self._engine.was_step_applied())
        norm = float(self._engine.get_global_grad_norm()) if applied else math.nan
        return StepOutcome(applied, norm, scale, self._min_loss_scale)

    @torch.no_grad()
    def infer(self, batch: Sequence[PackedInput], read: Callable[[Any], Tensor] | None = None) -> list[Tensor]:
        self._engine.eval()
        return self.outputs(self._engine, batch, read)

    def tensors(self, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        """Gather one weight with its adapter at a time."""
        module = self._engine.module
        gathered = _deepspeed(self.device.type).zero.GatheredParameters if self._stage == 3 else None
        for weight in exported_weights(module, form, WRAPPER):
            if weight.name.startswith(HEAD):
                continue
            with gathered(weight.parts) if gathered else nullcontext():
                yield weight.name.removeprefix(WRAPPER), weight.tensor()

    def reset_optimizer(self) -> None:
        forget(self._moments.state.values())

    def offload_states(self) -> None:
        # Pinned buffers would be allocated anew in each turn
        if self._stage in (1, 2):
            self._engine.offload_states(pin_memory=False)
        elif self._stage == 3:
            from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State  # noqa: PLC0415

            # It moves the moments and float32 weights of its own FusedAdam alone, and weights only if all are trained
            self._engine.offload_states({State.lp_grads, State.contiguous_grad_buffer}, pin_memory=False)
        else:
            self._engine.module.to("cpu")
        self._move_others("cpu")

    def load_states(self) -> None:
        if self._stage > 0:
            self._engine.reload_states()
        else:
            self._engine.module.to(self.device)
        self._move_others(self.device)

    def _move_others(self, device: torch.device | str) -> None:
        """Move what DeepSpeed does not: frozen weights, AdamW's moments except at ZeRO-1 and 2, ZeRO-3's trained weights."""
        for weight in self._engine.module.parameters():
            if not weight.requires_grad and self._stage > 0:
                held = weight.ds_tensor if self._stage == 3 else weight
                held.data = held.data.to(device)
        for layer in quantized_layers(self._engine.module):
            layer.to(device)
        if self._stage == 3:
            self._move_shards(device)
        if self._stage not in (1, 2):
            move_moments(self._moments.state.values(), device)

    def _move_shards(self, device: torch.device | str) -> None:
        """Move ZeRO-3's trained weights, which share a buffer, and their float32 copies."""
        optimizer = self._engine.optimizer
        buffer, offset = optimizer.lp_param_buffer, 0
        buffer.data = buffer.data.to(device)
        optimizer.fp16_partitioned_groups_flat.clear()
        optimizer._set_fp16_partitioned_groups_flat()
        for shard in optimizer._get_parameter_partitions():
            shard.data = buffer.narrow(0, offset, shard.numel())
            offset += shard.numel()
        for shard in optimizer.fp32_partitioned_groups_flat:
            shard.data = shard.data.to(device)

    @property
    def _loss_scale(self) -> float | None:
        return float(self._engine.optimizer.loss_scale) if self._engine.fp16_enabled() else None

    @property
    def _min_loss_scale(self) -> float:
        return min_loss_scale(self._engine.optimizer.loss_scaler) if self._engine.fp16_enabled() else MIN_LOSS_SCALE

    def _keep_minimum_scale(self) -> None:
        """Disable DeepSpeed's error at the smallest scale; `max_skipped_steps` ends the run."""
        if self._engine.fp16_enabled():
            self._engine.optimizer.loss_scaler.raise_error_at_min_scale = False

    @property
    def _grad_accum(self) -> str:
        return str(self._engine.get_data_types()[1])

    @property
    def _stage(self) -> int:
        return int(self._engine.zero_optimization_stage())

    def _states_without_head(self) -> list[dict[str, Any]]:
        """Return the states of the model's groups; ZeRO-3 shows AdamW shards only during a step."""
        optimizer = self._engine.optimizer
        of_model = [number for number, kind in enumerate(self._kinds) if not kind.is_head]
        parameters = [parameter for number in of_model for parameter in self._moments.param_groups[number]["params"]]
        if self._stage == 3:
            shards, group_of = optimizer.fp32_partitioned_groups_flat, optimizer.sub_group_to_group_id
            parameters = [shard for number, shard in enumerate(shards) if group_of[number] in of_model]
        return [self._moments.state[parameter] for parameter in parameters]

    def close(self) -> None:
        """Empty weights and optimizer: hooks of autograd's nodes keep ZeRO's from being collected."""
        self._engine.destroy()
        for optimizer in (self._engine.optimizer, self._moments):
            vars(optimizer).clear()
        for weight in self._engine.module.parameters():
            weight.data, weight.grad = weight.new_empty(0), None
            vars(weight).clear()  # ZeRO-3's shards

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
        if self.rank == 0:
            write_layout(folder, self._training)
            (folder / STAGE_FILE).write_text(json.dumps({"stage": self._stage, "grad_accum": self._grad_accum}))
            for script in SCRIPTS:
                (folder / script).unlink(missing_ok=True)

    def load(self, folder: Path) -> None:
        check_layout(folder, self._training)
        stage, grad_accum = _layout_of(folder, default=str(self._engine.get_data_types()[0]))
        if stage is not None and stage != self._stage:
            raise RuntimeError(
                f"{folder} was written at ZeRO stage {stage}, but this engine is at {self._stage}: set "
                f"actor_train.strategy_args.zero_stage={stage}"
            )
        if self._stage == 1 and grad_accum != self._grad_accum:  # the other stages' states do not depend on it
            raise RuntimeError(
                f"{folder} was written with gradients summed in {grad_accum}, but this engine sums in {self._grad_accum}: "
                f"set actor_train.strategy_args.strategy_config.data_types.grad_accum_dtype={NAME_OF_DTYPE[grad_accum]}"
            )
        if self._engine.load_universal_checkpoint():  # which DeepSpeed unpickles by itself
            raise RuntimeError(
                f"{folder} is no universal checkpoint: leave out strategy_config.checkpoint.load_universal"
            )
        path, _ = self._engine.load_checkpoint(str(folder), tag=TAG)
        if path is None:
            raise RuntimeError(f"{folder} has no state of this engine")
        optimizer = self._engine.optimizer
        for group in optimizer.param_groups:
            group.update(adam_settings(self._training))
        if self._stage > 0:
            optimizer.clip_grad = self._training.max_grad_norm
        self._keep_minimum_scale()


class DeepSpeedLogprobModel(OnRanks):
    """`deepspeed_infer`: frozen model sharded by ZeRO-3."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        super().__init__(ranks)
        module.eval().requires_grad_(False).to(ranks.device)
        dtype = next(module.parameters()).dtype
        self._engine = _initialize(module, None, engine_config(module, 3, dtype, 0.0), ranks)
        self._engine.eval()

    @torch.no_grad()
    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        return self.outputs(self._engine, batch)


def min_loss_scale(scaler: Any) -> float:
    """Return the scale below which a scaler does not go: a static one's own."""
    return float(scaler.min_scale if scaler.dynamic else scaler.loss_scale)


def _initialize(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, config: dict[str, Any], ranks: Ranks
) -> Any:
    """Return DeepSpeed's engine.

    Raises:
        ValueError: DeepSpeed refuses the configuration.
    """
    deepspeed = _deepspeed(ranks.device.type)
    from deepspeed.runtime.zero.utils import ZeRORuntimeException  # noqa: PLC0415
    from deepspeed.utils import set_z3_leaf_module  # noqa: PLC0415

    for layer in recurrent_layers(module):  # gathered whole, as ranks compute their parts unequally often
        set_z3_leaf_module(layer, True)
    try:
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    except (AssertionError, deepspeed.DeepSpeedConfigError, ZeRORuntimeException) as error:
        raise ValueError(f"DeepSpeed refuses strategy_config: {error}") from error


def _layout_of(folder: Path, default: str) -> tuple[int | None, str]:
    """Return ZeRO stage and type of gradient sums, which version 0.1 did not write."""
    if not (folder / STAGE_FILE).is_file():
        return None, default
    layout = json.loads((folder / STAGE_FILE).read_text())
    return (layout["stage"], layout["grad_accum"]) if isinstance(layout, dict) else (layout, default)


def engine_config(module: nn.Module, zero_stage: int, dtype: torch.dtype, max_grad_norm: float) -> dict[str, Any]:
    """Return DeepSpeed's configuration; its bucket has at most the number of weights."""
    num_weights = sum(getattr(weight, "ds_numel", weight.numel()) for weight in module.parameters())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": max_grad_norm,
        "zero_force_ds_cpu_optimizer": False,  # with `offload_optimizer` AdamW stays ours
        "zero_allow_untested_optimizer": True,  # else ZeRO refuses bitsandbytes'
        "zero_optimization": {
            "stage": zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": min(MAX_BUCKET_ELEMENTS, max(1, num_weights)),
        },
        "steps_per_print": 1_000_000_000,
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    if dtype == torch.float16:
        config["fp16"] = {"enabled": True, "loss_scale": 0}
    if dtype != torch.float32:
        # Micro-batches' gradients, summed in 16 bits, would lose what is small beside the sum so far
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def merge_settings(defaults: Mapping[str, Any], overrides: Mapping[str, JsonValue]) -> dict[str, Any]:
    out = dict(defaults)
    for key, value in overrides.items():
        default = out.get(key)
        out[key] = merge_settings(default, value) if isinstance(default, dict) and isinstance(value, dict) else value
    return out


@cache
def _deepspeed(device_type: str) -> Any:
    """Import DeepSpeed with reduced logging and, for ranks on CPUs, of a host with GPUs too, without compiled operators.

    Its shared-memory all-reduce takes 20 s to build, replaces gloo, and leaves files in /dev/shm if killed.
    """
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with uncollected_imports():
        import deepspeed  # noqa: PLC0415
        import deepspeed.ops  # noqa: PLC0415

    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    # Of bitsandbytes' AdamW, which is tested here
    logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())
    if device_type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}  # pyright: ignore[reportAttributeAccessIssue]
    return deepspeed

# pyright: basic
"""Training engine on PyTorch's `fully_shard` (FSDP2), with `deepspeed`'s invariants."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as loading
import torch.distributed.checkpoint.state_dict_saver as saving
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from offbeat.trainer.config.actor_train import TrainingArgs
from offbeat.trainer.engines.base import MIN_LOSS_SCALE, Hyperparameters, LossFunction, StepOutcome
from offbeat.trainer.engines.offload import move_moments
from offbeat.trainer.engines.param_groups import (
    adam_settings,
    adopt,
    check_layout,
    forget,
    parameter_groups,
    write_layout,
)
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.engines.rank_passes import OnRanks
from offbeat.trainer.engines.state_files import StateFileError, StatePlanner, StateReader
from offbeat.trainer.engines.tensor_parallel import split_model
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.value_head import HEAD

WRAPPER = "model."
SCALER_FILE = "loss_scaler.json"
"""Of float16; equal on all ranks."""


class FSDP2Engine(OnRanks):
    """`TrainEngine` whose checkpoints load on any number of ranks."""

    def __init__(self, module: nn.Module, training: TrainingArgs, ranks: Ranks, tp_size: int = 1) -> None:
        """tp_size: consecutive ranks over which layers are split; raises ValueError."""
        super().__init__(replace(ranks, tp_size=tp_size))
        self._partial: list[nn.Module] = []
        self._tensor_mesh: DeviceMesh | None = None
        self._dtype = next(module.parameters()).dtype
        self._max_grad_norm = training.max_grad_norm
        self._training = training
        self._module = self._shard(module.float().to(ranks.device))
        groups = parameter_groups(self._module, training)
        self._kinds = tuple(groups)
        self._optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups.values()],
            lr=training.learning_rate,
            weight_decay=training.weight_decay,
            foreach=None if tp_size == 1 else False,  # parameters with and without a tensor dimension do not mix
            **adam_settings(training),
        )

        self._scaler = ShardedGradScaler(ranks.device.type, enabled=self._dtype == torch.float16)

    def _shard(self, module: nn.Module) -> nn.Module:
        """Shard; stored in float32, computed in its dtype."""
        dtype = None if self._dtype == torch.float32 else self._dtype
        settings: dict[str, Any] = {
            "mesh": self._split(module),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        }
        for layer in _layers(module):
            fully_shard(layer, **settings)
        fully_shard(module, **settings)
        return module

    def _split(self, module: nn.Module) -> DeviceMesh:
        """Split layers over ranks; return the mesh over copies."""
        ranks = self._ranks
        if ranks.tp_size == 1:
            return init_device_mesh(ranks.device.type, (ranks.world_size,))
        if ranks.world_size % ranks.tp_size:
            raise ValueError(f"tp_size {ranks.tp_size} does not divide the {ranks.world_size} process(es)")
        mesh = init_device_mesh(ranks.device.type, (ranks.data_size, ranks.tp_size), mesh_dim_names=("data", "tensor"))
        self._tensor_mesh = mesh["tensor"]
        self._partial = split_model(cast(PreTrainedModel, module.model), self._tensor_mesh)
        return mesh["data"]

    def train(
        self, batch: Sequence[PackedInput], loss: LossFunction[Any], hyperparameters: Hyperparameters
    ) -> StepOutcome:
        adopt(self._optimizer.param_groups, self._kinds, hyperparameters)
        self._module.train()
        for share in self.shares(self._module, batch, loss):
            self._scaler.scale(share).backward()
        outcome = self._step()
        self._optimizer.zero_grad()
        if hyperparameters.head_alone:
            groups = zip(self._optimizer.param_groups, self._kinds, strict=True)
            frozen = [parameter for group, kind in groups if not kind.is_head for parameter in group["params"]]
            forget(self._optimizer.state[parameter] for parameter in frozen)
        return outcome

    def _step(self) -> StepOutcome:
        self._sum_partial_gradients()
        groups = self._by_mesh()
        scale = float(self._scaler.get_scale()) if self._scaler.is_enabled() else None
        self._scaler.unscale_(self._optimizer)
        norm = _total_norm(groups)
        if not math.isfinite(float(norm)):
            self._update_scale()
            return StepOutcome(False, math.nan, scale)
        for parameters in groups:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        self._optimizer.step()
        self._update_scale()
        return StepOutcome(True, float(norm), scale)

    def _sum_partial_gradients(self) -> None:
        if self._tensor_mesh is None:
            return
        for parameter in (parameter for module in self._partial for parameter in module.parameters(recurse=False)):
            if parameter.grad is not None:
                grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                dist.all_reduce(grad, group=self._tensor_mesh.get_group())

    def _by_mesh(self) -> list[list[nn.Parameter]]:
        """Group trained parameters by mesh, which operations can't mix."""
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
                groups.setdefault(mesh, []).append(parameter)
        return list(groups.values())

    def _update_scale(self) -> None:
        self._scaler.update()
        if self._scaler.is_enabled() and self._scaler.get_scale() < MIN_LOSS_SCALE:
            self._scaler.update(MIN_LOSS_SCALE)

    @torch.no_grad()
    def infer(self, batch: Sequence[PackedInput], read: Callable[[Any], Tensor] | None = None) -> list[Tensor]:
        self._module.eval()
        return self.outputs(self._module, batch, read)

    def tensors(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Gather one parameter at a time; adapters are unsupported."""
        del merged
        for name, parameter in self._module.named_parameters():
            if name.startswith(HEAD):
                continue
            weight = parameter.detach()
            full = weight.full_tensor() if isinstance(weight, DTensor) else weight
            yield name.removeprefix(WRAPPER), full.to(self._dtype)

    def reset_optimizer(self) -> None:
        forget(self._optimizer.state.values())

    def offload_states(self) -> None:
        self._module.to("cpu")
        move_moments(self._optimizer.state.values(), "cpu")

    def load_states(self) -> None:
        self._module.to(self.device)
        move_moments(self._optimizer.state.values(), self.device)

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self._module, self._optimizer)
        saving.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        if self.rank == 0:
            if self._scaler.is_enabled():
                (folder / SCALER_FILE).write_text(json.dumps(self._scaler.state_dict()))
            write_layout(folder, self._training)

    def load(self, folder: Path) -> None:
        check_layout(folder, self._training)
        model, optimizer = get_state_dict(self._module, self._optimizer)
        state = {"model": model, "optimizer": optimizer}
        reader = StateReader(folder)
        try:
            reader.read_metadata()
            loading.load(state, storage_reader=reader, planner=StatePlanner())
        except (CheckpointException, KeyError, ValueError, FileNotFoundError) as error:
            raise _state_file_error(error) or RuntimeError(f"{folder} has no state of this engine: {error}") from error
        set_state_dict(
            self._module, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        for group in self._optimizer.param_groups:
            group.update(adam_settings(self._training))
        if self._scaler.is_enabled() and (folder / SCALER_FILE).is_file():
            self._scaler.load_state_dict(json.loads((folder / SCALER_FILE).read_text()))


def _total_norm(groups: Sequence[Sequence[nn.Parameter]]) -> Tensor:
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def _layers(module: nn.Module) -> list[nn.Module]:
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList) and len(child)]
    return list(max(lists, key=len)) if lists else []


def _state_file_error(error: BaseException) -> StateFileError | None:
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return next((cause for cause, _ in failures if isinstance(cause, StateFileError)), None)

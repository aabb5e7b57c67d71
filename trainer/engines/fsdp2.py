# pyright: basic
"""Training engine on PyTorch's `fully_shard` (FSDP2), with `deepspeed`'s invariants."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from offbeat.trainer.engines.group_layout import check_layout, write_layout
from offbeat.trainer.engines.offload import OffloadableStates
from offbeat.trainer.engines.param_groups import (
    adam_settings,
    adopt,
    forget,
    parameter_groups,
)
from offbeat.trainer.engines.pipeline import Pipeline
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.engines.rank_passes import assign_passes, first_of, gather_outputs
from offbeat.trainer.engines.sequence_parallel import split_tokens
from offbeat.trainer.engines.state_files import StateFileError, StatePlanner, StateReader
from offbeat.trainer.engines.tensor_parallel import split_model
from offbeat.trainer.models.lora import WeightForm, exported_weights
from offbeat.trainer.models.multimodal import towers
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.stages import cut_stage
from offbeat.trainer.models.value_head import HEAD

WRAPPER = "model."
SCALER_FILE = "loss_scaler.json"
"""Of float16; equal on all ranks."""


class FSDP2Engine(OffloadableStates):
    """`TrainEngine` whose checkpoints load on any number of ranks."""

    def __init__(
        self,
        module: nn.Module,
        training: TrainingArgs,
        ranks: Ranks,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        ulysses_size: int = 1,
    ) -> None:
        """tp_size: consecutive ranks over which each layer is split; pp_size: stages over which layers are distributed;
        ulysses_size: consecutive ranks over which the tokens of a pass are split.

        Raises:
            ValueError: the model or the ranks can't be split so.
        """
        super().__init__(replace(ranks, tp_size=tp_size, pp_size=pp_size, ulysses_size=ulysses_size))
        self._partial: list[nn.Module] = []
        self._dtype = next(module.parameters()).dtype
        self._mesh = self._build_mesh()
        self._pipeline: Pipeline | None = None
        if pp_size > 1:
            module = cut_stage(module, self._ranks.stage, pp_size)
        self._max_grad_norm = training.max_grad_norm
        self._training = training
        self._module = self._shard(_in_float32(module).to(ranks.device))
        self._forward: Callable[[PackedInput], Any] = self._module
        if ulysses_size > 1:
            self._forward = split_tokens(self._module, self._ranks)
        if pp_size > 1:
            self._pipeline = Pipeline(self._module, self._dtype, self._ranks, self._mesh["pipe"].get_group())
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
        """Shard; trained weights are stored in float32, and computed in the model's dtype."""
        dtype = None if self._dtype == torch.float32 else self._dtype
        if self._ranks.tp_size > 1:
            self._partial = split_model(cast(PreTrainedModel, module.model), self._mesh["tensor"])
        settings: dict[str, Any] = {
            "mesh": self._mesh["data"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        }
        for layer in _layers(module):
            fully_shard(layer, **settings)
        fully_shard(module, **settings)
        return module

    def _build_mesh(self) -> DeviceMesh:
        ranks = self._ranks
        if ranks.world_size % ranks.copy_size:
            raise ValueError(
                f"tp_size {ranks.tp_size} x pp_size {ranks.pp_size} x ulysses_size {ranks.ulysses_size} does not divide the "
                f"{ranks.world_size} process(es)"
            )
        sizes = {"data": ranks.num_shards, "pipe": ranks.pp_size, "tensor": ranks.tp_size}
        sizes = {name: size for name, size in sizes.items() if name == "data" or size > 1}
        return init_device_mesh(ranks.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def train(
        self, batch: Sequence[PackedInput], loss: LossFunction[Any], hyperparameters: Hyperparameters
    ) -> StepOutcome:
        adopt(self._optimizer.param_groups, self._kinds, hyperparameters)
        self._module.train()
        if self._pipeline is None:
            for share in self.shares(self._forward, batch, loss):
                self._scaler.scale(share).backward()
        else:
            # The first call makes the scale; stages before the last one have no loss to scale
            self._scaler.scale(torch.zeros(1, device=self.device))
            self._pipeline.train(
                list(assign_passes(batch, self._ranks)),
                lambda forward, output: self._scaler.scale(self.share(forward, output, loss)),
            )
        outcome = self._step()
        self._optimizer.zero_grad()
        if hyperparameters.head_alone:
            groups = zip(self._optimizer.param_groups, self._kinds, strict=True)
            frozen = [parameter for group, kind in groups if not kind.is_head for parameter in group["params"]]
            forget(self._optimizer.state.get(parameter, {}) for parameter in frozen)
        return outcome

    def _step(self) -> StepOutcome:
        self._sum_partial_gradients()
        if self._pipeline is not None:
            self._pipeline.sum_tied_gradients()
        groups = self._by_mesh()
        scale = float(self._scaler.get_scale()) if self._scaler.is_enabled() else None
        self._scaler.unscale_(self._optimizer)
        norm = self._total_norm(groups)
        if not math.isfinite(float(norm)):
            self._update_scale()
            return StepOutcome(False, math.nan, scale)
        for parameters in groups:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        self._optimizer.step()
        self._update_scale()
        return StepOutcome(True, float(norm), scale)

    def _sum_partial_gradients(self) -> None:
        for parameter in (parameter for module in self._partial for parameter in module.parameters(recurse=False)):
            if parameter.grad is not None:
                grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                dist.all_reduce(grad, group=self._mesh["tensor"].get_group())

    def _by_mesh(self) -> list[list[nn.Parameter]]:
        """Group trained parameters by mesh, which operations can't mix."""
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
                groups.setdefault(mesh, []).append(parameter)
        return list(groups.values())

    def _total_norm(self, groups: Sequence[Sequence[nn.Parameter]]) -> Tensor:
        copies = set[nn.Parameter]() if self._pipeline is None else self._pipeline.copies
        counted = [[p.grad for p in group if p.grad is not None and p not in copies] for group in groups]
        norms = [torch.nn.utils.get_total_norm(grads) for grads in counted if grads]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        norm = whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))
        return norm if self._pipeline is None else self._pipeline.total_norm(norm)

    def _update_scale(self) -> None:
        self._scaler.update()
        if self._scaler.is_enabled() and self._scaler.get_scale() < MIN_LOSS_SCALE:
            self._scaler.update(MIN_LOSS_SCALE)

    @torch.no_grad()
    def infer(self, batch: Sequence[PackedInput], read: Callable[[Any], Tensor] | None = None) -> list[Tensor]:
        self._module.eval()
        if self._pipeline is None:
            return self.outputs(self._forward, batch, read)
        passes = list(assign_passes(batch, self._ranks))
        outputs = self._pipeline.infer(passes, read or first_of)
        mine = zip(passes, outputs, strict=True) if self._ranks.is_first_of_copy else ()
        results = {each.index: output for each, output in mine if each.index is not None}
        return gather_outputs(results, self._pipeline.share_rows(outputs), batch, self._ranks)

    def tensors(self, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        """Gather one weight with its adapter at a time."""
        weights = exported_weights(self._module, form, WRAPPER)
        own = [weight for weight in weights if not weight.name.startswith(HEAD)]
        if self._pipeline is not None:
            pairs = self._pipeline.broadcast(own, self._gather)
        else:
            pairs = ((weight.name, weight.tensor(self._gather)) for weight in own)
        for name, tensor in pairs:
            yield name.removeprefix(WRAPPER), tensor

    def _gather(self, part: Tensor) -> Tensor:
        weight = part.detach()
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return full.to(self._dtype) if isinstance(part, nn.Parameter) else full

    def _states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states of model and optimizer."""
        if not self._optimizer.state:
            get_state_dict(self._module, self._optimizer)  # makes the moments by a step, which Adam would count
            forget(self._optimizer.state.values())
        model, optimizer = get_state_dict(self._module, self._optimizer)
        return model, cast(dict[str, Any], optimizer)

    def save(self, folder: Path) -> None:
        model, optimizer = self._states()
        saving.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        if self.rank == 0:
            if self._scaler.is_enabled():
                (folder / SCALER_FILE).write_text(json.dumps(self._scaler.state_dict()))
            write_layout(folder, self._training)

    def load(self, folder: Path) -> None:
        check_layout(folder, self._training)
        model, optimizer = self._states()
        groups = optimizer.pop(
            "param_groups"
        )  # a file has those of the stage that wrote it; all settings are configured
        state = {"model": model, "optimizer": optimizer}
        reader = StateReader(folder)
        try:
            reader.read_metadata()
            loading.load(state, storage_reader=reader, planner=StatePlanner())
        except (CheckpointException, KeyError, ValueError, FileNotFoundError) as error:
            raise _state_file_error(error) or RuntimeError(f"{folder} has no state of this engine: {error}") from error
        optimizer["param_groups"] = groups
        set_state_dict(self._module, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        for group in self._optimizer.param_groups:
            group.update(adam_settings(self._training))
        if self._scaler.is_enabled() and (folder / SCALER_FILE).is_file():
            self._scaler.load_state_dict(json.loads((folder / SCALER_FILE).read_text()))


def _in_float32(module: nn.Module) -> nn.Module:
    """Convert what is trained, and buffers; the base of adapters keeps its dtype."""
    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    for tensor in (*trained, *(buffer for buffer in module.buffers() if buffer.is_floating_point())):
        tensor.data = tensor.data.float()
    return module


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of the language model, and of towers, whose weights are gathered only if they are computed."""
    parts = towers(cast(nn.Module, module.model))
    outside = {id(child) for tower in parts for child in tower.modules()}
    language = [child for child in module.modules() if id(child) not in outside]
    return [layer for part in (language, *(tower.modules() for tower in parts)) for layer in _longest_list(part)]


def _longest_list(modules: Iterable[nn.Module]) -> list[nn.Module]:
    lists = [child for child in modules if isinstance(child, nn.ModuleList) and len(child)]
    return [layer for layer in max(lists, key=len) if list(layer.parameters())] if lists else []


def _state_file_error(error: BaseException) -> StateFileError | None:
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return next((cause for cause, _ in failures if isinstance(cause, StateFileError)), None)

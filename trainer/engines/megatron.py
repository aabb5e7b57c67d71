# pyright: basic
"""Training engine on Megatron's model (`megatron-core`), in one process and float32."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from safetensors.torch import save_file
from torch import Tensor, nn

from offbeat.trainer.config.actor_train import TrainingArgs
from offbeat.trainer.engines.adamw import ClippingAdamW
from offbeat.trainer.engines.base import Hyperparameters, LossFunction, StepOutcome
from offbeat.trainer.engines.group_layout import check_layout, write_layout
from offbeat.trainer.engines.offload import OffloadableStates
from offbeat.trainer.engines.param_groups import (
    adam_settings,
    adopt,
    parameter_groups,
)
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.engines.state_files import load_tensors
from offbeat.trainer.models.lora import WeightForm
from offbeat.trainer.models.megatron import MegatronPolicy
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedPolicy

STATE_FILE = "megatron.safetensors"
WEIGHT, MOMENTS = "weight", ("step", "exp_avg", "exp_avg_sq")
"""Prefixes of names in the state file: of weights, and AdamW's of its tensors."""


class MegatronEngine(OffloadableStates):
    _module: MegatronPolicy
    _optimizer: ClippingAdamW

    def __init__(self, module: PackedPolicy, training: TrainingArgs, ranks: Ranks) -> None:
        """Take over the weights of `module`, which loses them.

        Raises:
            ValueError: there are several processes, or Megatron can't train this model.
        """
        if ranks.world_size > 1:  # also by `attach --nproc` or torchrun, which no check of the configuration sees
            raise ValueError(
                f"megatron_train trains in one process, but the policy has {ranks.world_size}: take one, or fsdp2_train"
            )
        super().__init__(ranks)
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel()
        self._training = training
        self._module = MegatronPolicy(module).to(ranks.device)
        nn.Module.to(module.model, "meta")
        groups = parameter_groups(self._module, training, (nn.Embedding, VocabParallelEmbedding))
        self._kinds = tuple(groups)
        self._optimizer = ClippingAdamW(
            [{"params": group} for group in groups.values()],
            training.max_grad_norm,
            lr=training.learning_rate,
            weight_decay=training.weight_decay,
            fused=True,
            **adam_settings(training),
        )

    def train(
        self, batch: Sequence[PackedInput], loss: LossFunction[Any], hyperparameters: Hyperparameters
    ) -> StepOutcome:
        adopt(self._optimizer.param_groups, self._kinds, hyperparameters)
        self._module.train()
        for share in self.shares(self._module, batch, loss):
            share.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        norm = self._optimizer._global_grad_norm
        return StepOutcome(math.isfinite(norm), norm if math.isfinite(norm) else math.nan)

    @torch.no_grad()
    def infer(self, batch: Sequence[PackedInput], read: Callable[[Any], Tensor] | None = None) -> list[Tensor]:
        self._module.eval()
        return self.outputs(self._module, batch, read)

    def tensors(self, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002
        return self._module.named_weights()

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            values = {WEIGHT: parameter.detach(), **self._optimizer.state[parameter]}
            tensors |= {f"{key}.{name}": value for key, value in values.items()}
        save_file(tensors, folder / STATE_FILE)
        write_layout(folder, self._training)

    def load(self, folder: Path) -> None:
        check_layout(folder, self._training)
        path = folder / STATE_FILE
        if not path.is_file():
            raise RuntimeError(f"{folder} has no state of this engine: {STATE_FILE} is missing")
        tensors = load_tensors(path)
        for name, parameter in self._module.named_parameters():
            weight = tensors.get(f"{WEIGHT}.{name}")
            if weight is None or weight.shape != parameter.shape:
                raise RuntimeError(f"{folder} has no state of this model: {name} is missing, or of another shape")
            parameter.data.copy_(weight)
            moments = {key: tensors.get(f"{key}.{name}") for key in MOMENTS}
            self._optimizer.state[parameter] = {
                key: value.to(parameter.device) for key, value in moments.items() if value is not None
            }

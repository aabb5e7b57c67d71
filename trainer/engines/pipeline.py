# pyright: basic
"""Pipeline parallelism on `torch.distributed.pipelining`.

Invariants: nothing but hidden states and their gradients is sent, since every rank of a copy has the micro-batches; hidden
states are padded on the wire alone, because a schedule's messages have one shape, and computed without padding.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from offbeat.trainer.engines.process_group import Ranks, gather
from offbeat.trainer.engines.rank_passes import Pass, first_of
from offbeat.trainer.models.lora import ExportedWeight

WINDOW = 8
"""Micro-batches per stage in one schedule, which allocates the messages of all."""

Loss = Callable[[Pass, Any], Tensor]


class Pipeline:
    """Stages of one copy of the weights, of which this rank holds one."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, ranks: Ranks, group: dist.ProcessGroup) -> None:
        """dtype: of hidden states; group: one rank of each stage."""
        self._module = module
        self._hidden_size = cast(Any, module).model.config.get_text_config().hidden_size
        self._dtype = dtype
        self._ranks = ranks
        self.device = ranks.device
        self._group = group
        parameters = dict(module.named_parameters())
        first, *_, last = self._of_stages(list(parameters))
        tied = {*first} & {*last}
        self._tied = [parameters[name] for name in sorted(tied)] if self.is_first or self.is_last else []
        self.copies = set(self._tied) if self.is_last else set[nn.Parameter]()
        """Parameters that the first stage holds, too."""
        # NCCL connects all ranks at the first collective
        dist.all_reduce(torch.zeros(1, device=ranks.device), group=group)

    @property
    def is_first(self) -> bool:
        return self._ranks.stage == 0

    @property
    def is_last(self) -> bool:
        return self._ranks.stage == self._ranks.pp_size - 1

    def _rank_of(self, stage: int) -> int:
        """Return the global rank of a stage of this pipeline."""
        return self._ranks.rank + (self._ranks.stage - stage) * self._ranks.tp_size

    def _of_stages(self, own: Any) -> list[Any]:
        """Return what each stage of this pipeline gives, as JSON."""
        of_ranks = gather(self._ranks, json.dumps(own).encode())
        return [json.loads(of_ranks[self._rank_of(stage)]) for stage in range(self._ranks.pp_size)]

    def train(self, passes: Sequence[Pass], loss: Loss) -> None:
        """Accumulate gradients. loss: called on the last stage."""
        for window in self._windows(passes):
            self._run(window, loss, lambda output: output)

    def infer(self, passes: Sequence[Pass], read: Callable[[Any], Tensor]) -> list[Tensor]:
        """Return `read(output)` of each pass on the last stage, nothing on others."""
        results: list[Tensor] = []
        for window in self._windows(passes):
            results += self._run(window, None, read)
        return results

    def share_rows(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return an empty tensor like all outputs, [*rows, 0]. outputs: of the last stage."""
        shape = outputs[0].shape[:-1] if outputs else torch.Size()
        is_double = bool(outputs) and outputs[0].dtype == torch.float64
        shared = torch.tensor([is_double, len(shape), *shape, 0][:3], device=self.device)
        dist.broadcast(shared, src=self._rank_of(self._ranks.pp_size - 1), group=self._group)
        is_double, num_dimensions, *rows = shared.tolist()
        dtype = torch.float64 if is_double else torch.float32
        return torch.empty(*rows[:num_dimensions], 0, dtype=dtype, device=self.device)

    def sum_tied_gradients(self) -> None:
        """Add the gradients of parameters that the first and the last stage hold, on both."""
        for parameter in self._tied:
            if parameter.grad is None:
                continue
            own = cast(DTensor, parameter.grad).to_local()
            other, peer = torch.empty_like(own), self._rank_of(self._ranks.pp_size - 1 if self.is_first else 0)
            exchange = [
                dist.P2POp(dist.isend, own, peer, self._group),
                dist.P2POp(dist.irecv, other, peer, self._group),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            own += other

    def total_norm(self, norm: Tensor) -> Tensor:
        """Return the norm over all stages. norm: this stage's, without `copies`."""
        total = norm.square()
        dist.all_reduce(total, group=self._group)
        return total.sqrt()

    def broadcast(
        self, own: Sequence[ExportedWeight], read: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of all stages. own: those of this stage; read: returns a whole part of one."""
        by_name = {weight.name: weight for weight in own}
        seen = set[str]()
        for stage, weights in enumerate(self._of_stages([self._describe(weight) for weight in own])):
            for name, shape, dtype in weights:
                if name in seen:
                    continue
                seen.add(name)
                is_own = stage == self._ranks.stage
                tensor = (
                    by_name[name].tensor(read).contiguous()
                    if is_own
                    else torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                )
                dist.broadcast(tensor, src=self._rank_of(stage), group=self._group)
                yield name, tensor

    def _describe(self, weight: ExportedWeight) -> tuple[str, tuple[int, ...], str]:
        """Return name, shape and type; buffers keep theirs."""
        part = weight.parts[0]
        dtype = self._dtype if isinstance(part, nn.Parameter) else part.dtype
        return weight.name, weight.shape, str(dtype).removeprefix("torch.")

    def _windows(self, passes: Sequence[Pass]) -> Iterator[Sequence[Pass]]:
        size = WINDOW * self._ranks.pp_size
        return (passes[start : start + size] for start in range(0, len(passes), size))

    def _run(self, passes: Sequence[Pass], loss: Loss | None, read: Callable[[Any], Any]) -> list[Any]:
        ranks, longest = self._ranks, max(len(each.x.tokens) for each in passes)
        submodule = _StageModule(self._module.__call__, passes, longest, self, read)
        # Without values: the schedule takes the shapes, and exchanges none itself
        hidden = torch.empty(1, longest, self._hidden_size, dtype=self._dtype, device="meta", requires_grad=True)
        stage = PipelineStage(
            submodule,
            ranks.stage,
            ranks.pp_size,
            ranks.device,
            input_args=torch.empty(1, dtype=torch.int64, device="meta") if self.is_first else hidden,
            output_args=torch.empty(1, device="meta") if self.is_last else hidden,
            group=self._group,
        )
        stage.stage_index_to_group_rank = {i: ranks.pp_size - 1 - i for i in range(ranks.pp_size)}

        def loss_of(_: Tensor, index: Tensor) -> Tensor:
            assert loss is not None
            return loss(passes[int(index)], submodule.outputs.pop(int(index)))

        # 1F1B keeps activations of as many micro-batches as there are stages; it needs as many
        kind = Schedule1F1B if loss is not None and len(passes) >= ranks.pp_size else ScheduleGPipe
        schedule = kind(stage, len(passes), loss_fn=loss and loss_of, scale_grads=False)
        numbers = torch.arange(len(passes))
        target = numbers if self.is_last and loss is not None else None
        try:
            schedule.step(*([numbers] if self.is_first else []), index=numbers, target=target, return_outputs=False)
        except RuntimeError as error:  # a schedule wraps what a model raises
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None
        return [submodule.outputs[i] for i in sorted(submodule.outputs)]


class _StageModule(nn.Module):
    """Stage as a schedule calls it, with the numbers of micro-batches in place of their tensors."""

    def __init__(
        self,
        forward: Callable[[Any], Any],
        passes: Sequence[Pass],
        longest: int,
        pipeline: Pipeline,
        read: Callable[[Any], Any],
    ) -> None:
        """forward: no module, because a new schedule deletes the gradients of those that it finds."""
        super().__init__()
        self._forward = forward
        self._passes = passes
        self._longest = longest
        self._pipeline = pipeline
        self._read = read
        self.outputs: dict[int, Any] = {}
        """By micro-batch, on the last stage."""

    def forward(self, received: Tensor, index: Tensor) -> Tensor:
        x = self._passes[int(index)].x.to(self._pipeline.device)
        if not self._pipeline.is_first:
            x = replace(x, hidden=received[:, : len(x.tokens)])
        output = self._forward(x)
        if not self._pipeline.is_last:
            return pad(output, (0, 0, 0, self._longest - len(x.tokens)))
        self.outputs[int(index)] = self._read(output)
        return first_of(output)

"""A client's model: its adapter, AdamW's moments and gradients, in one file.

Invariant: saving and loading is exact.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from offbeat.services.errors import CodecError
from offbeat.services.tinker.records import Lora, OptimStep
from offbeat.services.tinker.wire import Datum
from offbeat.trainer.models.logprobs import token_logprobs
from offbeat.trainer.tinker.adapters import AdapterPool
from offbeat.trainer.tinker.folders import write_tensors
from offbeat.trainer.tinker.losses import ADVANTAGES, RATIO_MASK, TARGETS, Loss, Settings, Terms

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of the targets by datum, and the sum of the losses."""

    logprobs: list[Any]
    loss: float


class ScoredPass(NamedTuple):
    """Logprobs of the targets by datum, and the sum of the losses, with their graph."""

    logprobs: list[Tensor]
    total: Tensor

    def detach(self) -> Scores:
        return Scores([each.detach().float().cpu().numpy() for each in self.logprobs], float(self.total.detach()))


@dataclass(frozen=True, slots=True)
class Accumulated:
    """Summed loss, sequences and tokens of the passes whose gradients have accumulated since the last step."""

    loss: float = 0.0
    num_sequences: int = 0
    num_tokens: int = 0


class ClientModel:
    def __init__(self, pool: AdapterPool, lora: Lora) -> None:
        self.lora = lora
        self.version = 0
        """Number of optimizer steps and loads."""
        self.seq_id = -1
        """Last contained command."""
        self.accumulated = Accumulated()
        self._pool = pool
        self.adapter = pool.add(lora)
        """Name in the pool."""
        self.parameters = pool.parameters(self.adapter)
        self._optimizer = self._new_optimizer()

    def close(self) -> None:
        self._pool.remove(self.adapter)

    def compute(
        self, data: Sequence[Datum], loss: Loss, settings: Settings, *, backward: bool, max_tokens: int
    ) -> Scores:
        """Score the targets; backward: add the gradient of the summed losses. max_tokens: per pass.

        A failure leaves the gradients unchanged.
        """
        self._pool.activate(self.adapter)
        with self.accumulating(), torch.set_grad_enabled(backward):
            parts = [self._compute_pass(each, loss, settings) for each in _split(data, max_tokens)]
        scores = Scores([each for part in parts for each in part.logprobs], sum(part.loss for part in parts))
        if backward:
            self.count(scores, data)
        return scores

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add the gradients of the block to the earlier ones, which a failure leaves unchanged."""
        before = {name: parameter.grad for name, parameter in self.parameters.items()}
        self._set_gradients({})
        try:
            yield
        except BaseException:
            self._set_gradients(before)
            raise
        for name, gradient in before.items():
            self._add_gradient(self.parameters[name], gradient)

    def count(self, scores: Scores, data: Sequence[Datum]) -> None:
        """Count what the gradients contain now."""
        earlier, num_tokens = self.accumulated, sum(len(datum.tokens) for datum in data)
        self.accumulated = Accumulated(
            earlier.loss + scores.loss, earlier.num_sequences + len(data), earlier.num_tokens + num_tokens
        )

    def step(self, command: OptimStep) -> dict[str, float]:
        """Take an optimizer step, clear the gradients and return metrics.

        Raises:
            CodecError: no or non-finite gradients; the weights stay.
        """
        parameters = list(self.parameters.values())
        if all(parameter.grad is None for parameter in parameters):
            raise CodecError("there are no gradients: call forward_backward before optim_step")
        total_norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        norm = float(total_norm)
        if not math.isfinite(norm):
            self.clear_gradients()
            raise CodecError(f"the gradient's norm is {norm}: the step is left out, and the gradients are cleared")
        if command.grad_clip_norm > 0:
            nn.utils.clip_grads_with_norm_(parameters, command.grad_clip_norm, total_norm)
        for group in self._optimizer.param_groups:
            group.update(
                lr=command.learning_rate,
                betas=(command.beta1, command.beta2),
                eps=command.eps,
                weight_decay=command.weight_decay,
            )
        self._optimizer.step()
        self.clear_gradients()
        self.version += 1
        return {"grad_norm": norm, "version": float(self.version)}

    def clear_gradients(self) -> None:
        self._set_gradients({})
        self.accumulated = Accumulated()

    def save_adapter(self, folder: Path) -> None:
        self._pool.save(folder, {name: each.detach() for name, each in self.parameters.items()}, self.lora.rank)

    def save(self, path: Path) -> None:
        """Replace the state on disk."""
        tensors = {f"parameter.{name}": each.detach() for name, each in self.parameters.items()}
        steps: dict[str, float] = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                tensors[f"grad.{name}"] = parameter.grad
            if state := self._optimizer.state.get(parameter):
                tensors |= {f"{key}.{name}": state[key] for key in MOMENTS}
                steps[name] = float(state["step"])
        about = {
            "version": self.version,
            "seq_id": self.seq_id,
            "steps": steps,
            "accumulated": asdict(self.accumulated),
        }
        write_tensors(path, tensors, {"about": json.dumps(about)})

    def load(self, path: Path) -> None:
        """Load a state of the same rank and layers."""
        about = self._load_weights(path)
        self.version, self.seq_id = about["version"], about["seq_id"]
        tensors = load_file(path)
        self.accumulated = Accumulated(**about.get("accumulated", {}))  # states of earlier builds lack it
        self._load_moments(tensors, about["steps"])
        self._set_gradients(
            {
                name.removeprefix("grad."): each.to(self._pool.device, torch.float32)
                for name, each in tensors.items()
                if name.startswith("grad.")
            }
        )

    def adopt(self, path: Path, *, with_optimizer: bool) -> None:
        """Load the weights of a saved state, and its moments or none; clear the gradients.

        Raises:
            CodecError: it is of another rank or other layers.
        """
        about = self._load_weights(path)
        self._load_moments(load_file(path) if with_optimizer else {}, about["steps"] if with_optimizer else {})
        self.clear_gradients()
        self.version += 1

    def _compute_pass(self, data: Sequence[Datum], loss: Loss, settings: Settings) -> Scores:
        tokens, borders = pack(data)
        logits = self._pool.logits(tokens.to(self._pool.device), borders.to(self._pool.device))
        scored = score(logits, data, loss, settings)
        if torch.is_grad_enabled():
            scored.total.backward()
        return scored.detach()

    def _add_gradient(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def _set_gradients(self, gradients: dict[str, Any]) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)

    def _load_weights(self, path: Path) -> dict[str, Any]:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["about"])
            shapes = {
                name.removeprefix("parameter."): tuple(file.get_slice(name).get_shape())
                for name in file.keys()  # noqa: SIM118
                if name.startswith("parameter.")
            }
            if shapes != {name: tuple(each.shape) for name, each in self.parameters.items()}:
                raise CodecError("the checkpoint's adapter is of another rank or other layers than the model's")
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(file.get_tensor(f"parameter.{name}"))
        return about

    def _load_moments(self, tensors: dict[str, Tensor], steps: dict[str, float]) -> None:
        self._optimizer = self._new_optimizer()
        for name, count in steps.items():
            parameter = self.parameters[name]
            moments = {
                key: tensors[f"{key}.{name}"].to(parameter.device, parameter.dtype, copy=True) for key in MOMENTS
            }
            self._optimizer.state[parameter] = {"step": torch.tensor(count), **moments}

    def _new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(list(self.parameters.values()))


def _split(data: Sequence[Datum], max_tokens: int) -> list[list[Datum]]:
    passes: list[list[Datum]] = []
    size = 0
    for datum in data:
        length = len(datum.tokens)
        if not passes or size + length > max_tokens:
            passes.append([])
            size = 0
        passes[-1].append(datum)
        size += length
    return passes


def pack(data: Sequence[Datum]) -> tuple[Tensor, Tensor]:
    """Return the tokens, [N] int64, and the sequences' borders, [B + 1] int64."""
    tokens = torch.cat([_tensor(datum.tokens) for datum in data]).long()
    return tokens, torch.tensor([0, *(len(datum.tokens) for datum in data)]).cumsum(0)


def score(logits: Tensor, data: Sequence[Datum], loss: Loss, settings: Settings) -> ScoredPass:
    """logits: [N, V], of the packed sequences."""
    scored = [
        _score(part, _tensor(datum.inputs[TARGETS]).to(logits.device))
        for part, datum in zip(logits.split([len(datum.tokens) for datum in data]), data, strict=True)
    ]
    return ScoredPass(scored, loss.compute(_join(scored, data, loss), settings).sum())


def _score(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the targets' logprobs. logits: [N, V]; targets: [N] or [N, K] -> like them"""
    if targets.ndim == 1:
        return token_logprobs(logits, targets)[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1).gather(1, targets)


def _join(scored: Sequence[Tensor], data: Sequence[Datum], loss: Loss) -> Terms:
    logprobs = torch.cat([each.flatten() for each in scored])
    sequence = torch.arange(len(data)).repeat_interleave(torch.tensor([each.numel() for each in scored]))
    given = {name: torch.cat([_input(datum, name).flatten() for datum in data]).to(logprobs) for name in loss.inputs}
    return Terms(logprobs, given, sequence.to(logprobs.device))


def _input(datum: Datum, name: str) -> Tensor:
    """Return an input; `OPTIONAL` ones have a default."""
    if name in datum.inputs:
        return _tensor(datum.inputs[name])
    if name == RATIO_MASK:
        return _tensor(datum.inputs[ADVANTAGES]) != 0
    return torch.ones(datum.inputs[TARGETS].shape)


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(array.copy())

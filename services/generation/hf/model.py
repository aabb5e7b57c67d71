"""The policy as a transformers model over rows of the KV cache.

Invariant: a version is complete and fits the model before anything of it is used.
"""

# pyright: basic
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.services.errors import GenerationError, WeightsError
from offbeat.services.generation.adapter_settings import ADAPTER_WEIGHTS, PREFIX, read_scaling
from offbeat.services.generation.engine import PromptScores
from offbeat.services.generation.hf.attention import ROW_ATTENTION, KvCache
from offbeat.services.generation.hf.layout import Chunk, StepLayout
from offbeat.services.generation.hf.limits import architecture_problem
from offbeat.services.generation.hf.sampler import find_top
from offbeat.services.generation.kv_cache import bytes_per_token, text_config
from offbeat.services.generation.tensor_file import TensorFile

BASE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank addition to a layer: down [r, in], up [out, r]."""

    down: Tensor
    up: Tensor
    scaling: float

    def __call__(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + self.delta(inputs[0])

    def delta(self, inputs: Tensor) -> Tensor:
        return self.scaling * (inputs @ self.down.T) @ self.up.T


class Route(NamedTuple):
    """Adapter of some rows. layers: by path; tokens, chunks: int64 indices in the pass."""

    layers: Mapping[str, Adapter]
    tokens: Tensor
    chunks: Tensor


@dataclass(frozen=True, slots=True)
class Version:
    """Weights read from a file, and adapters by layer."""

    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    adapters: dict[str, Adapter] = field(default_factory=dict[str, Adapter])


class PolicyModel:
    def __init__(self, folder: Path, dtype: torch.dtype, *, reads_weights: bool = False) -> None:
        """Make the folder's architecture with random weights, or with the folder's.

        Raises:
            GenerationError: it can't be served.
        """
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        architecture = config.to_dict()
        if problem := architecture_problem(architecture):
            raise GenerationError(f"{folder}: {problem}")
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ROW_ATTENTION}
        made: Any = (
            AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
            if reads_weights
            else AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        )
        self._model: Any = made.eval()
        if not self._model._supports_attention_backend:
            raise GenerationError(
                f"transformers does not allow replacing the attention of {config.model_type}: take vllm"
            )
        self._weights: dict[str, Tensor] = dict(self._model.named_parameters())
        state: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        self._weights |= {name: each for name, each in state.items() if not isinstance(each, nn.Parameter)}  # buffers
        self._tied = state.keys() - self._weights.keys()
        self._hooks: list[Any] = []
        self._routes: Sequence[Route] = ()
        self._routed: set[str] = set()
        self.dtype = dtype
        self.vocab_size: int = text_config(architecture)["vocab_size"]
        self.bytes_per_token = bytes_per_token(architecture, dtype.itemsize)

    @torch.inference_mode()
    def logits(self, layout: StepLayout, cache: KvCache, routes: Sequence[Route] = ()) -> Tensor:
        """Compute a pass; return the logits after each chunk's last token, [chunks, V]."""
        return self._forward(layout, cache, routes, layout.last)

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], layers: Mapping[str, Adapter], num_top: int = 0) -> PromptScores:
        """Score a sequence's tokens but the first, in a cache of its own."""
        layout, rows = StepLayout([Chunk(0, 0, tokens)], len(tokens)), torch.arange(len(tokens))
        logits = self._forward(layout, KvCache(1, len(tokens)), [Route(layers, rows, rows[:-1])], rows[:-1])
        logprobs = logits.float().log_softmax(-1)
        scores = logprobs.gather(-1, layout.token_ids[0, 1:, None])[:, 0].tolist()
        return PromptScores(scores, find_top(logprobs, num_top))

    def _forward(self, layout: StepLayout, cache: KvCache, routes: Sequence[Route], kept: Tensor) -> Tensor:
        """Return the logits after tokens `kept`, [n, V]."""
        self._routes = routes
        output = self._model(
            input_ids=layout.token_ids,
            position_ids=layout.position_ids,
            use_cache=False,
            logits_to_keep=kept,
            layout=layout,
            cache=cache,
        )
        return output.logits[0]

    def read(self, path: Path) -> Version:
        """Read a file of weights or an adapter's folder.

        Raises:
            WeightsError: it does not fit the model.
        """
        if not path.is_dir():
            return Version(self._read_weights(path))
        base = path / BASE
        return Version(self._read_weights(base) if base.exists() else {}, self.read_adapters(path))

    def exchange(self, version: Version) -> None:
        """Use a version; no pass may run."""
        for name, tensor in version.weights.items():
            self._weights[name].data = tensor
        for hook in self._hooks:
            hook.remove()
        modules = dict(self._model.named_modules())
        self._hooks = [modules[name].register_forward_hook(each) for name, each in version.adapters.items()]

    def _read_weights(self, path: Path) -> dict[str, Tensor]:
        with TensorFile(path) as file:
            names = set(file.names()) - self._tied
            if missing := sorted(self._weights.keys() - names):
                raise WeightsError(f"{missing[0]} is not in the file {path.name}, nor are {len(missing) - 1} others")
            if unknown := sorted(names - self._weights.keys()):
                raise WeightsError(f"{path.name} holds {unknown[0]}, which the model has not")
            weights = {
                name: file.get_tensor(name).to(self.dtype, copy=True)
                if isinstance(own, nn.Parameter)
                else file.get_tensor(name).clone()
                for name, own in self._weights.items()
            }
        for name, tensor in weights.items():
            if tensor.shape != self._weights[name].shape:
                raise WeightsError(
                    f"{name} has shape {list(tensor.shape)} in the file, {list(self._weights[name].shape)} in the model"
                )
        return weights

    def route(self, layers: Mapping[str, Adapter]) -> None:
        """Let passes apply adapters of these layers; no pass may run."""
        modules, head = dict(self._model.named_modules()), self._model.get_output_embeddings()
        for path in layers.keys() - self._routed:
            hook = partial(self._apply_routes, path, modules[path] is head)
            modules[path].register_forward_hook(hook)
            self._routed.add(path)

    def _apply_routes(self, path: str, is_head: bool, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Add to the rows' outputs in place; the head's input is each chunk's last token, [1, T, in] or [T, in]."""
        added, given = output.view(-1, output.shape[-1]), inputs[0].flatten(0, -2)
        for layers, tokens, chunks in self._routes:
            if (adapter := layers.get(path)) is not None:
                rows = chunks if is_head else tokens
                added.index_add_(0, rows, adapter.delta(given.index_select(0, rows)))

    def read_adapters(self, folder: Path) -> dict[str, Adapter]:
        """Read a PEFT adapter; raises WeightsError if it does not fit the model."""
        scaling = read_scaling(folder)
        modules = dict(self._model.named_modules())
        with TensorFile(folder / ADAPTER_WEIGHTS) as file:
            tensors = {name.removeprefix(PREFIX): tensor.to(self.dtype, copy=True) for name, tensor in file.items()}
        paths = sorted({name.rsplit(".", 2)[0] for name in tensors})
        if other := [path for path in paths if not isinstance(modules.get(path), nn.Linear)]:
            raise WeightsError(f"{other[0]} takes no adapter here")
        adapters = {
            path: Adapter(tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"], scaling) for path in paths
        }
        for path, adapter in adapters.items():
            size, wanted = (adapter.up.shape[0], adapter.down.shape[1]), tuple(modules[path].weight.shape)
            if size != wanted:
                raise WeightsError(f"{path} has shape {list(size)} in the adapter, {list(wanted)} in the model")
        return adapters

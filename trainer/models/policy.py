"""Causal language model and critic over packed tokens.

Invariant: parameter names, after the wrapper's prefix, are Hugging Face's.
"""

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.services.chat.vision import IMAGE_INPUT_ADVICE
from offbeat.trainer.models.distillation import teacher_divergence, top_logprobs
from offbeat.trainer.models.divergence import ReferenceStates, full_kl
from offbeat.trainer.models.logprobs import token_logprobs
from offbeat.trainer.models.packing import PackedInput, Packing
from offbeat.trainer.models.router_replay import RouterReplay
from offbeat.trainer.models.value_head import ValueHead, last_hidden_states


class Sampled(NamedTuple):
    """Outputs of sampled tokens, [M] float32, in nats. divergences: full KL to the reference, or from the teachers."""

    logprobs: Tensor
    entropies: Tensor
    divergences: Tensor | None = None
    values: Tensor | None = None
    next_values: Tensor | None = None


def packed_kwargs(packing: Packing) -> dict[str, Any]:
    """Return arguments for every attention implementation."""
    return {
        "position_ids": packing.computed_positions,
        "use_cache": False,
        "packing": packing,
        "cu_seq_lens_q": packing.cu_seqlens,
        "cu_seq_lens_k": packing.cu_seqlens,
        "max_length_q": packing.max_len,
        "max_length_k": packing.max_len,
    }


def model_input(x: PackedInput) -> dict[str, Tensor]:
    """Return the model's first argument: tokens, or in later pipeline stages hidden states."""
    return {"input_ids": x.computed_tokens[None]} if x.hidden is None else {"inputs_embeds": x.hidden}


class PackedPolicy(nn.Module):
    """Policy over packed tokens. temperature: sampling default."""

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.value_head: ValueHead | None = None
        self._replay: RouterReplay | None = None

    def add_value_head(self) -> None:
        self.value_head = ValueHead(self.model.config.get_text_config().hidden_size)

    def forward(self, x: PackedInput) -> Sampled | tuple[Tensor]:
        if x.top is not None:
            return (top_logprobs(self.logits(x), x.top),)
        if self.value_head is None:
            return self._score(x, self.logits(x))
        with last_hidden_states(self.model) as states:
            logits = self.logits(x)
        hidden = states[0][0].index_select(0, x.valued)
        values = self.value_head(hidden.detach() if x.head_alone else hidden)
        next_values = None
        if x.with_next:
            values, next_values = (half.clone() for half in values.chunk(2))  # FSDP2 hooks into outputs: no views
        return self._score(x, logits)._replace(values=values, next_values=next_values)

    def _score(self, x: PackedInput, logits: Tensor) -> Sampled:
        temperature: float | Tensor = self.temperature
        if x.temperatures is not None:
            temperature = x.temperatures.nan_to_num(nan=self.temperature)
        divergences = None if x.reference is None else full_kl(logits, x.reference, temperature)
        if x.distillation is not None:
            divergences = teacher_divergence(logits, x.distillation)
        return Sampled(*token_logprobs(logits, x.tokens[x.positions], temperature), divergences)

    def logits(self, x: PackedInput) -> Tensor:
        """Return the logits [M, V] that predict `x.positions`.

        Raises:
            ValueError: no image input, or the engine's experts are of another model.
        """
        if x.images:
            raise ValueError(f"the trajectory has images, but this policy has no image input: {IMAGE_INPUT_ADVICE}")
        if x.routing is not None and self._replay is None:
            self._replay = RouterReplay(self.model)
        if self._replay is not None:
            self._replay.set(x.routing)
        return self.model(**model_input(x), logits_to_keep=x.predictors, **packed_kwargs(x.packing)).logits[0]

    @torch.no_grad()
    def hidden_states(self, x: PackedInput) -> ReferenceStates:
        """Return vocabulary distributions, for a full KL.

        Raises:
            ValueError: logits are not hidden states @ output embedding.
        """
        with last_hidden_states(self.model) as states:
            logits = self.logits(replace(x, positions=x.positions[:1]))  # one token, to verify the product
        rows = states[0][0].index_select(0, x.predictors)
        head = cast(nn.Linear, self.model.get_output_embeddings())
        if not torch.allclose(rows[:1] @ head.weight.T, logits, rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"full KL is not supported for {type(self.model).__name__}: its logits are not the product of its last "
                "hidden states and its output embedding; take k3"
            )
        return ReferenceStates(rows, head.weight.detach())


class PackedCritic(nn.Module):
    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.model = backbone
        self.value_head = ValueHead(backbone.config.get_text_config().hidden_size)

    def forward(self, x: PackedInput) -> Tensor:
        """Return values before `x.positions`, [M] float32, or before and after, [2, M]."""
        hidden = self.model(**model_input(x), **packed_kwargs(x.packing)).last_hidden_state[0]
        values = self.value_head(hidden.index_select(0, x.valued))
        return values.view(2, -1).clone() if x.with_next else values  # FSDP2 hooks into outputs: no views

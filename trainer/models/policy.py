"""A causal language model, and a critic over its backbone, that read packed tokens.

Invariants: no layer but attention sees padding; logits exist only where a sampled token is predicted; parameter names,
less the wrapper's own prefix, are Hugging Face's.
"""

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.trainer.models.divergence import ReferenceStates, full_kl
from offbeat.trainer.models.logprobs import token_logprobs
from offbeat.trainer.models.packing import PackedInput, Packing
from offbeat.trainer.models.value_head import ValueHead, last_hidden_states


class Sampled(NamedTuple):
    """What the policy says of sampled tokens: log-probability, entropy, and KL of all that it could have said there to what
    the input's anchor says, if it has one, in nats; and what it expects before each, if it has a value head. [M] float32
    each."""

    logprobs: Tensor
    entropies: Tensor
    divergences: Tensor | None = None
    values: Tensor | None = None


def packed_kwargs(packing: Packing) -> dict[str, Any]:
    """How each of the attention implementations learns of the sequences' borders."""
    return {
        "position_ids": packing.position_ids,
        "use_cache": False,
        "packing": packing,
        "cu_seq_lens_q": packing.cu_seqlens,
        "cu_seq_lens_k": packing.cu_seqlens,
        "max_length_q": packing.max_len,
        "max_length_k": packing.max_len,
    }


class PackedPolicy(nn.Module):
    """Tokens in, log-probabilities of the sampled ones out, and with a value head what is expected before each of them.

    temperature: that tokens were sampled at where the input does not say otherwise; logits are divided by it.
    """

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.value_head: ValueHead | None = None

    def add_value_head(self) -> None:
        """From now on, values come with the log-probabilities, of the same forward pass."""
        self.value_head = ValueHead(self.model.config.get_text_config().hidden_size)

    def forward(self, x: PackedInput) -> Sampled:
        """Of the tokens at `x.positions`, each given all tokens of its sequence before it."""
        if self.value_head is None:
            return self._sampled(x, self.logits(x))
        with last_hidden_states(self.model) as kept:
            logits = self.logits(x)
        hidden = kept[0][0].index_select(0, x.predictors)
        values = self.value_head(hidden.detach() if x.head_alone else hidden)
        return self._sampled(x, logits)._replace(values=values)

    def _sampled(self, x: PackedInput, logits: Tensor) -> Sampled:
        temperature: float | Tensor = self.temperature
        if x.temperatures is not None:
            temperature = x.temperatures.nan_to_num(nan=self.temperature)
        divergences = None if x.anchor is None else full_kl(logits, x.anchor, temperature)
        return Sampled(*token_logprobs(logits, x.tokens[x.positions], temperature), divergences)

    def logits(self, x: PackedInput) -> Tensor:
        """[M, V]: what is said before each of the tokens at `x.positions`."""
        if x.pictures:
            raise ValueError("the trajectory holds pictures, and this policy reads none")
        return self.model(x.tokens[None], logits_to_keep=x.predictors, **packed_kwargs(x.packing)).logits[0]

    @torch.no_grad()
    def anchor(self, x: PackedInput) -> ReferenceStates:
        """What another policy is held against: this one's distributions over the whole vocabulary.

        Raises:
            ValueError: the model's logits are more than its last hidden states times its output embedding.
        """
        with last_hidden_states(self.model) as kept:
            logits = self.logits(replace(x, positions=x.positions[:1]))  # of one token, to see what they are made of
        rows = kept[0][0].index_select(0, x.predictors)
        head = cast(nn.Linear, self.model.get_output_embeddings())
        if not torch.allclose(rows[:1] @ head.weight.T, logits, rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"a full KL can't read the logits of {type(self.model).__name__}, which are more than its last "
                "hidden states times its output embedding: take k3"
            )
        return ReferenceStates(rows, head.weight.detach())


class PackedCritic(nn.Module):
    """The policy's architecture with a scalar head, which says zero before it has learned."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.model = backbone
        self.value_head = ValueHead(backbone.config.get_text_config().hidden_size)

    def forward(self, x: PackedInput) -> Tensor:
        """The value of what stands before each of the tokens at `x.positions`: [M] float32."""
        hidden = self.model(x.tokens[None], **packed_kwargs(x.packing)).last_hidden_state[0]
        return self.value_head(hidden.index_select(0, x.predictors))

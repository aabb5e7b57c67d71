# pyright: basic
"""Megatron's GPTModel over packed tokens, with the weights of a transformers model.

Invariants: weights are exported by the transformers model's names; a token attends only to its own sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from offbeat.trainer.config.megatron_model import MOE_MODELS, find_megatron_obstacle
from offbeat.trainer.models.attention import packed_attention
from offbeat.trainer.models.packing import PackedInput, Packing
from offbeat.trainer.models.policy import PackedPolicy


class WeightRule(NamedTuple):
    """Parameters of Megatron's and the same weights of transformers'."""

    parameters: tuple[str, ...]
    names: tuple[str, ...]
    layout: Literal["rows", "heads", "experts"] = "rows"
    """rows: one parameter has the named weights below each other, with as many rows each; heads: it has query, key and
    value of each group of heads; experts: the parameters are stacked in one weight.
    """


class PackedCoreAttention(nn.Module):
    """Attention of a layer specification, in place of Megatron's, which computes no packed sequences on a CPU."""

    packing: Packing
    """Of the current pass."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend: query [N, 1, H, D], key and value [N, 1, K, D] -> [N, 1, H D]."""
        q, k, v = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        out = packed_attention(self, q, k, v, None, packing=self.packing)[0]
        return out.transpose(0, 1).flatten(2)


class InPlaceRouter(TopKRouter):
    """Router whose weight stays on its device; Megatron's moves it to a GPU."""

    def gating(self, input: Tensor) -> Tensor:
        return linear(input, self.weight)


class MegatronPolicy(PackedPolicy):
    """Policy whose model is Megatron's, with the weights of a transformers policy."""

    def __init__(self, source: PackedPolicy) -> None:
        """Copy the weights of `source`.

        Raises:
            ValueError: Megatron can't train this model.
        """
        model, config = source.model, source.model.config
        if obstacle := find_megatron_obstacle(config.to_dict()):
            raise ValueError(f"megatron_train: {obstacle}")
        super().__init__(cast(PreTrainedModel, _build(model)), source.temperature)
        self._rules = tuple(_rules(config))
        self._num_groups = int(config.num_key_value_heads)
        self.register_buffer("_inverse_frequencies", _inverse_frequencies(model), persistent=False)
        self._copy_weights({name: weight.detach() for name, weight in model.named_parameters()})
        for hook in model.base_model._forward_pre_hooks.values():  # the watchdog's
            self._gpt.decoder.register_forward_pre_hook(hook)

    @property
    def _gpt(self) -> GPTModel:
        return cast(GPTModel, self.model)

    def logits(self, x: PackedInput) -> Tensor:
        if x.images:
            raise ValueError("the trajectory has images, but this policy has no image input")
        gpt = self._gpt
        for layer in cast(Any, gpt.decoder.layers):
            layer.self_attention.core_attention.packing = x.packing
        embedded = gpt.embedding(input_ids=x.tokens[None], position_ids=None)
        hidden = gpt.decoder(embedded, None, rotary_pos_emb=self._angles(x.packing.position_ids[0]))
        rows = hidden.index_select(0, x.predictors)
        weight = gpt.shared_embedding_or_output_weight() if gpt.share_embeddings_and_output_weights else None
        return gpt.output_layer(rows, weight=weight)[0][:, 0]

    def _angles(self, positions: Tensor) -> Tensor:
        """Return the angles [N, 1, 1, D] of rotary embeddings."""
        angles = torch.outer(positions.float(), cast(Tensor, self._inverse_frequencies))
        return torch.cat([angles, angles], -1)[:, None, None]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by transformers' names."""
        parameters = dict(self._gpt.named_parameters())
        for rule in self._rules:
            weights = self._export(rule, [parameters[name].detach() for name in rule.parameters])
            yield from zip(rule.names, weights, strict=True)

    @torch.no_grad()
    def _copy_weights(self, weights: dict[str, Tensor]) -> None:
        parameters = dict(self._gpt.named_parameters())
        for rule in self._rules:
            values = self._convert(rule, [weights.pop(name) for name in rule.names])
            for name, value in zip(rule.parameters, values, strict=True):
                parameters.pop(name).copy_(value)
        if parameters or weights:
            raise ValueError(f"megatron_train: no place for the weights {', '.join((*parameters, *weights))}")

    def _convert(self, rule: WeightRule, weights: list[Tensor]) -> Sequence[Tensor]:
        if rule.layout == "experts":
            return weights[0].unbind()
        if rule.layout == "rows":
            return [torch.cat(weights)]
        return [torch.cat([weight.unflatten(0, (self._num_groups, -1)) for weight in weights], 1).flatten(0, 1)]

    def _export(self, rule: WeightRule, parameters: list[Tensor]) -> Sequence[Tensor]:
        if rule.layout == "experts":
            return [torch.stack(parameters)]
        if rule.layout == "rows":
            return parameters[0].chunk(len(rule.names))
        groups = parameters[0].unflatten(0, (self._num_groups, -1))
        size = cast(int, self._gpt.config.kv_channels)
        queries = groups.shape[1] - 2 * size
        return [part.flatten(0, 1) for part in groups.split([queries, size, size], 1)]


def _build(model: PreTrainedModel) -> GPTModel:
    config = model.config
    is_moe = config.model_type in MOE_MODELS
    attention = cast(Any, model.base_model).layers[0].self_attn
    has_norms = hasattr(attention, "q_norm")
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_experts if is_moe else None, qk_layernorm=has_norms, normalization="RMSNorm"
    )
    layer: Any = spec.submodules
    layer.self_attention.submodules.core_attention = PackedCoreAttention
    if is_moe:
        layer.mlp.submodules.router = InPlaceRouter
    settings: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": attention.head_dim,
        "qk_layernorm": has_norms,
        "add_qkv_bias": attention.q_proj.bias is not None,
        "layernorm_epsilon": config.rms_norm_eps,
        **(_moe_settings(config) if is_moe else {}),
    }
    return GPTModel(
        TransformerConfig(**settings, **FIXED_SETTINGS),
        spec,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="none",  # `_angles` gives those of each sequence
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        parallel_output=False,
    )


FIXED_SETTINGS: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
}
"""The same for all models; kernels that need Transformer Engine or a GPU are off."""


def _moe_settings(config: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",  # the others need CUDA streams
    }
    if config.model_type == "qwen2_moe":
        settings["moe_shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
        settings["moe_shared_expert_gate"] = True
    return settings


def _inverse_frequencies(model: PreTrainedModel) -> Tensor:
    return cast(Any, model.base_model).rotary_emb.inv_freq.float().clone()


def _rules(config: Any) -> Iterator[WeightRule]:
    yield _rule("embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for number in range(config.num_hidden_layers):
        yield from _layer_rules(config, f"decoder.layers.{number}.", f"model.layers.{number}.")
    yield _rule("decoder.final_layernorm.weight", "model.norm.weight")
    if not config.tie_word_embeddings:
        yield _rule("output_layer.weight", "lm_head.weight")


def _layer_rules(config: Any, ours: str, theirs: str) -> Iterator[WeightRule]:
    mine, attention = f"{ours}self_attention.", f"{theirs}self_attn."
    yield _rule(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight")
    has_biases = config.model_type == "qwen2" or getattr(config, "qkv_bias", False)
    for kind in ("weight", "bias") if has_biases else ("weight",):
        names = tuple(f"{attention}{part}_proj.{kind}" for part in "qkv")
        yield WeightRule((f"{mine}linear_qkv.{kind}",), names, "heads")
    if config.model_type.startswith("qwen3"):
        for part in "qk":
            yield _rule(f"{mine}{part}_layernorm.weight", f"{attention}{part}_norm.weight")
    yield _rule(f"{mine}linear_proj.weight", f"{attention}o_proj.weight")
    yield _rule(f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight")
    if config.model_type not in MOE_MODELS:
        yield from _mlp_rules(f"{ours}mlp.", f"{theirs}mlp.")
        return
    yield _rule(f"{ours}mlp.router.weight", f"{theirs}mlp.gate.weight")
    experts = [f"{ours}mlp.experts.local_experts.{number}." for number in range(config.num_experts)]
    for layer, name in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        parameters = tuple(f"{expert}{layer}.weight" for expert in experts)
        yield WeightRule(parameters, (f"{theirs}mlp.experts.{name}",), "experts")
    if config.model_type == "qwen2_moe":
        yield from _mlp_rules(f"{ours}mlp.shared_experts.", f"{theirs}mlp.shared_expert.")
        yield _rule(f"{ours}mlp.shared_experts.gate_weight", f"{theirs}mlp.shared_expert_gate.weight")


def _mlp_rules(ours: str, theirs: str) -> Iterator[WeightRule]:
    yield _rule(f"{ours}linear_fc1.weight", f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
    yield _rule(f"{ours}linear_fc2.weight", f"{theirs}down_proj.weight")


def _rule(parameter: str, *names: str) -> WeightRule:
    return WeightRule((parameter,), names)

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from offbeat.services.chat.vision import ImageProcessor, model_family, reads_images
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.roles import CriticModelType
from offbeat.trainer.models.attention import PACKED_ATTENTION
from offbeat.trainer.models.initial_adapter import load_initial_adapter
from offbeat.trainer.models.limits import needs_eager_attention, packing_problem
from offbeat.trainer.models.lora import add_adapters, base_paths
from offbeat.trainer.models.multimodal import freeze_towers, is_trained_on_text
from offbeat.trainer.models.policy import PackedCritic, PackedPolicy
from offbeat.trainer.models.quantization import quantize
from offbeat.trainer.models.recurrent_layers import pack_recurrent_layers
from offbeat.trainer.models.reward_model import PackedRewardModel
from offbeat.trainer.models.vision import PackedVisionPolicy

PREFIX_SHARING_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Tested with `shared_prefix`."""
CLASSIFIERS: dict[CriticModelType, Any] = {
    "auto_sequence_classification": AutoModelForSequenceClassification,
    "auto_token_classification": AutoModelForTokenClassification,
}

CPU = torch.device("cpu")
RANDOM = ("drop", "jitter")
"""Parts of the names of modules' settings that make training random."""


def policy_loader(folder: Path) -> Any:
    """Return transformers' loader of a policy."""
    return AutoModelForImageTextToText if _is_multimodal(folder) else AutoModelForCausalLM


def _is_multimodal(folder: Path) -> bool:
    return model_family(folder) is not None or is_trained_on_text(folder)


def critic_loader(model_type: CriticModelType | None) -> Any:
    """Return transformers' loader of a critic."""
    return AutoModel if model_type is None else CLASSIFIERS[model_type]


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def read_vocab_size(folder: Path) -> int:
    """Return the number of logits."""
    return int(AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config().vocab_size)


def load_policy(
    folder: Path,
    args: ModelArgs,
    seed: int,
    temperature: float = 1.0,
    device: torch.device = CPU,
    *,
    value_head: bool = False,
) -> PackedPolicy:
    """Load a policy into the host's memory, but for quantized weights; `seed` initializes missing ones.

    device: where weights are quantized, and stay.

    Raises:
        ValueError: the model can't be packed, lacks buffers, or adapters or a shared prefix do not fit.
    """
    policy = _load_policy(folder, args, seed, temperature, device)
    if value_head:
        policy.add_value_head()
    return policy


def load_critic(folder: Path, args: ModelArgs, seed: int, model_type: CriticModelType | None = None) -> PackedCritic:
    """Load a backbone with a zero value head, or with that of a classifier; raises ValueError if it has none."""
    model = _load(critic_loader(model_type), folder, args, seed)
    if model_type is None:
        return PackedCritic(model)
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear) or score.out_features != 1:
        raise ValueError(f"{type(model).__name__} in {folder} has no linear `score` with one label")
    critic = PackedCritic(cast(PreTrainedModel, model.base_model))
    with torch.no_grad():
        critic.value_head.weight.copy_(score.weight)
        if score.bias is not None:
            critic.value_head.bias.copy_(score.bias)
    return critic


def load_reward_model(folder: Path, args: ModelArgs, seed: int) -> PackedRewardModel:
    """Load a reward model, or a language model with a new head, which `seed` initializes.

    Raises:
        ValueError: the architecture has no such head.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PackedRewardModel(_load(AutoModelForSequenceClassification, folder, args, seed, num_labels=1))


def _load_policy(folder: Path, args: ModelArgs, seed: int, temperature: float, device: torch.device) -> PackedPolicy:
    auto = policy_loader(folder)
    model = _load(auto, folder, args, seed)
    if args.lora_target is not None:
        add_adapters(model, args, seed)
    if args.adapter_name_or_path is not None:
        load_initial_adapter(model, args, Path(args.adapter_name_or_path))
    if args.load_in_4bit:
        quantize(model, base_paths(model), args, device)
    if reads_images(folder, args.image_input):
        return PackedVisionPolicy(model, temperature, ImageProcessor(folder))
    return PackedPolicy(model, temperature)


def _load(auto: Any, folder: Path, args: ModelArgs, seed: int, **settings: int) -> PreTrainedModel:
    """settings: of the model's config."""
    if problem := packing_problem(auto, folder, args.attn_implementation):
        raise ValueError(f"{folder}: {problem}")
    attention = _attention_implementation(args, has_vision=_is_multimodal(folder))
    dtype = getattr(torch, args.dtype)
    if has_weights(folder):
        model, info = auto.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            output_loading_info=True,
            **settings,
        )
        _check_buffers(folder, model, info["missing_keys"])
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **settings)
            model = auto.from_config(config, dtype=dtype, attn_implementation=attention, trust_remote_code=False)
    if args.shared_prefix and model.config.model_type not in PREFIX_SHARING_TYPES:
        raise ValueError(
            f"shared_prefix is not tested with {model.config.model_type!r}, only with {', '.join(PREFIX_SHARING_TYPES)}: "
            "set actor_train.model_args.shared_prefix=false"
        )
    if args.attn_implementation == "auto" and needs_eager_attention(model):
        model.set_attn_implementation("eager")  # which masks packed sequences by their positions
    disable_dropout(model)
    pack_recurrent_layers(model, model.config.get_text_config().model_type)
    if is_trained_on_text(folder) and not reads_images(folder, args.image_input):
        freeze_towers(model)
    if not args.disable_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return cast(PreTrainedModel, model)


def _check_buffers(folder: Path, model: nn.Module, missing: set[str]) -> None:
    """Raise ValueError if saved buffers are missing; missing parameters are new."""
    if lost := sorted(missing - {name for name, _ in model.named_parameters(remove_duplicate=False)}):
        raise ValueError(
            f"{folder} lacks {lost[0]} ({len(lost)} in all), as checkpoints of a build before 0.2 do: copy it from the "
            "model that was trained"
        )


def disable_dropout(model: nn.Module) -> None:
    """Set dropouts and routers' noise to 0, as the engine samples without."""
    for module in model.modules():
        for name in [name for name, value in vars(module).items() if isinstance(value, float)]:
            if any(part in name for part in RANDOM):
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _attention_implementation(args: ModelArgs, *, has_vision: bool) -> str | dict[str, str]:
    if args.attn_implementation != "auto":
        return args.attn_implementation
    return {"text_config": PACKED_ATTENTION, "vision_config": "sdpa"} if has_vision else PACKED_ATTENTION

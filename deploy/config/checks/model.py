import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import JsonValue

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.vocabulary import MissingWordsError
from offbeat.deploy.run_folder import newest_checkpoint
from offbeat.deploy.run_setup import POLICY, load_architecture
from offbeat.services.chat.vision import reads_images
from offbeat.services.generation.kv_cache import text_config
from offbeat.services.generation.tenancy import read_architecture
from offbeat.services.generation.vllm.engine_arguments import engine_argument_names
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.model_split import find_obstacle, find_sequence_obstacle, find_stage_obstacle

SHAPE_KEYS = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""`config.json` keys that determine a checkpoint's weights."""
EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Models' keys for the number of experts."""


def has_vision(config: RunConfig) -> bool:
    """Return whether the policy has image input."""
    if config.pretrain == "tiny":
        return config.tiny.vision is not None
    return reads_images(Path(config.pretrain), config.actor_train.model_args.image_input)


def check_engine_arguments(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield arguments unknown to the installed vLLM."""
    names = config.actor_infer.engine.model_extra
    if not names or config.actor_infer.strategy_args.strategy_name != "vllm":
        return
    known = engine_argument_names()
    for name in names:
        if not known or name in known:
            continue
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean `{near[0]}`?" if near else ": see `vllm serve --help=all`"
        yield ConfigIssue(f"{ENGINE}.{name}", f"vLLM has no such engine argument{hint}", *near)


def _read(pretrain: str) -> Mapping[str, JsonValue]:
    """Return a model's `config.json`; empty for the tiny policy, and for an unreadable model, which has its own error."""
    try:
        return {} if pretrain == "tiny" else read_architecture(Path(pretrain))
    except (OSError, ValueError):
        return {}


def count_experts(config: RunConfig) -> int:
    """Return the policy's number of experts; 0 without."""
    architecture = _read(config.pretrain)
    numbers = [_get(architecture, key) for key in EXPERTS_KEYS]
    return max((number for number in numbers if isinstance(number, int)), default=0)


def check_model_split(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a `tp_size`, `pp_size` or `ulysses_size` unfit for processes or model; the last takes multimodal ones, too."""
    train, table = config.actor_train, "actor_train.strategy_args"
    strategy = train.strategy_args
    splits = {
        "tp_size": (strategy.tp_size, find_obstacle),
        "pp_size": (strategy.pp_size, find_stage_obstacle),
        "ulysses_size": (strategy.ulysses_size, find_sequence_obstacle),
    }
    sizes = {key: size for key, (size, _) in splits.items() if size > 1}
    if not sizes:
        return
    product = " x ".join(f"{key} {size}" for key, size in sizes.items())
    if config.num_critic_processes % strategy.copy_size:
        yield ConfigIssue(
            "critic.num_processes",
            f"{product} of actor_train, which holds for the critic too, does not divide its {config.num_critic_processes} "
            "process(es)",
        )
    if train.num_processes % strategy.copy_size:
        yield ConfigIssue(
            f"{table}.{next(iter(sizes))}",
            f"{product} does not divide the {train.num_processes} process(es) (actor_train.num_processes)",
        )
    try:
        architecture = load_architecture(config)
    except (OSError, ValueError, MissingWordsError):
        return  # an unreadable model has its own error
    if "ulysses_size" in sizes and train.model_args.attn_implementation != "auto":
        message = "ulysses_size exchanges heads in packed attention alone: leave it out"
        yield ConfigIssue("actor_train.model_args.attn_implementation", message)
    for key, size in sizes.items():
        if architecture.get("vision_config") and (key != "ulysses_size" or has_vision(config)):
            yield ConfigIssue(f"{table}.{key}", "a model with image input can't be split: leave it out")
        elif obstacle := splits[key][1](text_config(architecture), size):
            yield ConfigIssue(f"{table}.{key}", f"{size}: {obstacle}")
    critic = _read(config.critic_folder or "tiny") if config.has_own_critic else {}
    for key, size in sizes.items():
        if critic and (obstacle := splits[key][1](text_config(critic), size)):
            yield ConfigIssue(
                f"{table}.{key}", f"{size}, which holds for the critic {config.critic_folder} too: {obstacle}"
            )


def check_resumed_model(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield differences between model and checkpoint."""
    checkpoint = find_checkpoint(config)
    if checkpoint is None:
        return
    try:
        saved, wanted = read_architecture(checkpoint), load_architecture(config)
    except (OSError, ValueError, MissingWordsError):
        return  # an unreadable model or checkpoint has its own error
    differences = [
        f"{key} {json.dumps(new)} instead of {json.dumps(old)}" for key, old, new in _differences(saved, wanted)
    ]
    if not differences:
        return
    is_tiny = config.pretrain == "tiny"
    model = "the tiny policy, of these keys and the envs' words," if is_tiny else config.pretrain
    yield ConfigIssue(
        "tiny" if is_tiny else "pretrain",
        f"{model} does not fit the checkpoint {checkpoint}: {', '.join(differences)}: take the checkpoint's model, or "
        "start a new run without resume_from_checkpoint",
    )


def check_synced_reference(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a reference of another shape than the policy, towards which `ref_model_sync_steps` moves it."""
    folder = config.reference.model_args.model_name_or_path
    if folder is None or config.ref_model_sync_steps is None or not config.needs_reference:
        return
    try:
        own, policy = read_architecture(Path(folder)), load_architecture(config)
    except (OSError, ValueError, MissingWordsError):
        return  # an unreadable model has its own error
    differences = [
        f"{key} {json.dumps(old)} instead of {json.dumps(new)}" for key, old, new in _differences(own, policy)
    ]
    if differences:
        yield ConfigIssue(
            "reference.model_args.model_name_or_path",
            f"{folder} can't be moved towards the policy (ref_model_sync_steps), as it has {', '.join(differences)}: take a "
            "model of the policy's shape, or leave ref_model_sync_steps out",
        )


def check_weights(folder: Path) -> Iterator[ConfigIssue]:
    """Yield a run's folder `policy`, whose model has no weights, if the run has checkpoints."""
    newest = newest_checkpoint(folder.parent)
    if folder.name == POLICY and newest is not None and not any(folder.glob("*.safetensors")):
        yield ConfigIssue(
            "pretrain",
            f"{folder} has no weights, as the run began with random ones: take its newest checkpoint, {newest[1]}",
        )


def find_checkpoint(config: RunConfig) -> Path | None:
    """Return the local checkpoint that a run resumes from, if any; None for a URL."""
    resume = config.resume_from_checkpoint
    if isinstance(resume, Path):
        return resume
    newest = newest_checkpoint(config.output_dir) if resume is True else None
    return newest[1] if newest else None


def _differences(
    saved: Mapping[str, JsonValue], wanted: Mapping[str, JsonValue]
) -> Iterator[tuple[str, JsonValue, JsonValue]]:
    for key in SHAPE_KEYS:
        old, new = _get(saved, key), _get(wanted, key)
        if old is not None and new is not None and old != new:  # one may leave a default out
            yield key, old, new


def _get(architecture: Mapping[str, JsonValue], key: str) -> JsonValue:
    text = architecture.get("text_config")  # models with image input nest it
    nested = text.get(key) if isinstance(text, dict) and key not in ("architectures", "model_type") else None
    return architecture.get(key) if nested is None else nested

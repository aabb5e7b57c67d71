"""Rules for what prime-rl's trainer learns by: algorithm, loss, optimizer, schedule and adapters."""

from typing import Any

from offbeat.deploy.config.importing.numbers import get_count, get_number
from offbeat.deploy.config.importing.prime_rl_files import sources
from offbeat.deploy.config.importing.prime_rl_sources import agree, find_shared, find_values
from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import (
    Key,
    Rule,
    Rules,
    Tree,
    become,
    get,
    get_table,
    missing,
    no_effect,
    rename,
    same,
)

ARGS, MODEL = "actor_train.training_args", "actor_train.model_args"
UNCLIPPED = 1e9
"""Gradient norm that no gradient reaches."""
PEFT_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Of prime-rl's default layers with adapters, those of dense models."""
OTHER_MODELS = ("experts", "fc1_latent_proj", "fc2_latent_proj")
KERNELS = "kernels and memory of prime-rl's trainer (docs/learner.md)"
ADVANTAGES = {"grpo": "dr_grpo", "echo": "dr_grpo", "max_rl": "maxrl", "rae": "reinforce", "opd": "opd"}
DISTILLED = ("opd",)


def algorithm(tree: Tree) -> str:
    """Return the algorithm of all sources, else the shared one."""
    found = find_values(tree, "algo") if agree(tree, "algo") else []
    shared = found[0] if found else find_shared(tree, "algo")
    return str(get(shared, "type", "grpo")) if isinstance(shared, dict) else "grpo"


def take_algorithm(key: Key) -> Outcome:
    name = ADVANTAGES.get(str(key.value))
    target = ("adv_estimator",)
    match key.value:
        case "grpo":
            return Outcome("value", target, name, "reward less the group's mean, not divided by its deviation")
        case "max_rl" | "opd":
            return Outcome("value", target, name)
        case "echo":
            return Outcome("value", target, name, "without the loss on observations")
        case "rae":
            note = "less the mean of the tag's rewards so far, there a moving average of each agent's"
            return Outcome("value", target, name, note)
        case "sft":
            note = "tokens of another model: sample its answers into a file, and train on them with pipeline: sft"
            return Outcome("no counterpart", note=note)
        case _:
            return Outcome("no counterpart", note="docs/algorithms.md has the estimators")


def take_teacher(key: Key) -> Outcome:
    if key.path[-1] != "name":
        return Outcome("no effect", note="the learner computes the teacher's logprobs")
    target = ("teacher", "teacher", "model_args", "model_name_or_path")
    return Outcome("renamed", target, key.value, "computed beside the learner: a folder")


def _norm(key: Key) -> Outcome:
    if key.value is None:
        return Outcome("value", (*ARGS.split("."), "max_grad_norm"), UNCLIPPED, "not clipped")
    if is_unclipped(key.tree):
        return Outcome("no effect", note="full_offload and deepep do not clip")
    return Outcome("renamed", (*ARGS.split("."), "max_grad_norm"), key.value)


def is_unclipped(tree: Tree) -> bool:
    offload = get(tree, "trainer.model.full_offload")
    return offload not in (None, False) or get(tree, "trainer.model.ep_comm_backend") == "deepep"


def _loss(key: Key) -> Outcome:
    target = ("pg_variant",)
    if key.value == "default":
        return Outcome("value", target, "dppo_tv")
    if key.value == "ipo":
        return Outcome("value", target, "dppo_tv", "masks moves against the advantage, too, there")
    return Outcome("no counterpart", note="pg_variant: module:function, with Offbeat's arguments (docs/algorithms.md)")


def _threshold(*targets: str) -> Rule:
    def rule(key: Key) -> Outcome:
        if not isinstance(key.value, int | float) or key.value <= 0:
            return Outcome("no counterpart", note=f"set {targets[0]} above 0")
        name = targets[0]
        value = min(float(key.value), 1.0)
        return Outcome("renamed" if value == key.value else "value", (name,), value)

    return rule


def _schedule(key: Key) -> Outcome:
    name, kwargs = schedule(key.tree)
    note = "" if kwargs.keys() <= {"min_lr"} else "constant between warm-up and decay"
    return Outcome("renamed" if name == key.value else "value", (*ARGS.split("."), "lr_scheduler_type"), name, note)


def schedule(tree: Tree) -> tuple[str, Tree]:
    """Return our schedule and its arguments."""
    given = get_table(tree, "trainer.scheduler")
    lowest = get_number(tree, "trainer.scheduler.min_lr", 0.0)
    match given.get("type", "constant"):
        case "cosine":
            return ("cosine_with_min_lr", {"min_lr": lowest}) if lowest else ("cosine", {})
        case "linear" if steps := get_count(tree, "trainer.scheduler.decay_steps", 10):
            rate = get_number(tree, "trainer.optim.lr", 1e-6)
            ratio = {"min_lr_ratio": round(lowest / rate, 6)} if lowest and rate else {}
            return "warmup_stable_decay", {
                "num_decay_steps": steps,
                "decay_type": "linear",
                **ratio,
            }
        case "linear":
            return "constant_with_warmup", {}
        case _:
            return "constant", {}


def _adapter_layers(key: Key) -> Outcome:
    names = key.value if isinstance(key.value, list) else [key.value]
    kept = [name for name in names if name not in OTHER_MODELS]
    left_out = f"without {', '.join(name for name in names if name in OTHER_MODELS)}" if kept != names else ""
    return Outcome("value", (*MODEL.split("."), "lora_target"), ",".join(map(str, kept)), left_out)


def _trains_in(key: Key) -> Outcome:
    if key.value == "float32":
        return Outcome("same", note="the optimizer has float32 weights, passes are in bfloat16")
    return Outcome("no counterpart", note="the optimizer has float32 weights")


def rejects_zero(tree: Tree) -> bool:
    """Return whether gates reject groups whose advantages are 0, and no others."""
    gates = [gate for source in sources(tree, "train") for gate in get_table(source, "curriculum.gates").values()]
    return bool(gates) and not any(get(gate, f"reject_{side}") for gate in gates for side in ("min", "max"))


def take_gate(key: Key) -> Outcome:
    if rejects_zero(key.tree):
        return Outcome("value", ("zero_variance",), "refill", "as the group trains nothing")
    note = "groups by their advantages: query_filter_config, or difficulty_mask, has bounds of rewards"
    return Outcome("no counterpart", note=note)


def take_zero_advantages(key: Key) -> Outcome:
    if rejects_zero(key.tree):
        return Outcome("same", note="zero_variance: refill")
    if key.value is False:
        return Outcome("value", ("zero_variance",), "train")
    return Outcome("same", note="zero_variance: mask, whose tokens count in the loss's mean here")


def _seconds_to_minutes(value: Any) -> float | None:
    return value / 60 if isinstance(value, int | float) and value > 0 else None


def _of_adapters(name: str, rule: Rule) -> tuple[str, Rule]:
    return f"trainer.model.lora.{name}", rule


ENCODER = "the folder's own configuration says where its encoder of images is (docs/environments.md#images)"
TRAINER: Rules = (
    ("trainer", same("prime-rl's defaults")),
    ("trainer.optim.type", same("", "adamw")),
    ("trainer.optim.type", missing("AdamW trains: set a learning rate for it")),
    ("trainer.optim.lr", rename(f"{ARGS}.learning_rate")),
    ("trainer.optim.weight_decay", rename(f"{ARGS}.weight_decay")),
    ("trainer.optim.max_norm", _norm),
    ("trainer.optim.betas1", rename(f"{ARGS}.adam_beta1")),
    ("trainer.optim.betas2", rename(f"{ARGS}.adam_beta2")),
    ("trainer.optim.**", missing("AdamW has learning rate, betas and decay")),
    ("trainer.scheduler.type", _schedule),
    ("trainer.scheduler.warmup_steps", lambda key: rename(f"{ARGS}.warmup_steps")(key)
     if schedule(key.tree)[0] != "constant" else Outcome("no effect", note="constant")),
    ("trainer.scheduler.decay_steps|min_lr", lambda key: Outcome("same", note=f"{ARGS}.lr_scheduler_kwargs")
     if get(key.tree, "trainer.scheduler.type", "constant") != "constant" else Outcome("no effect", note="constant")),
    ("trainer.loss.**", lambda key: Outcome("no effect", note="the loss of distillation is fixed")
     if algorithm(key.tree) in DISTILLED else None),
    ("trainer.loss.type", _loss),
    ("trainer.loss.dppo_mask_low", _threshold("dppo_mask_low")),
    ("trainer.loss.dppo_mask_high", _threshold("dppo_mask_high")),
    ("trainer.loss.ipo_threshold", _threshold("dppo_mask_low")),
    ("trainer.loss.kl_tau", rename("dppo_kl_tau")),
    ("trainer.loss.adv_tau", same("", 1, 1.0)),
    ("trainer.loss.adv_tau", missing("a factor of advantages: multiply the rewards by it")),
    ("trainer.loss.**", missing("of a loss of your own")),
    ("trainer.model.ac", become(f"{MODEL}.disable_gradient_checkpointing", lambda _: False)),
    ("trainer.model.ac.**", become(f"{MODEL}.disable_gradient_checkpointing", lambda _: False)),
    ("trainer.model.ac_offloading.**", missing(KERNELS)),
    ("trainer.model.optimization_dtype", _trains_in),
    ("trainer.model.reduce_dtype", same("gradients are added in float32", "float32")),
    _of_adapters("rank", rename(f"{MODEL}.lora_rank")),
    _of_adapters("alpha", rename(f"{MODEL}.lora_alpha")),
    _of_adapters("dropout", same("", 0, 0.0)),
    _of_adapters("target_modules", _adapter_layers),
    _of_adapters("**", missing("adapters have rank, alpha and layers alone")),
    ("trainer.model.lora", same("prime-rl's defaults")),
    ("trainer.model.cp", lambda key: Outcome("same", note="") if key.value == 1
     else rename("actor_train.strategy_args.ulysses_size", "sequence parallelism by Ulysses")(key)),
    ("trainer.model.vlm.freeze_vision_encoder", same("", True)),
    ("*.vlm.**", no_effect(ENCODER)),
    ("*.*.vlm.**", no_effect(ENCODER)),
    ("trainer.model.quantization.**", missing("passes are in bfloat16")),
    ("trainer.model.trust_remote_code", same("", False)),
    ("trainer.model.**", missing(KERNELS)),
    ("trainer.enable_router_replay", same("", False)),
    ("trainer.enable_router_replay", rename("router_replay")),
    ("trainer.enable_token_export", missing("record_batches keeps batches for `offbeat learner reproduce`")),
    ("trainer.dist_timeout_seconds", become("actor_train.backend_timeout", _seconds_to_minutes, "minutes")),
    ("trainer.memory_profiler_path", become("profiler_memory", lambda _: True, "of profiler_steps")),
    ("trainer.trace_path", become("profiler_timeline", lambda _: True, "of profiler_steps")),
    ("trainer.metrics_server.**", no_effect("the control service has Prometheus' metrics")),
    ("trainer.gc.**", no_effect("Python's own")),
    ("trainer.gc", no_effect("Python's own")),
    ("trainer.matmul_precision", missing("float32 passes are in full precision")),
    ("trainer.data.**", missing("made-up batches: tests, and --trial")),
)  # fmt: skip

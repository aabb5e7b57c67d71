"""Rules for the optimizers and schedules of AReaL's actor and critic."""

from typing import Any

from offbeat.deploy.config.importing.areal_batches import trainer_name
from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import (
    ABSENT,
    Key,
    Rule,
    Rules,
    Tree,
    become,
    get,
    missing,
    no_effect,
    rename,
    same,
)

ARGS = "actor_train.training_args"
ROLES = {"actor": ARGS, "critic": "critic.training_args"}
LEARNING_RATE = 1e-3
"""AReaL's default of `optimizer.lr`."""
WARMUP = 0.001
"""AReaL's default of `optimizer.warmup_steps_proportion`."""
DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "disable_dropout": False,
    "ppo_n_minibatches": 4,
    "mask_no_eos_with_zero": False,
    "enable_tree_training": False,
    "use_lora": False,
    "lora_rank": 32,
    "lora_alpha": 16,
    "peft_type": "lora",
    "weight_update_mode": "xccl",
    "optimizer.type": "adam",
    "optimizer.weight_decay": 0.01,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.eps": 1e-8,
    "optimizer.min_lr_ratio": 0.0,
    "optimizer.lr_scheduler_type": "constant",
    "optimizer.gradient_clipping": 1.0,
}
"""AReaL's defaults of the actor, which the critic has, too."""


def schedule_steps(tree: Tree) -> int | None:
    """Return the steps that AReaL's schedules count, if known: those of the epochs, unless there are no rows."""
    steps = get(tree, "total_train_steps")
    return steps if isinstance(steps, int) and not get(tree, "train_dataset.path") else None


def warmup_steps(tree: Tree, role: str = "actor") -> int:
    """Return the steps of warm-up, if those of training are known."""
    steps, share = schedule_steps(tree), get(tree, f"{role}.optimizer.warmup_steps_proportion", WARMUP)
    return int(steps * share) if steps is not None and isinstance(share, int | float) else 0


def _warmup(key: Key) -> Outcome:
    role = key.path[0]
    if not key.value:
        return Outcome("same", note="no warm-up")
    if schedule_steps(key.tree) is None:
        return Outcome("no counterpart", note=f"a share of the epochs' steps: set {ROLES[role]}.warmup_steps")
    steps = warmup_steps(key.tree, role)
    return (
        Outcome("value", (*ROLES[role].split("."), "warmup_steps"), steps) if steps else Outcome("same", note="0 steps")
    )


def _schedule(key: Key) -> Outcome:
    name = key.value
    is_cut = get(key.tree, "total_train_steps") is not None and schedule_steps(key.tree) is None
    note = "decays by max_steps here, over the epochs there" if is_cut and name in ("cosine", "linear") else ""
    if name == "constant" and warmup_steps(key.tree):
        name = "constant_with_warmup"
    if name == "cosine" and get(key.tree, "actor.optimizer.min_lr_ratio"):
        name = "cosine_with_min_lr"
    return Outcome("renamed" if name == key.value else "value", (*ARGS.split("."), "lr_scheduler_type"), name, note)


def _lowest(key: Key) -> Outcome:
    if not key.value:
        return Outcome("same")
    schedule = get(key.tree, "actor.optimizer.lr_scheduler_type")
    if schedule == "linear" and trainer_name(key.tree) == "megatron":
        note = "Megatron's linear schedule ends at it: lr_scheduler_type: polynomial, with lr_end and power: 1.0"
        return Outcome("no counterpart", note=note)
    if schedule != "cosine":
        return Outcome("no effect", note="of a cosine schedule")
    return Outcome("value", (*ARGS.split("."), "lr_scheduler_kwargs"), {"min_lr_rate": key.value})


def _as_actor(key: Key) -> Outcome:
    """Take a critic's key that is the policy's here."""
    name = ".".join(key.path[1:])
    policy = get(key.tree, f"actor.{name}", DEFAULTS.get(name, ABSENT))
    if _is_equal(key.value, policy):
        return Outcome("same", note="the policy's")
    return Outcome("no counterpart", note="the policy's counts" + (f": {policy}" if policy is not ABSENT else ""))


def _is_equal(value: Any, other: Any) -> bool:
    """Compare values, of which numbers with an exponent may be texts."""
    try:
        return value == other or float(value) == float(other)
    except (TypeError, ValueError):
        return False


def _not(target: str) -> Rule:
    return become(target, lambda value: not value)


OPTIMIZER: Rules = (
    ("actor.optimizer.type", same("", "adam")),
    ("actor.optimizer.type", missing("AdamW with states in float32 trains")),
    ("actor.optimizer.lr", rename(f"{ARGS}.learning_rate")),
    ("actor.optimizer.weight_decay", rename(f"{ARGS}.weight_decay")),
    ("actor.optimizer.beta1", rename(f"{ARGS}.adam_beta1")),
    ("actor.optimizer.beta2", rename(f"{ARGS}.adam_beta2")),
    ("actor.optimizer.eps", become(f"{ARGS}.adam_epsilon", float)),
    ("actor.optimizer.gradient_clipping", rename(f"{ARGS}.max_grad_norm")),
    ("actor.optimizer.lr_scheduler_type", _schedule),
    ("actor|critic.optimizer.warmup_steps_proportion", _warmup),
    ("actor.optimizer.min_lr_ratio", _lowest),
    ("actor.optimizer.**", no_effect("of float16")),
)  # fmt: skip
CRITIC: Rules = (
    ("critic.path", lambda key: Outcome("same", note="the policy's first weights")
     if key.value == get(key.tree, "actor.path") else rename("critic.model_args.model_name_or_path")(key)),
    ("critic.optimizer.lr", rename("critic.training_args.learning_rate")),
    ("critic.eps_clip", rename("value_clip")),
    ("critic.is_critic", same("", True)),
    ("critic.gradient_checkpointing", _not("critic.model_args.disable_gradient_checkpointing")),
    ("critic.**", _as_actor),
)  # fmt: skip

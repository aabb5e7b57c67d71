"""Batches, lengths, staleness and devices of AReaL's experiments."""

import re
from dataclasses import dataclass
from typing import Any

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import Key, Tree, WrongTypeError, get, get_table
from offbeat.trainer.config.aliases import ENGINE

PIPELINES = {"rl": "rlvr", "sft": "sft", "rw": "reward_model", "dpo": "dpo"}
"""`train_dataset.type` -> pipeline."""
SAMPLES, NEW_TOKENS, TOKENS, PROMPT = 1, 16384, 32768, 1024
"""AReaL's defaults of `gconfig.n_samples`, `max_new_tokens` and `max_tokens`; tokens for a prompt without a limit."""
MINIBATCHES = 4
"""AReaL's default of `ppo_n_minibatches`."""
BACKEND = re.compile(r"(?:(?P<name>[a-z]+):)?(?P<sizes>(?:[dtpce]\d+)+)")
SIZE = re.compile(r"([dtpce])(\d+)")
PER_ROW = {"dpo": 2, "reward_model": 2}
"""Trajectories of a row."""


@dataclass(frozen=True)
class Backend:
    """An engine and the sizes over which it is divided."""

    name: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context


def parse_backend(text: Any) -> Backend | None:
    """Return the backend of `fsdp:d4p1t1`; None for another form."""
    match = BACKEND.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    sizes = {letter: int(size) for letter, size in SIZE.findall(match["sizes"])}
    return Backend(match["name"] or "", *(sizes.get(letter, 1) for letter in "dtpc"))


def backends(tree: Tree) -> tuple[Backend | None, Backend | None]:
    """Return the backends of the rollouts and of the trainer, also of an `allocation_mode`."""
    sampling, training = (parse_backend(get(tree, f"{role}.backend")) for role in ("rollout", "actor"))
    mode = get(tree, "allocation_mode")
    parts = [parse_backend(part) for part in re.split(r"[+|]", mode)] if isinstance(mode, str) and mode else []
    if len(parts) == 2:
        return sampling or parts[0], training or parts[1]
    return sampling, training or (parts[0] if parts else None)


def shares_devices(tree: Tree) -> bool:
    """Return whether rollouts and trainer have the same devices."""
    targets = {get(tree, f"{role}.scheduling_strategy.target") for role in ("actor", "rollout")}
    return "|" in str(get(tree, "allocation_mode") or "") or bool(targets & {"actor", "rollout"})


def has_devices(tree: Tree) -> bool:
    return get(tree, "cluster.n_gpus_per_node", 8) != 0


def devices(tree: Tree) -> tuple[list[int], list[int]]:
    """Return the devices of engines and trainer, engines first."""
    sampling, training = backends(tree)
    if not has_devices(tree):
        return [], []
    num_engines = sampling.num_devices if sampling else 0
    first = 0 if shares_devices(tree) else num_engines
    return list(range(num_engines)), list(range(first, first + training.num_devices)) if training else []


def engine(tree: Tree) -> str:
    sampling, _ = backends(tree)
    return sampling.name if sampling and sampling.name in ("sglang", "vllm") else "vllm"


def take_backend(key: Key) -> Outcome:
    """Take the devices of a backend; its sizes are keys of their own here."""
    is_engine = key.path[0] == "rollout"
    backend = backends(key.tree)[0 if is_engine else 1]
    if parse_backend(key.value) is None or backend is None:
        return Outcome("no counterpart", note="docs/devices.md has the sizes")
    mapping = devices(key.tree)[0 if is_engine else 1]
    if not mapping:
        return Outcome("same", note="on CPUs")
    role = "actor_infer" if is_engine else "actor_train"
    return Outcome("value", (role, "device_mapping"), mapping, f"{len(mapping)} GPUs")


def take_allocation(key: Key) -> Outcome:
    sampling, training = backends(key.tree)
    if not key.value:
        return Outcome("same", note="not set")
    if sampling is None and training is None:
        return Outcome("no counterpart", note="docs/devices.md has the sizes")
    return Outcome("same", note="actor_infer.device_mapping and actor_train.device_mapping")


def trainer_name(tree: Tree) -> str:
    """Return the trainer's engine: `fsdp`, `megatron` or `archon`."""
    _, training = backends(tree)
    return training.name if training else str(get(tree, "actor.backend")).partition(":")[0]


def find_pipeline(tree: Tree) -> str:
    kind = get(tree, "train_dataset.type")
    if kind is not None and not isinstance(kind, str):
        raise WrongTypeError("train_dataset.type", kind, f"one of {', '.join(PIPELINES)}")
    if kind in PIPELINES:
        return PIPELINES[kind]
    if isinstance(tree.get("rollout"), dict) or "gconfig" in tree:
        return "rlvr"
    return "dpo" if get(tree, "actor.beta") is not None else "sft"


def _number(tree: Tree, key: str, default: int) -> int:
    value = get(tree, key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def group_size(tree: Tree) -> int:
    return _number(tree, "gconfig.n_samples", SAMPLES)


def prompts(tree: Tree) -> int:
    return _number(tree, "train_dataset.batch_size", 1)


def rollout_batch(tree: Tree) -> int:
    """Return a batch's trajectories; AReaL counts prompts, or rows."""
    pipeline = find_pipeline(tree)
    return prompts(tree) * (group_size(tree) if pipeline == "rlvr" else PER_ROW.get(pipeline, 1))


def slots(tree: Tree) -> int:
    """Return the groups in flight, at least those of a batch, as Offbeat requires."""
    return max(prompts(tree), _number(tree, "rollout.max_concurrent_rollouts", prompts(tree)))


def evaluates_alone(tree: Tree) -> bool:
    """Return whether evaluations have sampling of their own, whose keys have AReaL's defaults, not gconfig's values."""
    return isinstance(get(tree, "eval_gconfig"), dict)


def sequence_length(tree: Tree) -> int:
    """Return a trajectory's tokens: those of the longest prompt and answer, of training or evaluation."""
    if find_pipeline(tree) != "rlvr":
        return _number(tree, "train_dataset.max_length", TOKENS)
    return max(_longest(tree, "gconfig"), _longest(tree, "eval_gconfig") if _has_eval_answer(tree) else 0)


def _longest(tree: Tree, name: str) -> int:
    """Return the tokens of the longest prompt and answer, within AReaL's and its engines' limits."""
    whole = _number(tree, f"{name}.max_new_tokens", NEW_TOKENS) + _number(tree, "train_dataset.max_length", PROMPT)
    context = "sglang.context_length" if engine(tree) == "sglang" else "vllm.max_model_len"
    return min(whole, _number(tree, f"{name}.max_tokens", TOKENS), _number(tree, context, TOKENS))


def _has_eval_answer(tree: Tree) -> bool:
    """Return whether rows are evaluated with a length of answers that the file gives."""
    return bool(get(tree, "valid_dataset.path")) and isinstance(get(tree, "eval_gconfig.max_new_tokens"), int)


def answer_tokens(tree: Tree) -> int:
    """Return an answer's tokens, fewer than a sequence's, which AReaL does not require."""
    return min(_number(tree, "gconfig.max_new_tokens", NEW_TOKENS), _longest(tree, "gconfig") - 1)


def eval_answer_tokens(tree: Tree) -> int:
    """Return the tokens of an answer of evaluation, those of training unless the file gives others."""
    if not _has_eval_answer(tree):
        return answer_tokens(tree)
    return min(_number(tree, "eval_gconfig.max_new_tokens", NEW_TOKENS), _longest(tree, "eval_gconfig") - 1)


def take_eval_answer(key: Key) -> Outcome | None:
    if not _has_eval_answer(key.tree):
        return Outcome("no effect", note="no valid_dataset") if isinstance(key.value, int) else None
    tokens, target = eval_answer_tokens(key.tree), ("val_env_manager", "generating_args", "max_new_tokens")
    if tokens == key.value:
        return Outcome("renamed", target, tokens)
    return Outcome("value", target, tokens, "a prompt needs room")


def take_answer(key: Key) -> Outcome | None:
    if not isinstance(key.value, int):
        return None
    tokens, target = answer_tokens(key.tree), ("actor_infer", "generating_args", "max_new_tokens")
    if tokens == key.value:
        return Outcome("renamed", target, tokens)
    return Outcome("value", target, tokens, "a prompt needs room")


def take_longest(key: Key) -> Outcome | None:
    """Take the longest prompt, or row, with room for an answer."""
    if not isinstance(key.value, int):
        return None
    if find_pipeline(key.tree) != "rlvr":
        return Outcome("renamed", ("sequence_length",), key.value)
    tokens = min(key.value, sequence_length(key.tree) - 1)
    kind, note = ("renamed", "") if tokens == key.value else ("value", "an answer needs room")
    return Outcome(kind, ("data", "prompt_length"), tokens, note)


def take_batch(key: Key) -> Outcome | None:
    if not isinstance(key.value, int):
        return None
    pipeline = find_pipeline(key.tree)
    note = "responses, not prompts" if pipeline == "rlvr" else "two responses a row" if pipeline in PER_ROW else ""
    return Outcome("value" if note else "renamed", ("rollout_batch_size",), rollout_batch(key.tree), note)


def take_slots(key: Key) -> Outcome | None:
    if not isinstance(key.value, int):
        return None
    groups = slots(key.tree)
    note = f"groups of {group_size(key.tree)}" if groups == key.value else "at least a batch's groups"
    kind = "renamed" if groups == key.value else "value"
    return Outcome(kind, ("train_env_manager", "num_env_groups"), groups, note)


def device_defaults(tree: Tree) -> list[tuple[str, Any]]:
    """Return what the backends say besides the number of devices."""
    sampling, training = backends(tree)
    found: list[tuple[str, Any]] = [("actor_train.strategy_args.strategy_name", "fsdp2_train")]
    if training is not None and has_devices(tree):
        sizes = {"tp_size": training.tensor, "pp_size": training.pipeline}
        if max(sizes.values()) == 1:
            sizes["ulysses_size"] = training.context
        found += [(f"actor_train.strategy_args.{name}", size) for name, size in sizes.items() if size > 1]
    if find_pipeline(tree) != "rlvr":
        return [*found, *_mapping(tree, "actor_train", 1)]
    if engine(tree) == "sglang":
        found.append(("actor_infer.strategy_args.strategy_name", "sglang"))
    if sampling is not None and has_devices(tree):
        sizes = {"tensor_parallel_size": sampling.tensor, "pipeline_parallel_size": sampling.pipeline}
        found += [(f"{ENGINE}.{name}", size) for name, size in sizes.items() if size > 1]
    return [*found, *_mapping(tree, "actor_infer", 0), *_mapping(tree, "actor_train", 1)]


def _mapping(tree: Tree, role: str, place: int) -> list[tuple[str, Any]]:
    mapping = devices(tree)[place]
    return [(f"{role}.device_mapping", mapping)] if mapping else []


def has_critic(tree: Tree) -> bool:
    return bool(get_table(tree, "critic"))


def has_kl(tree: Tree) -> bool:
    """Return whether rewards lose a KL, which AReaL computes with `ref` alone."""
    return bool(get_table(tree, "ref")) and bool(get(tree, "actor.kl_ctl", 0.1))

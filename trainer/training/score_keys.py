"""Keys of scores from services and files.

Invariant: a key changes with everything on which a group's score depends.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from offbeat.services.chat.template_override import TEMPLATE_FILES
from offbeat.services.chat.tokenizer import TOKENIZER_FILES
from offbeat.services.keys import RunKeys
from offbeat.services.rollout.data.source import message_keys
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.roles import TeacherConfig
from offbeat.trainer.config.scored_roles import ScoredRole, scored_roles
from offbeat.trainer.run import START, LearnerRun


def score_keys(run: LearnerRun) -> Mapping[str, str]:
    """Return role -> key, of roles in services and in files."""
    services = scored_roles(run.config, run.config.reference)
    files = scored_roles(run.config, run.config.reference, "files")
    return {
        **{role.name: f"{role.name}@{_digest(run, role)}" for role in services},
        **{role.name: file_key(run, role, run.model_folder) for role in files},
    }


def selection_digest(config: AlgorithmConfig) -> str:
    """Return a digest of what decides which groups are trained, and by which teachers."""
    return _hash([config.model_dump(mode="json", include=set(AlgorithmConfig.model_fields))])


def role_of_key(key: str) -> str:
    return key.rpartition("@")[0]


def file_key(run: LearnerRun, role: ScoredRole, policy_folder: Path) -> str:
    """Return the key of scores in files. policy_folder: of tokenizer and chat template."""
    inputs = [*_file_inputs(run, role), _scored_rows(run, role), _columns(run), _tokenizer(policy_folder)]
    return f"{role.name}@{_hash(inputs)}"


def earlier_file_keys(run: LearnerRun, role: ScoredRole) -> list[str]:
    """Return the keys under which earlier builds wrote them, whatever their tokens, or whichever rows have scores."""
    inputs = _file_inputs(run, role)
    return [f"{role.name}@{_hash(each)}" for each in ([*inputs, _scored_rows(run, role)], inputs)]


def _file_inputs(run: LearnerRun, role: ScoredRole) -> list[object]:
    own = role.config.model_args
    folder = own.own_folder or (None if run.config.pretrain == "tiny" else run.config.pretrain)
    weights = (
        _weight_files(Path(folder))
        if folder is not None
        else [run.config.tiny.model_dump(mode="json"), own.choose_seed(run.config.seed)]
    )
    policy = run.config.actor_train.model_args
    if own.own_folder is None and policy.adapter_name_or_path is not None:
        weights = [*weights, *_weight_files(Path(policy.adapter_name_or_path))]
    if own.own_folder is None and policy.load_in_4bit:
        weights = [*weights, policy.bnb_4bit_quant_type, policy.use_bnb_nested_quant]
    args = policy.of_role(role.config.model_args)
    return [weights, args.dtype, run.config.temperature, _distilled(run)]


def _weight_files(folder: Path) -> list[object]:
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".json"))
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _scored_rows(run: LearnerRun, role: ScoredRole) -> list[object]:
    """Return what decides which rows have scores in files."""
    tags = role.config.tag_included if isinstance(role.config, TeacherConfig) else ()
    return [run.config.sequence_length, run.config.data and run.config.data.too_long, sorted(tags)]


def _columns(run: LearnerRun) -> list[object]:
    """Return what a row's messages are read by."""
    data = run.config.data
    return [] if data is None else [data.train_on, message_keys(data), data.tools_key, data.images_key, data.tag_key]


def _tokenizer(policy_folder: Path) -> list[object]:
    paths = [policy_folder / name for name in (*TOKENIZER_FILES, *TEMPLATE_FILES)]
    return [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in paths if path.is_file()]


def _distilled(run: LearnerRun) -> list[object]:
    """Return what a teacher's distributions depend on."""
    distill = run.config.distill
    if run.config.pipeline != "distill":
        return []
    return [distill.logits_topk, distill.teacher_temperature, distill.distill_on_prompt]


def _digest(run: LearnerRun, role: ScoredRole) -> str:
    config, train = run.config, run.config.actor_train
    inputs = [
        str(role.config.model_args.model_name_or_path),
        train.model_args.of_role(role.config.model_args).model_dump(mode="json"),
        train.training_args.max_tokens_per_microbatch,
        role.config.infer_batch_size or train.infer_batch_size,
        config.sequence_length,
        train.device,
        train.num_threads,
        config.temperature,
        _first_weights(run) if role.config.model_args.own_folder is None else None,
        *_distilled(run),
        *(["vllm"] if role.config.strategy_args.strategy_name == "vllm" else []),
    ]
    return _hash(inputs)


def _hash(inputs: list[object]) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:12]


def _first_weights(run: LearnerRun) -> list[object]:
    config = run.config
    warm = None if config.warm_start is None else config.warm_start.model_dump(mode="json")
    return [config.pretrain, config.tiny.model_dump(mode="json"), config.seed, warm, run.lineage]


def start_key(run_id: str) -> str:
    """String: `describe_start` once the first weights are complete."""
    return RunKeys(run_id).key("start")


def describe_start(run: LearnerRun) -> str:
    """Return the lineage, and whether a warm start's weights are in the folder: a lost one is restored by the learner."""
    return f"{run.lineage}/{START}" if (run.output_dir / START).is_dir() else run.lineage

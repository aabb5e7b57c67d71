"""Checks of the data pipelines."""

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

from offbeat.deploy.config.checks.model import has_vision
from offbeat.deploy.config.checks.prompts import OnStep, check_with_template
from offbeat.deploy.config.checks.sampling import sampling_key
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.vocabulary import MissingWordsError, collect_words
from offbeat.envs.dataset.files import DatasetRows, RowError, open_rows, read_field
from offbeat.services.chat.assistant_tokens import ConversationError
from offbeat.services.chat.vision import IMAGE_INPUT_ADVICE
from offbeat.services.errors import EpisodeError, RolloutError
from offbeat.services.rollout.data.config import GROUP_SIZES, DataConfig
from offbeat.services.rollout.data.prompts import DomainRows
from offbeat.services.rollout.data.source import DataSource, check_columns, is_unpaired, read_conversation
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.pipeline_keys import keys_without_effect
from offbeat.trainer.config.scored_roles import scored_roles

DATA_KEYS = ("data.dataset_name", "data.val_dataset_name")
CHECKED_ROWS = 64
"""Rows of each file rendered before the start; later ones fail as groups, by reason."""
CONVERSATIONS, PAIRS = ("sft", "distill"), ("dpo", "reward_model")
COLUMN_KEYS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("messages_key", "query_key", "response_key", "system_key"), CONVERSATIONS),
    **dict.fromkeys(("chosen_key", "rejected_key"), PAIRS),
    **dict.fromkeys(("completion_key", "label_key"), ("dpo",)),
    "margin_key": ("reward_model",),
}
"""Keys of `data` -> pipelines that use them; other keys are of every data pipeline."""
OPTIONAL_COLUMNS = ("images_key", "margin_key", "query_key", "system_key", "tag_key", "tools_key")


def steps_of_epochs(config: RunConfig) -> int | None:
    """Return the steps of `num_train_epochs`; None without it or a readable file."""
    data = config.data
    if data is None or data.num_train_epochs is None or not (config.reads_data or config.plays_prompts):
        return None
    tags = config.train_env_manager.tags_of(config.custom_envs)
    try:
        if config.plays_prompts:
            num_rows = len(DomainRows(data.dataset_name, data, tags).selected) if tags else 0
        else:
            num_rows = len(open_rows(data.dataset_name))
    except ValueError:
        return None  # the file has its own issue
    epochs = Fraction(str(data.num_train_epochs))  # as written: as floats, .55 times 100 rows are more than 55
    return max(1, math.ceil(epochs * num_rows / config.groups_per_step))


def check_epochs(config: RunConfig) -> ConfigIssue | None:
    """Return the issue of a `max_steps` that is set beside epochs of another number of steps."""
    steps = steps_of_epochs(config)
    if steps is None or steps == config.max_steps or "max_steps" not in config.model_fields_set:
        return None
    return ConfigIssue(
        "max_steps",
        f"{config.max_steps} disagrees with data.num_train_epochs, which implies {steps}: take that, or leave one of "
        "them out",
    )


def check_online(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield keys without effect on pairs from the policy's own groups."""
    if config.pipeline != "online_dpo":
        return
    for key in keys_without_effect(config):
        if getattr(config, key) != getattr(RunConfig(), key):
            yield ConfigIssue(key, "has no effect with pipeline: online_dpo: leave it out")
    if config.train_env_manager.group_size < 2:
        yield ConfigIssue("train_env_manager.group_size", "a pair needs at least 2 episodes of a task")
    if config.dpo.loss_type == "kto":
        yield ConfigIssue("dpo.loss_type", "kto is for rows: take a loss of pairs")
    if config.dpo.precompute_ref_log_probs:
        yield ConfigIssue(
            "dpo.precompute_ref_log_probs", "the policy's own episodes are not known beforehand: leave it out"
        )
    if config.reference.strategy_args.placement == "service":
        yield ConfigIssue(
            "reference.strategy_args.placement", "the reference scores pairs in the learner: leave it out"
        )


def check_data(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield missing data, and keys without effect."""
    if not config.reads_data:
        for role in scored_roles(config, config.reference, "files"):
            message = "files hold the scores of a dataset's rows: take learner or service"
            yield ConfigIssue(f"{role.name}.strategy_args.placement", message)
        return
    pipeline, unset = f"pipeline: {config.pipeline}", RunConfig()
    if config.data is None:
        yield ConfigIssue("data.dataset_name", f"{pipeline} trains on rows: name a file")
    else:
        for key, users in COLUMN_KEYS.items():
            if config.pipeline not in users and _is_renamed(config.data, key):
                yield ConfigIssue(f"data.{key}", f"has no effect with {pipeline}: leave it out")
    if config.pipeline == "distill":
        yield from _check_distillation(config)
    if config.trains_reward_model:
        yield from _check_reward_model(config)
    for key in keys_without_effect(config):
        if getattr(config, key) != getattr(unset, key):
            yield ConfigIssue(key, f"has no effect with {pipeline}: leave it out")
    if config.dpo.precompute_ref_log_probs and not config.dpo.needs_reference:
        message = f"loss_type {config.dpo.loss_type} has no reference: leave it out"
        yield ConfigIssue("dpo.precompute_ref_log_probs", message)
    precomputed = config.dpo.precompute_ref_log_probs
    if config.reference.strategy_args.placement == "files" and not precomputed:
        yield ConfigIssue("reference.strategy_args.placement", "set dpo.precompute_ref_log_probs=true instead")
    if config.reference.strategy_args.placement == "service":
        message = f"{pipeline} scores its rows beside the policy, not in a service: leave it out"
        yield ConfigIssue("reference.strategy_args.placement", message)
    yield from _check_engine_settings(config, unset)
    reference = config.reference.model_dump(exclude_defaults=True)
    if reference and not config.needs_reference and not precomputed:
        yield ConfigIssue("reference", f"has no effect with {pipeline} and no reference: leave it out")


def _check_reward_model(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield what a model that scores whole conversations of text can't have."""
    train, data = config.actor_train, config.data
    if train.model_args.lora_target is not None:
        yield ConfigIssue("actor_train.model_args.lora_target", "a reward model is trained whole: leave it out")
    for key in ("tp_size", "pp_size", "ulysses_size"):
        if getattr(train.strategy_args, key) > 1:
            yield ConfigIssue(f"actor_train.strategy_args.{key}", "a reward model is not split: leave it out")
    if config.custom_envs:
        yield ConfigIssue("custom_envs", "a reward model samples nothing: leave it out")
    if has_vision(config):
        yield ConfigIssue("pretrain", "a reward model reads text: take a language model without image input")
    if data is not None and data.train_on != "all":
        yield ConfigIssue("data.train_on", "a reward model scores the last token: leave it out")
    if data is not None and data.too_long == "truncate":
        yield ConfigIssue("data.too_long", "the score of a cut conversation is not that of the whole: take drop")


def _check_engine_settings(config: RunConfig, unset: RunConfig) -> Iterator[ConfigIssue]:
    """Yield live settings of absent engines, and of rows that are not sampled."""
    infer, unset_infer, pipeline = config.actor_infer, unset.actor_infer, f"pipeline: {config.pipeline}"
    if not config.uses_engine and infer.num_replicas != unset_infer.num_replicas:
        yield ConfigIssue("actor_infer.num_replicas", f"{pipeline} samples nothing without custom_envs: leave it out")
    if not config.uses_engine and infer.generating_args.stop_strings:
        yield ConfigIssue(sampling_key(config, "stop_strings"), f"{pipeline} samples nothing: leave it out")
    if not config.sampled_share and infer.generating_args.temperature != unset_infer.generating_args.temperature:
        message = f"{pipeline} samples no rows, and evaluations have a temperature of their own: leave it out"
        yield ConfigIssue(sampling_key(config, "temperature"), message)


def _check_distillation(config: RunConfig) -> Iterator[ConfigIssue]:
    if not config.teacher:
        yield ConfigIssue(
            "teacher", "distillation needs one: set teacher.NAME.model_args.model_name_or_path to a folder"
        )
    for name, teacher in config.teacher.items():
        key, folder = f"teacher.{name}.model_args.model_name_or_path", teacher.model_args.model_name_or_path
        if not teacher.model_args.is_tiny and not Path(folder).is_dir():
            yield ConfigIssue(key, f"no such folder: {folder}; set it to a local Hugging Face folder")
        if teacher.strategy_args.placement == "files" and config.sampled_share:
            message = "files have no distributions of what the policy samples (distill.lmbda): take learner or service"
            yield ConfigIssue(f"teacher.{name}.strategy_args.placement", message)
        if teacher.strategy_args.placement == "service" and config.data and config.data.val_dataset_name:
            message = "a service scores training rows alone: take learner or files, or leave data.val_dataset_name out"
            yield ConfigIssue(f"teacher.{name}.strategy_args.placement", message)


def check_rows(config: RunConfig, on_step: OnStep) -> Iterator[ConfigIssue]:
    """Yield problems of the files' columns and first rows."""
    if config.data is None or not config.reads_data:
        return
    for key, path in _files(config.data):
        on_step(key, f"reading {path}")
        try:
            rows = open_rows(path)
            check_columns(rows, config.data, config.pipeline)
            yield from _check_kind(config, rows, key)
            if key == DATA_KEYS[0]:
                used = (key for key in OPTIONAL_COLUMNS if config.pipeline in COLUMN_KEYS.get(key, (config.pipeline,)))
                yield from check_named_columns(config.data, used, rows, path)
            for index in range(min(len(rows), CHECKED_ROWS)):
                _check_conversations(rows[index], config.data, config.pipeline, rows.name(index))
        except (ValueError, OSError) as error:
            yield ConfigIssue(key, str(error))
            return
    if config.pretrain == "tiny" or Path(config.pretrain).is_dir():
        yield from check_with_template(config, _check_rendering)


def _is_renamed(data: DataConfig, key: str) -> bool:
    return getattr(data, key) != DataConfig.model_fields[key].default


def check_named_columns(data: DataConfig, keys: Iterable[str], rows: DatasetRows, path: Path) -> Iterator[ConfigIssue]:
    """Yield columns that are named and that no row has. keys: of `data`."""
    for key in keys:
        if not _is_renamed(data, key):
            continue
        name = str(getattr(data, key))
        if all(read_field(row, name) is None for row in rows.scan((name, name.partition(".")[0]))):
            has = ", ".join(rows.columns)
            yield ConfigIssue(f"data.{key}", f"no row of {path} has the column {name!r}; there is {has}")


def _check_rendering(config: RunConfig) -> list[ConfigIssue]:
    """Return the issues of the first file that has some."""
    data = config.data
    with _tokenizer_folder(config) as folder:
        if data is None or folder is None:
            return []
        for key, path in _files(data):
            if issues := list(_check_tokens(config, data.model_copy(update={"dataset_name": path}), key, folder)):
                return issues
    return []


def _files(data: DataConfig) -> list[tuple[str, Path]]:
    paths: list[tuple[str, Path | None]] = [(key, getattr(data, key.removeprefix("data."))) for key in DATA_KEYS]
    return [(key, path) for key, path in paths if path is not None]


@contextmanager
def _tokenizer_folder(config: RunConfig) -> Iterator[Path | None]:
    """Yield a folder with the policy's tokenizer and template; None if the tiny policy has no words."""
    if config.pretrain != "tiny":
        yield Path(config.pretrain)
        return
    from offbeat.trainer.models.tiny import write_tiny_policy

    with tempfile.TemporaryDirectory() as folder:
        try:
            write_tiny_policy(Path(folder), config.tiny, collect_words(config))
        except (MissingWordsError, ValueError):
            yield None
            return
        yield Path(folder)


def _check_kind(config: RunConfig, rows: DatasetRows, key: str) -> Iterator[ConfigIssue]:
    """Yield a loss that needs other rows."""
    if config.pipeline != "dpo" or config.data is None:
        return
    unpaired, loss = is_unpaired(rows, config.data, config.pipeline), config.dpo.loss_type
    if unpaired != (loss == "kto"):
        has, needs = (
            ("one response and a label", "pairs") if unpaired else ("pairs", "one response and a label per row")
        )
        yield ConfigIssue(key, f"{rows.name(0)}: its rows have {has}, but dpo.loss_type {loss} needs {needs}")
    elif unpaired and len(rows) < 2:
        yield ConfigIssue(key, f"{rows.name(0)}: kto needs at least two rows, whose responses it exchanges")


def _check_conversations(row: Mapping[str, Any], data: DataConfig, pipeline: str, name: str) -> None:
    try:
        for index in range(GROUP_SIZES[pipeline]):
            read_conversation(row, data, pipeline, index)
    except ConversationError as error:
        raise RowError(f"{name}: {error}") from error


def _check_tokens(config: RunConfig, data: DataConfig, key: str, folder: Path) -> Iterator[ConfigIssue]:
    """Render the first rows by the chat template; yield the first failure, or that none fits."""
    in_order = data.model_copy(update={"shuffle": False})
    try:
        source = DataSource(in_order, config.pipeline, folder, seed=0, max_tokens=config.sequence_length)
        trajectories = [
            source.trajectory(number, index, 0)
            for number in range(min(source.num_rows, CHECKED_ROWS))
            for index in range(GROUP_SIZES[config.pipeline])
        ]
    except EpisodeError as error:
        yield ConfigIssue(key, error.detail)
        return
    except RolloutError as error:
        yield ConfigIssue("pretrain", str(error))
        return
    if not has_vision(config) and any(segment.images for each in trajectories for segment in each.segments):
        yield ConfigIssue(key, f"its rows have images, and the policy has no image input: {IMAGE_INPUT_ADVICE}")
    if not any(trajectory.num_sampled for trajectory in trajectories):
        yield ConfigIssue(
            "sequence_length",
            f"none of the first rows of {data.dataset_name} fits in {config.sequence_length} tokens: take more, or "
            "data.too_long: truncate",
        )

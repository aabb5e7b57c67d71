"""Idempotent preparation of a run."""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import JsonValue
from redis import Redis

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.saving import to_saved_tree
from offbeat.deploy.config.vocabulary import collect_words
from offbeat.deploy.run_folder import make_private
from offbeat.services.buffer.admin import configure_buffer
from offbeat.services.chat.template_override import write_policy_folder
from offbeat.services.control.run import RunSpec
from offbeat.services.generation.config import app_name
from offbeat.services.generation.tenancy import read_architecture
from offbeat.services.rollout.config import WorkerSettings
from offbeat.trainer.run import buffer_limits

POLICY = "policy"
LOGS = "logs"
NAMES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Keys of a `config.json` that say nothing of the weights."""
SAMPLE_BYTES = 2**20
"""Of each end of a file of weights."""


def run_spec(config: RunConfig, downloads: Sequence[str] = ()) -> RunSpec:
    """Return the run. downloads: models and datasets of the hub that are not here."""
    tree = to_saved_tree(config)
    if downloads and "max_steps" not in config.model_fields_set:
        del tree["max_steps"]  # the epochs of a dataset may imply it
    return RunSpec(
        run_id=config.exp_name,
        config=json.dumps(tree),
        output_dir=str(config.output_dir.resolve()),
        max_steps=config.max_steps,
        settings=config.settings,
        resume=bool(config.resume_from_checkpoint),
        claims={"folder": str(config.output_dir.resolve()), "app": generation_app(config)},
        downloads=tuple(downloads),
        base=identify_base(config) if shares_engines(config) and not downloads else "",
    )


def model_folder(config: RunConfig) -> Path:
    return config.output_dir / POLICY if config.has_policy_folder else Path(config.pretrain)


def load_architecture(config: RunConfig) -> dict[str, JsonValue]:
    if config.pretrain != "tiny":
        return read_architecture(Path(config.pretrain))
    from offbeat.trainer.models.tiny import write_tiny_policy  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        write_tiny_policy(Path(folder), config.tiny, collect_words(config))
        return read_architecture(Path(folder))


def generation_app(config: RunConfig) -> str:
    return config.actor_infer.app or app_name(config.exp_name)


def shares_engines(config: RunConfig) -> bool:
    """Return whether the run's application may serve other runs at the same time."""
    return config.actor_infer.engine.max_lora_rank is not None and generation_app(config) != app_name(config.exp_name)


def identify_base(config: RunConfig) -> str:
    """Return what identifies the weights below a run's adapters; empty if it has none, or a base of its own.

    Engines compare them whole; this is known before they are published.
    """
    if config.actor_infer.engine.max_lora_rank is None or config.warm_start is not None:
        return ""
    args = config.actor_train.model_args
    bits: list[JsonValue] = [args.bnb_4bit_quant_type, args.use_bnb_nested_quant] if args.load_in_4bit else []
    return digest_base(config, [args.dtype, config.weights.dtype, *bits])


def digest_base(config: RunConfig, about: JsonValue) -> str:
    """Return a digest of the policy's architecture and weights, and of what else is about them."""
    digest = hashlib.blake2b(digest_size=16)
    architecture = {key: value for key, value in load_architecture(config).items() if key not in NAMES}
    digest.update(json.dumps([architecture, about], sort_keys=True).encode())
    folder = Path(config.pretrain)
    files = (
        [] if config.pretrain == "tiny" else sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    )
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, path.stat().st_size - SAMPLE_BYTES))
            digest.update(file.read())
    if not files:  # random weights
        digest.update(str(config.seed).encode())
    return digest.hexdigest()


def worker_settings(
    config: RunConfig, redis_url: str, *, uid: str = "", timeout_s: float | None = None
) -> WorkerSettings:
    """uid: of the run's record. timeout_s: overrides `buffer.worker_timeout_s`."""
    return WorkerSettings(
        run_id=config.exp_name,
        run_uid=uid,
        seed=config.seed,
        model_folder=model_folder(config).resolve(),
        image_input=config.actor_train.model_args.image_input,
        output_dir=config.output_dir.resolve(),
        redis_url=redis_url,
        environment=config.environment,
        sequence_length=config.sequence_length,
        custom_envs=config.custom_envs,
        train_env_manager=config.train_env_manager,
        val_env_manager=config.val_env_manager,
        rollout=config.rollout,
        generating_args=config.actor_infer.generating_args,
        generation_app=generation_app(config) if config.uses_engine else "",
        names_run=shares_engines(config),
        returns_routing=config.actor_infer.returns_routing,
        pipeline=config.pipeline,
        data=config.data,
        rewards=config.scoring,
        sampled_share=config.sampled_share,
        request_timeout_s=config.actor_infer.request_timeout_s,
        worker_timeout_s=timeout_s or config.buffer.worker_timeout_s,
        telemetry=config.telemetry,
    )


def prepare_folder(config: RunConfig) -> None:
    """Make the run's folder, with the tiny policy's files if needed.

    Raises `MissingWordsError`.
    """
    make_private(config.output_dir)
    make_log_folder(config)
    if config.has_policy_folder:
        write_policy(config, model_folder(config))


def write_policy(config: RunConfig, folder: Path) -> None:
    """Write the files of a tiny policy, or of one with another chat template."""
    if config.pretrain == "tiny":
        from offbeat.trainer.models.tiny import write_tiny_policy  # noqa: PLC0415

        write_tiny_policy(folder, config.tiny, collect_words(config))
    elif config.chat_template is not None:
        write_policy_folder(Path(config.pretrain), folder, config.chat_template)


def make_log_folder(config: RunConfig) -> Path:
    """Make and return the folder of logs, a link to `logging_dir` if set."""
    logs, target = config.output_dir / LOGS, config.logging_dir
    if target is None or target.resolve() == logs.resolve():
        logs.mkdir(parents=True, exist_ok=True)
        return logs
    target.mkdir(parents=True, exist_ok=True)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # of a run that is resumed
        logs.symlink_to(target.resolve(), target_is_directory=True)
    return logs


def prepare_buffer(redis: Redis, config: RunConfig, uid: str = "") -> None:
    """Write limits and create the stream; raises `BufferError` for another group shape."""
    configure_buffer(redis, config.exp_name, buffer_limits(config), uid)

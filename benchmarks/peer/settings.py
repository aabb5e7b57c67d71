"""Settings of the comparison; TRL's job is derived from Offbeat's configuration: equal task, seeds, algorithm and
batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.benchmarks.harness.environment import ON_CPUS
from offbeat.benchmarks.peer.trl_worker.job import EvaluateJob, Play, TrainJob
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_setup import model_folder
from offbeat.envs import registry
from offbeat.services.rollout.tasks import FIRST_EVAL_SEED, train_task

CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"
TAG = "FrozenLake"
SLOW_LAKE = "offbeat.benchmarks.harness.slow_lake:SlowLake"
LEARNER_MEASURES = ("eval_steps=0", "final_val_batch_size=1", "max_ckpt_to_keep=100000")


@dataclass(frozen=True, slots=True)
class PeerSetting:
    name: str
    title: str
    config: str
    """File in `deploy/configs`."""
    steps: int
    snapshot_every: int
    eval_tasks: int
    overrides: tuple[str, ...] = ()
    env_threads: int = 0
    pretrained: bool = False
    """SmolLM2, not a warm-started tiny policy."""
    from_command: bool = False
    """Time includes both sides' starts, and Offbeat warm-starts its policy in its run."""
    target: float | None = None
    """Success whose time is compared; None: the highest that both sides reach."""


HF_INFER = "actor_infer.strategy_args.strategy_name=hf_infer"
"""The engine for models this small on a CPU, by transformers, as TRL's side is."""
LATENCY = "{distribution:lognormal,mean_s:0.1,std_s:0.2}"
SETTINGS = {
    "a": PeerSetting("a", "tiny policy, instant env", "quickstart.yaml", 120, 10, 256, overrides=(HF_INFER,)),
    "b": PeerSetting(
        "b",
        "tiny policy, env steps log-normal, mean 0.1 s, std 0.2 s",
        "quickstart.yaml",
        60,
        5,
        256,
        overrides=(
            HF_INFER,
            f"custom_envs.{TAG}.env_type={SLOW_LAKE}",
            f"custom_envs.{TAG}.execution=thread",
            f"custom_envs.{TAG}.env_config.latency={LATENCY}",
            "rollout.num_threads=256",
            "rollout.coalesce_s=0.03",  # a turn may wait that long for company, its env makes it wait longer
            "max_staleness=2",  # groups wait for their slowest member: more of them must be in play to feed the learner
            "buffer.order=completion",  # a batch does not wait for the slowest of all that were admitted with it
            "buffer.stale_policy=train",  # what came late was paid for
        ),
        env_threads=64,
    ),
    "c": PeerSetting(
        "c", "SmolLM2-135M, instant env", "frozen_lake_smollm2.yaml", 8, 0, 0, pretrained=True
    ),
    "d": PeerSetting(
        "d", "tiny policy, instant env, from the command", "quickstart.yaml", 80, 5, 256, overrides=(HF_INFER,),
        from_command=True, target=0.85,
    ),
}  # fmt: skip


def with_overrides(setting: PeerSetting, overrides: Sequence[str]) -> PeerSetting:
    """Apply overrides; keys unknown to TRL apply only to Offbeat."""
    return replace(setting, overrides=(*setting.overrides, *overrides))


def warm_config(setting: PeerSetting, seed: int, output: Path) -> RunConfig:
    names = (f"exp_name=peer-warm-{seed}", f"output_dir={output}")
    return load_run(CONFIGS / setting.config, [f"seed={seed}", *names, *ON_CPUS])


def offbeat_config(setting: PeerSetting, seed: int, steps: int, policy: Path, output: Path) -> RunConfig:
    return load_run(
        CONFIGS / setting.config,
        [
            f"exp_name=peer-{setting.name}-{seed}",
            f"output_dir={output}",
            f"seed={seed}",
            *(() if setting.from_command else (f"pretrain={policy}", "warm_start=null")),
            f"max_steps={steps}",
            f"save_steps={setting.snapshot_every or steps}",
            *LEARNER_MEASURES,
            *ON_CPUS,
            *setting.overrides,
        ],
    )


def play_rules(config: RunConfig, env_threads: int, *, together: bool = False) -> Play:
    env = config.custom_envs[TAG]
    default = str(getattr(registry.make(env.env_type, env.env_config).unwrapped, "system_prompt", ""))
    return Play(
        env_type=env.env_type,
        env_config=dict(env.env_config),
        system_prompt=env.system_prompt(default),
        agent_template=env.agent_template,
        max_turns=env.max_steps,
        max_new_tokens=min(env.max_tokens_per_step, config.actor_infer.generating_args.max_new_tokens),
        sequence_length=config.sequence_length,
        env_threads=env_threads,
        together=together,
    )


def train_job(
    setting: PeerSetting, config: RunConfig, output: Path, *, threads: int, max_seconds: float, together: bool
) -> TrainJob:
    args, group_size = config.actor_train.training_args, config.train_env_manager.group_size
    groups = config.rollout_batch_size // group_size
    return TrainJob(
        policy=str(model_folder(config).resolve()),
        output=str(output.resolve()),
        play=play_rules(config, setting.env_threads, together=together),
        seed=config.seed,
        task_seeds=[train_task(config, config.seed, number).seed for number in range(groups * config.max_steps)],
        steps=config.max_steps,
        groups_per_step=groups,
        group_size=group_size,
        micro_batch=config.rollout_batch_size,  # of 16, 32 and 64 sequences a pass, all at once cost the least CPU
        learning_rate=args.learning_rate,
        warmup_steps=args.warmup_steps,
        lr_scheduler_type=args.lr_scheduler_type,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_epsilon=args.adam_epsilon,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        pg_clip=config.pg_clip,
        scale_rewards="group" if config.reward_method == "mean_std" else "none",
        entropy_coef=config.entropy_loss_coef,
        dtype=config.actor_train.model_args.dtype,
        threads=threads,
        snapshot_every=setting.snapshot_every,
        max_seconds=max_seconds,
    )


def evaluate_job(
    setting: PeerSetting, config: RunConfig, folders: list[Path], output: Path, *, threads: int
) -> EvaluateJob:
    settings: dict[str, Any] = dict(config.custom_envs[TAG].env_config)
    settings.pop("latency", None)
    held_out = registry.held_out_config("frozen_lake", settings)
    seeds = registry.distinct_seeds(setting.eval_tasks, FIRST_EVAL_SEED, "frozen_lake", held_out)
    return EvaluateJob(
        policy=str(model_folder(config).resolve()),
        folders=[str(folder.resolve()) for folder in folders],
        play=replace(play_rules(config, 0), env_type="frozen_lake", env_config=held_out),
        task_seeds=seeds,
        seed=config.seed,
        batch=128,
        dtype=config.actor_train.model_args.dtype,
        threads=threads,
        output=str(output.resolve()),
    )

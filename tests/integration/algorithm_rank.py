"""One rank of a data-parallel learner: trains two steps with each of several algorithms and writes weights and gauges."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from offbeat.trainer.config.actor_train import ModelArgs, StrategyArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.engines.deepspeed import DeepSpeedEngine
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import process_group, ranks_of_environment
from offbeat.trainer.models.loading import load_critic, load_policy, read_vocab_size
from offbeat.trainer.training.data_step import make_trainer
from offbeat.trainer.training.optimizer_step import StepModels
from tests.fakes import make_group, train_on
from tests.integration.learner_rank import SMOOTH

FILTER = {"agg_type": "turn", "ratio_low": 0.5, "ratio_high": 2.0}
TEACHER = {"model_name_or_path": "a"}
ALGORITHMS: dict[str, dict[str, object]] = {
    "gspo": {"ratio_type": "sequence", "pg_clip": 0.05, "loss_agg_mode": "seq-mean-token-mean"},
    "decoupled": {
        "old_logprobs": "recompute",
        "train_infer_correction": {"is_weight": {"upper_bound": 1.5}, "filters": [FILTER], "m2_threshold": 0.5},
        "reward_normalization": {"norm_mean_type": "running", "norm_std_type": "batch"},
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
    },
    "ppo of turns": {"adv_estimator": "gae", "gae_level": "turn", "whiten_advantages": True, "zero_variance": "train"},
    "two teachers": {
        "use_opd": True,
        "teacher": {
            "own": {"model_args": TEACHER},
            "of another tag": {"model_args": TEACHER, "tag_included": ["elsewhere"]},
        },
    },
    "value head": {
        "adv_estimator": "gae",
        "critic": {"backbone": "policy", "training_args": {"learning_rate": 1e-1}, "vf_coef": 0.5},
        "critic_warmup": 1,
        "zero_variance": "train",
    },
    "distillation": {
        "pipeline": "distill",
        "distill": {"logits_topk": 3, "distill_on_prompt": True, "kd_objective": "adaptive_kl"},
        "teacher": {"own": {"model_args": TEACHER}, "other": {"model_args": TEACHER, "opd_kl_coef": 0.5}},
    },
    "online pairs": {"pipeline": "online_dpo", "dpo": {"sft_coef": 0.1}},
    "unpaired": {"pipeline": "dpo", "dpo": {"loss_type": "kto"}},
}
WITHOUT_TOKENS = {"distillation", "online pairs", "unpaired"}
"""Those without ratios or advantages, whose tokens are not annotated."""


def main(model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    ranks = ranks_of_environment("cpu")
    groups = [make_group(n, rewards=(0.0, 1.0, 1.0, 0.5)) for n in range(3)]
    training = SMOOTH.model_copy(update={"learning_rate": 1e-2, "max_tokens_per_microbatch": 30, "num_minibatches": 2})
    with process_group(ranks):
        for name, settings in ALGORITHMS.items():
            tree = settings | {"actor_train": {"training_args": training.model_dump(mode="json")}}
            config = LearnerConfig.model_validate_json(json.dumps(tree))
            critic = load_critic(model, ModelArgs(), seed=1) if config.has_own_critic else None
            policy = load_policy(model, ModelArgs(), seed=1, value_head=config.has_value_head)
            models = StepModels(
                DeepSpeedEngine(policy, training, StrategyArgs(), ranks),
                None if critic is None else DeepSpeedEngine(critic, training, StrategyArgs(), ranks),
                FrozenModel(load_policy(model, ModelArgs(), seed=2), ranks) if config.needs_reference else None,
                [FrozenModel(load_policy(model, ModelArgs(), seed=3), ranks) for _ in config.teacher],
                vocab_size=read_vocab_size(model),
            )
            batches = make_trainer(config, models, ranks)
            rows = [replace(group, trajectories=group.trajectories[:2]) for group in groups]
            own = rows if config.dpo.loss_type == "kto" else groups
            gauges = [train_on(batches, own, step) for step in range(2)][-1]
            engines = {"policy": models.policy, "critic": models.critic}
            weights = {
                f"{who}.{key}": tensor.clone()
                for who, engine in engines.items()
                if engine is not None
                for key, tensor in engine.tensors()
            }
            if policy.value_head is not None:
                weights["head"] = policy.value_head.weight.detach().clone()
            if ranks.rank == 0:
                save_file(weights, out / f"{name}-of-{ranks.world_size}.safetensors")
                found = {key: gauge.value for key, gauge in gauges.items()}
                if name not in WITHOUT_TOKENS:
                    assert batches.last_step is not None
                    found |= {f"logprob {i}": value for i, value in enumerate(batches.last_step.logprobs.tolist())}
                (out / f"{name}-of-{ranks.world_size}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

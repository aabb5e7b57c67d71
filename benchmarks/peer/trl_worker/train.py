"""`python -m offbeat.benchmarks.peer.trl_worker.train JOB`: TRL's GRPOTrainer, tuned for a CPU.

Invariant: wall time in `steps.jsonl` includes all but snapshots.
"""

# pyright: basic, reportMissingImports=false, reportPrivateImportUsage=false, reportArgumentType=false
import json
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.time()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from offbeat.benchmarks.peer.trl_worker.chat import Chat  # noqa: E402
from offbeat.benchmarks.peer.trl_worker.job import TrainJob, read  # noqa: E402
from offbeat.benchmarks.peer.trl_worker.rollouts import EpisodeRunner  # noqa: E402


class RolloutFunction:
    def __init__(self, player: EpisodeRunner, seed_of: dict[str, int], group_size: int) -> None:
        self._player = player
        self._seed_of = seed_of
        self._group_size = group_size
        self.seconds = 0.0
        self.rewards: list[float] = []
        self.successes: list[bool] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """prompts: each repeated `group_size` times in a row."""
        began = time.perf_counter()
        trainer.model.eval()
        seeds = [self._seed_of[prompt[-1]["content"]] for prompt in prompts[:: self._group_size]]
        episodes = self._player.run_episodes(seeds, self._group_size)
        trainer.model.train()
        self.rewards = [episode.reward for episode in episodes]
        self.successes = [episode.success for episode in episodes]
        self.seconds = time.perf_counter() - began
        return {
            "prompt_ids": [list(episode.prompt) for episode in episodes],
            "completion_ids": [episode.completion for episode in episodes],
            "logprobs": None,  # TRL takes the trainer's own
            "env_mask": [episode.sampled for episode in episodes],
            "episode_reward": self.rewards,
        }


def episode_reward(episode_reward: list[float], **_: Any) -> list[float]:
    return episode_reward


class Watch(TrainerCallback):
    def __init__(self, job: TrainJob, rollouts: RolloutFunction, trainer_of: Any) -> None:
        self._job = job
        self._rollouts = rollouts
        self._log = (Path(job.output) / "steps.jsonl").open("w", encoding="utf-8")
        self._began = 0.0
        self._outside = 0.0
        self._model_of = trainer_of

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, state, control
        self._snapshot(0)
        self._outside = 0.0
        self._began = time.perf_counter()
        self._write({"startup_s": time.time() - STARTED})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args
        step, seconds = state.global_step, time.perf_counter() - self._began - self._outside
        rewards, successes = self._rollouts.rewards, self._rollouts.successes
        self._write(
            {
                "step": step,
                "time": time.time(),
                "seconds": seconds,
                "rollout_s": self._rollouts.seconds,
                "reward": sum(rewards) / len(rewards),
                "success": sum(successes) / len(successes),
            }
        )
        last = step >= self._job.steps or seconds > self._job.max_seconds
        control.should_training_stop = last
        if last or (self._job.snapshot_every and step % self._job.snapshot_every == 0):
            self._snapshot(step)

    def _snapshot(self, step: int) -> None:
        began = time.perf_counter()
        if self._job.snapshot_every:
            self._model_of().save_pretrained(Path(self._job.output) / "snapshots" / f"step-{step:06d}")
        self._outside += time.perf_counter() - began

    def _write(self, record: dict[str, Any]) -> None:
        self._log.write(json.dumps(record) + "\n")
        self._log.flush()


def grpo_config(job: TrainJob) -> GRPOConfig:
    batch = job.groups_per_step * job.group_size
    return GRPOConfig(
        output_dir=job.output,
        seed=job.seed,
        max_steps=job.steps,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=batch // job.micro_batch,
        steps_per_generation=batch // job.micro_batch,
        num_generations=job.group_size,
        shuffle_dataset=False,
        max_completion_length=job.play.sequence_length,
        learning_rate=job.learning_rate,
        lr_scheduler_type=job.lr_scheduler_type,
        warmup_steps=job.warmup_steps,
        adam_beta1=job.adam_beta1,
        adam_beta2=job.adam_beta2,
        adam_epsilon=job.adam_epsilon,
        weight_decay=job.weight_decay,
        max_grad_norm=job.max_grad_norm,
        loss_type="dapo",  # a mean over the batch's tokens
        scale_rewards=job.scale_rewards,
        epsilon=job.pg_clip,
        beta=0.0,
        num_iterations=1,
        entropy_coef=job.entropy_coef,
        temperature=1.0,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    job = read(Path(sys.argv[1]))
    assert isinstance(job, TrainJob)
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    tokenizer = AutoTokenizer.from_pretrained(job.policy, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(job.policy, dtype=getattr(torch, job.dtype), trust_remote_code=False)
    chat = Chat(tokenizer, job.play.system_prompt)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = chat.pad_id
    player = EpisodeRunner(model, chat, job.play, job.groups_per_step * job.group_size)
    observations = [player.first_message(seed) for seed in job.task_seeds]
    rollouts = RolloutFunction(player, dict(zip(observations, job.task_seeds, strict=True)), job.group_size)
    watch = Watch(job, rollouts, lambda: model)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=episode_reward,
        args=grpo_config(job),
        train_dataset=Dataset.from_list([{"prompt": chat.messages(observation)} for observation in observations]),
        processing_class=tokenizer,
        rollout_func=rollouts,
        callbacks=[watch],
    )
    trainer.train()


if __name__ == "__main__":
    main()

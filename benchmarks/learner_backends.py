"""Optimizer steps of `offbeat bench learner`, one side per process.

    python -m offbeat.benchmarks.learner_backends SIDE TASK.json

Prints `READY`; per input line a step, then `STEP`, seconds, and peak bytes above the start.

Invariant: equal model, batch, loss (clipped surrogate, mean over sampled tokens), gradient clipping, AdamW and token
budget.
"""

# pyright: basic
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offbeat.benchmarks.harness.pace import Pace

RATE, CLIP, MAX_NORM, GROUP = 1e-5, 0.2, 1.0, 4


@dataclass(frozen=True)
class BackendTask:
    """Training task. lengths: tokens per sequence; the first `prompt` are the group's prompt."""

    model: str
    lengths: list[int]
    prompt: int
    budget: int
    """Per pass, padding included."""
    threads: int
    seed: int
    device: str
    dtype: str = "float32"
    """Of forward and backward; weights and moments of all sides are float32."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@dataclass
class Data:
    """tokens: a row per sequence; logprobs: of sampled tokens."""

    tokens: list[Any]
    logprobs: list[Any]
    rewards: Any

    @property
    def advantages(self) -> Any:
        groups = self.rewards.reshape(-1, GROUP)
        return ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)).reshape(-1)


def data_of(task: BackendTask, vocab_size: int) -> Data:
    import numpy as np

    rng = np.random.default_rng(task.seed)
    prompts = rng.integers(8, vocab_size, (len(task.lengths) // GROUP, task.prompt))
    answers = [rng.integers(8, vocab_size, n - task.prompt) for n in task.lengths]
    tokens = [np.concatenate([prompts[i // GROUP], answer]) for i, answer in enumerate(answers)]
    logprobs = [-np.log(vocab_size) + 0.1 * rng.standard_normal(n - task.prompt) for n in task.lengths]
    return Data(tokens, logprobs, rng.random(len(tokens)))


def shared(task: BackendTask) -> None:
    ours(task, shared_prefix=True)


def ours(task: BackendTask, *, shared_prefix: bool = False) -> None:
    import torch

    from offbeat.trainer.config.actor_train import StrategyArgs
    from offbeat.trainer.config.learner import LearnerConfig
    from offbeat.trainer.data.step_batch import StepBatch
    from offbeat.trainer.engines.deepspeed import DeepSpeedEngine, _deepspeed
    from offbeat.trainer.engines.process_group import process_group, ranks_of_environment
    from offbeat.trainer.models.loading import load_policy
    from offbeat.trainer.training.optimizer_step import BatchTrainer, StepModels

    args = {"learning_rate": RATE, "max_grad_norm": MAX_NORM, "max_tokens_per_microbatch": task.budget}
    model = {"shared_prefix": shared_prefix, "dtype": task.dtype}
    tree = {"pg_clip": CLIP, "actor_train": {"training_args": args, "model_args": model}}
    config = LearnerConfig.model_validate(tree)
    torch.set_num_threads(task.threads)
    with process_group(ranks := ranks_of_environment(task.device)):
        _deepspeed(task.device)
        pace = Pace(task.device)
        policy = load_policy(Path(task.model), config.actor_train.model_args, task.seed)
        data = data_of(task, policy.model.config.get_text_config().vocab_size)
        engine = DeepSpeedEngine(policy, config.actor_train.training_args, StrategyArgs(), ranks)
        trainer = BatchTrainer(config, StepModels(engine), ranks)
        groups = tuple(_groups(task, data))
        pace.ready()
        for step in range(sys.maxsize):
            with pace.step():
                trainer.train(StepBatch(step, groups, groups))


def _groups(task: BackendTask, data: Data) -> list[Any]:
    import numpy as np

    from offbeat.services.messages.types import (
        Group,
        Segment,
        StopReason,
        Trajectory,
        Turn,
        VersionSpan,
    )

    members = []
    for i, (tokens, logprobs, reward) in enumerate(zip(data.tokens, data.logprobs, data.rewards, strict=True)):
        n = len(tokens)
        mask = np.arange(n) >= task.prompt
        row = np.concatenate([np.zeros(task.prompt), logprobs]).astype(np.float32)
        segment = Segment(tokens.astype(np.int32), mask, row, (VersionSpan(task.prompt, n, 0),))
        turns = (Turn(0, task.prompt, n, float(reward)),)
        members.append(Trajectory("g", i % GROUP, 0, "bench", 0, (segment,), turns, StopReason.TERMINATED))
    return [
        Group(f"{g}-0", f"g{g}", g, "bench", 0, 0, tuple(members[g * GROUP : (g + 1) * GROUP]))
        for g in range(len(members) // GROUP)
    ]


def bare(task: BackendTask) -> None:
    """Run transformers on rows sorted by length, padded per pass."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(task.threads)
    pace = Pace(task.device)
    model: Any = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32, trust_remote_code=False)
    model.to(task.device).train()
    data = data_of(task, model.config.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    sampled = sum(n - task.prompt for n in task.lengths)
    pace.ready()
    while True:
        with pace.step():
            for rows in passes(task):
                loss = _bare_loss(model, task, data, rows).sum() / sampled
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


def passes(task: BackendTask) -> list[list[int]]:
    """Split sequences by length into passes of at most `budget` padded tokens."""
    order = sorted(range(len(task.lengths)), key=lambda i: task.lengths[i])
    out: list[list[int]] = [[]]
    for i in order:
        if out[-1] and (len(out[-1]) + 1) * task.lengths[i] > task.budget:
            out.append([])
        out[-1].append(i)
    return out


def _bare_loss(model: Any, task: BackendTask, data: Data, rows: list[int]) -> Any:
    import torch

    def pad(values: list[Any]) -> Any:
        return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(v) for v in values], batch_first=True).to(task.device)

    tokens = pad([data.tokens[i] for i in rows])
    lengths = torch.tensor([task.lengths[i] for i in rows], device=task.device)
    mask = torch.arange(tokens.shape[1], device=task.device)[None] < lengths[:, None]
    with torch.autocast(task.device, torch.bfloat16, enabled=task.dtype == "bfloat16"):
        logits = model(tokens, attention_mask=mask.long(), use_cache=False).logits[:, task.prompt - 1 : -1].float()
    logp = logits.log_softmax(-1).gather(2, tokens[:, task.prompt :, None])[:, :, 0]
    old = pad([data.logprobs[i] for i in rows]).float()
    advantage = torch.tensor([data.advantages[i] for i in rows], device=task.device, dtype=logp.dtype)[:, None]
    ratio = (logp - old).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return loss * mask[:, task.prompt :]


def trl(task: BackendTask) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    torch.set_num_threads(task.threads)
    pace = Pace(task.device)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32, trust_remote_code=False)
    data = data_of(task, model.config.vocab_size)
    rows = max(1, task.budget // max(task.lengths))
    rows = math.gcd(len(task.lengths), rows) if len(task.lengths) % rows else rows

    class FixedBatchTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            del inputs
            return _trl_batch(task, data, self.accelerator.device)

    class Paced(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            pace.before()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            pace.after()

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            pace.ready()

    config = GRPOConfig(
        output_dir=str(Path(task.model).parent / "trl"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=len(task.lengths) // rows,
        num_generations=GROUP,
        max_completion_length=max(task.lengths) - task.prompt,
        loss_type="dapo",
        epsilon=CLIP,
        beta=0.0,
        learning_rate=RATE,
        adam_beta2=0.95,
        max_grad_norm=MAX_NORM,
        lr_scheduler_type="constant",
        max_steps=1_000_000,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=task.dtype == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=task.device == "cpu",
    )
    FixedBatchTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(task.lengths)}),
        processing_class=AutoTokenizer.from_pretrained(task.model, trust_remote_code=False),
        callbacks=[Paced()],
    ).train()


def _trl_batch(task: BackendTask, data: Data, device: Any) -> dict[str, Any]:
    import torch

    def pad(values: list[Any]) -> Any:
        return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(v) for v in values], batch_first=True).to(device)

    completions = pad([row[task.prompt :] for row in data.tokens])
    lengths = torch.tensor(task.lengths, device=device) - task.prompt
    mask = (torch.arange(completions.shape[1], device=device)[None] < lengths[:, None]).long()
    prompts = torch.stack([torch.as_tensor(row[: task.prompt]) for row in data.tokens]).to(device)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": torch.as_tensor(data.advantages, dtype=torch.float32, device=device),
        "old_per_token_logps": pad(data.logprobs).float(),
        "num_items_in_batch": mask.sum(),
    }


SIDES = {"offbeat": ours, "shared": shared, "bare": bare, "trl": trl}

if __name__ == "__main__":
    SIDES[sys.argv[1]](BackendTask(**json.loads(Path(sys.argv[2]).read_text())))

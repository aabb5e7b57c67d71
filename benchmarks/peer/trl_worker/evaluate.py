"""`python -m offbeat.benchmarks.peer.trl_worker.evaluate JOB`: success of snapshots."""

# pyright: basic
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat.benchmarks.peer.trl_worker.chat import Chat
from offbeat.benchmarks.peer.trl_worker.job import EvaluateJob, read
from offbeat.benchmarks.peer.trl_worker.rollouts import EpisodeRunner


def success(job: EvaluateJob, tokenizer: Any, folder: str) -> float:
    """Return the share of held-out tasks solved."""
    torch.manual_seed(job.seed)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, job.dtype), trust_remote_code=False
    ).eval()
    player = EpisodeRunner(model, Chat(tokenizer, job.play.system_prompt), job.play, job.batch)
    parts = [job.task_seeds[i : i + job.batch] for i in range(0, len(job.task_seeds), job.batch)]
    successes = [episode.success for part in parts for episode in player.run_episodes(part)]
    return sum(successes) / len(successes)


def main() -> None:
    job = read(Path(sys.argv[1]))
    assert isinstance(job, EvaluateJob)
    torch.set_num_threads(job.threads)
    tokenizer = AutoTokenizer.from_pretrained(job.policy, trust_remote_code=False)
    successes = [success(job, tokenizer, folder) for folder in job.folders]
    Path(job.output).write_text(json.dumps(successes), encoding="utf-8")


if __name__ == "__main__":
    main()

"""`python -m offbeat.benchmarks.peer.trl_worker.data JOB`: optimizer steps of TRL's SFTTrainer or DPOTrainer at its
parent's pace.

A step's time includes collation, not tokenization.
"""

# pyright: basic, reportMissingImports=false, reportPrivateImportUsage=false, reportArgumentType=false
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offbeat.benchmarks.harness.pace import Pace


@dataclass(frozen=True, slots=True)
class DataJob:
    """Rows are read in the file's order."""

    pipeline: str
    policy: str
    rows: str
    """JSON lines: messages, or prompt (messages), chosen and rejected (text)."""
    output: str
    rows_per_step: int
    rows_per_pass: int
    steps: int
    max_length: int
    learning_rate: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float
    beta: float
    threads: int

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "DataJob":
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def arguments(job: DataJob) -> dict[str, Any]:
    return {
        "output_dir": job.output,
        "max_steps": job.steps,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": job.rows_per_pass,
        "gradient_accumulation_steps": job.rows_per_step // job.rows_per_pass,
        "train_sampling_strategy": "sequential",
        "max_length": job.max_length,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": job.adam_beta1,
        "adam_beta2": job.adam_beta2,
        "adam_epsilon": job.adam_epsilon,
        "weight_decay": job.weight_decay,
        "max_grad_norm": job.max_grad_norm,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def make_trainer(job: DataJob, callbacks: list[Any]) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    lines = Path(job.rows).read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    common: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(job.policy, dtype=torch.float32, trust_remote_code=False),
        "processing_class": AutoTokenizer.from_pretrained(job.policy, trust_remote_code=False),
        "callbacks": callbacks,
    }
    if job.pipeline == "sft":
        # The prompt apart: tokens of the assistant alone are learned without a tagged template
        split = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
        config = SFTConfig(**arguments(job), completion_only_loss=True)
        return SFTTrainer(args=config, train_dataset=Dataset.from_list(split), **common)
    for row in rows:
        for key in ("chosen", "rejected"):
            row[key] = [{"role": "assistant", "content": row[key]}]
    config = DPOConfig(**arguments(job), beta=job.beta)
    return DPOTrainer(args=config, train_dataset=Dataset.from_list(rows), **common)


def main() -> None:
    import torch
    from transformers import TrainerCallback

    job = DataJob.read(Path(sys.argv[1]))
    torch.set_num_threads(job.threads)
    pace = Pace("cpu")

    class Paced(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            pace.ready()
            pace.before()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            del args, state, control
            if logs and "loss" in logs:
                pace.after(loss=float(logs["loss"]))
                pace.before()

    make_trainer(job, [Paced()]).train()


if __name__ == "__main__":
    main()

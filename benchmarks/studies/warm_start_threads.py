"""CPU time of a warm start and of its main thread, that is the wall time on idle cores, and the digest of the weights.

OMP_WAIT_POLICY=passive python -m offbeat.benchmarks.studies.warm_start_threads CONFIG [KEY=VALUE ...]
"""

import argparse
import hashlib
import os
import tempfile
import time
from pathlib import Path

from rich.console import Console

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.vocabulary import collect_words


def measure(config: RunConfig, folder: Path) -> tuple[float, float, str]:
    """Return CPU s of all threads and of the main one, and the digest of the weights."""
    import torch

    from offbeat.trainer.engines.process_group import process_group, ranks_of_environment
    from offbeat.trainer.models.tiny import write_tiny_policy
    from offbeat.trainer.run import LearnerRun
    from offbeat.trainer.training.policy_trainer import PolicyTrainer

    torch.set_num_threads(config.actor_train.num_threads)
    torch.manual_seed(config.seed)
    run = LearnerRun(config.exp_name, "", folder, config.model_copy(update={"output_dir": folder}))
    write_tiny_policy(run.model_folder, config.tiny, collect_words(config))
    digest = hashlib.sha256()
    with process_group(ranks_of_environment("cpu")) as ranks:
        trainer = PolicyTrainer(run, ranks)
        process_s, thread_s = time.process_time(), time.thread_time()
        trainer.begin(lambda *_: None, lambda: False)
        process_s, thread_s = time.process_time() - process_s, time.thread_time() - thread_s
        for name, tensor in trainer.exported_tensors():
            digest.update(name.encode() + tensor.detach().numpy().tobytes())
    return process_s, thread_s, digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    config = load_run(options.config, options.overrides)
    if config.warm_start is None or config.pretrain != "tiny":
        parser.error(f"{options.config} warms no tiny policy up")
    os.environ |= {"OMP_NUM_THREADS": str(config.actor_train.num_threads), "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory(prefix="offbeat-warm-start-") as folder:
        process_s, thread_s, digest = measure(config, Path(folder))
    threads, steps = config.warm_start.num_threads or config.actor_train.num_threads, config.warm_start.steps
    Console(highlight=False).print(
        f"{steps} steps, {threads} thread(s): {process_s:.2f} CPU s, {thread_s:.2f} of the main thread, weights {digest}"
    )


if __name__ == "__main__":
    main()

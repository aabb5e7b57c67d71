"""Frozen models that score groups in their own process."""

from pathlib import Path

import torch

from offbeat.services.errors import ControlError
from offbeat.trainer.config.scored_roles import ScoredRole
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.engines.prompt_model import OpenPromptEngine, PromptModel
from offbeat.trainer.models.loading import load_policy, read_vocab_size
from offbeat.trainer.models.tokenizer_check import check_same_tokens
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.group_scorer import GroupScorer
from offbeat.trainer.training.prepare_scores import RowScorer
from offbeat.trainer.training.teacher_scorer import TeacherScorer


def load_scorer(
    run: LearnerRun, role: ScoredRole, policy_folder: Path, open_engine: OpenPromptEngine | None = None
) -> RowScorer:
    """Load a role's model. policy_folder: of the policy's tokenizer. open_engine: for teachers by vLLM.

    Raises:
        ControlError: the model can't be loaded, or has another tokenizer.
    """
    config, own = run.config, role.config.model_args
    folder = Path(own.own_folder or (run.first_weights if role.starts_from_policy else policy_folder))
    try:
        if own.own_folder is not None:
            check_same_tokens(policy_folder, folder, f"{role.name}.model_args.model_name_or_path")
        policy = config.actor_train.model_args
        args = policy.of_start(own) if role.starts_from_policy else policy.of_role(own)
        if role.config.strategy_args.strategy_name == "vllm":
            return _open_teacher(run, role, policy_folder, folder, open_engine)
        model = load_policy(folder, args, own.choose_seed(config.seed), config.temperature)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        raise ControlError(f"the model of {role.name} can't be loaded: {error}") from error
    frozen = FrozenModel(model, Ranks(0, 0, 1, torch.device(config.actor_train.device)))
    if config.pipeline != "distill":
        return GroupScorer(frozen, config, role.config.infer_batch_size)
    return TeacherScorer(frozen, config, role.config.infer_batch_size, read_vocab_size(policy_folder))


def _open_teacher(
    run: LearnerRun, role: ScoredRole, policy_folder: Path, folder: Path, open_engine: OpenPromptEngine | None
) -> TeacherScorer:
    """Return a scorer by vLLM; raises ValueError without an engine, or if the vocabulary does not suit it."""
    config, train = run.config, run.config.actor_train
    if open_engine is None:
        raise ValueError("vllm is not available in this process")
    if (own := read_vocab_size(folder)) != (size := read_vocab_size(policy_folder)):
        raise ValueError(f"vllm gives distributions over {own} tokens, and the policy has {size}: take hf_infer")
    dtype = train.model_args.of_role(role.config.model_args).dtype
    if (k := config.distill.logits_topk) >= size:
        raise ValueError(f"distill.logits_topk {k} is not below the vocabulary of {size}: take hf_infer")
    engine = open_engine(folder, k, config.sequence_length, dtype, train.device, train.num_threads)
    return TeacherScorer(PromptModel(engine), config, role.config.infer_batch_size, size)

"""Who teaches a policy that is distilled on-policy."""

from pydantic import Field

from envs.config import Config
from trainer.reference_config import InferStrategyArgs


class TeacherConfig(Config):
    """One of ROLL's `teacher`s: a model that is asked how likely it finds each token that the policy sampled."""

    pretrain: str = Field(min_length=1)
    """A local Hugging Face folder with the policy's tokenizer."""
    tag_included: tuple[str, ...] = ()
    """Tags of `custom_envs` that it teaches; none means all."""
    opd_kl_coef: float = Field(default=1.0, gt=0)
    """What its KL counts."""
    strategy_args: InferStrategyArgs = InferStrategyArgs()

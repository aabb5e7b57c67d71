"""Advantages, losses, KL and corrections: pure functions over tensors that depend on torch alone, one idea per file.

Arrays [M] hold sampled tokens only, trajectory after trajectory in sampling order, so no masks are needed. The registries
from config names to functions are `offbeat.trainer.losses.advantages.ESTIMATORS` and `BASELINE_OF`,
`offbeat.trainer.losses.policy_loss.POLICY_LOSSES` and `offbeat.trainer.algorithms.kl.KL_PENALTIES`.
"""

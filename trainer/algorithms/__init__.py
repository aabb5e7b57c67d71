"""Advantages, losses, KL and corrections: pure functions over tensors, one idea a file; this package knows torch alone.

Arrays [M] run over sampled tokens only, in the order in which they were sampled, trajectory after trajectory: there is
nothing to mask. What a config's name stands for is said in `offbeat.trainer.losses.advantages.ESTIMATORS` and `BASELINE_OF`,
`offbeat.trainer.losses.policy_loss.POLICY_LOSSES` and `offbeat.trainer.algorithms.kl.KL_PENALTIES`.
"""

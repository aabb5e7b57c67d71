"""Advantages, losses, KL and corrections as pure functions of tensors, on torch alone.

Dimensions: M sampled tokens, by trajectory in sampling order; T trajectories; R turns; G groups; K teachers. Tensors
are float, `last` bool (a trajectory's last token or turn), numberings int64 from 0.

Registries by config name: `ESTIMATORS`, `BASELINE_OF`, `POLICY_LOSSES`, `KL_PENALTIES`.
"""

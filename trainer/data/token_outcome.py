from enum import IntEnum


class TokenOutcome(IntEnum):
    """Why a token's policy gradient is not that of its advantage; the last reason that applies."""

    TRAINED = 0
    NO_ADVANTAGE = 1
    """Advantage 0."""
    CLIPPED = 2
    """`pg_variant` bounded its gradient or weight."""
    WEIGHT_CUT = 3
    """`train_infer_correction.is_weight` bounded its weight."""
    FILTERED = 4
    """Masked by a filter of `train_infer_correction`."""
    EPISODE_MASKED = 5
    """Its episode is outside the loss (`max_len_mask`, `error_max_len_clip`)."""
    NOT_COMPUTED = 6
    """Policy not trained on it (`critic_warmup`)."""

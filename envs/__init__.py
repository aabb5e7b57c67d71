"""Tasks as gymnasium environments with text observations; this package knows nothing of Ray, torch, Redis or HTTP."""

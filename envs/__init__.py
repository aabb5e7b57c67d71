"""Tasks as gymnasium environments with text observations; independent of Ray, torch, Redis and HTTP."""

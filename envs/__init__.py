"""Tasks as text-based gymnasium environments; independent of Ray, torch, Redis and HTTP."""

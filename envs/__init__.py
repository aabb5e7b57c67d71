"""Tasks as text-based gymnasium environments, without Ray, torch, Redis and HTTP."""

"""Episodes of the policy in an env, and their recording."""

"""The policy and the critic over packed tokens."""

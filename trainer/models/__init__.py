"""Policy and critic over packed tokens."""

"""What runs in a venv of Reverb."""

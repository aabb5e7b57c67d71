"""Code that runs in Reverb's venv."""

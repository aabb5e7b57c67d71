"""The Python API: what `import offbeat` exports."""

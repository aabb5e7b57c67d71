"""Python API, exported by `import offbeat`."""

"""Reports of a run: numbers, learning curve and rendered episodes."""

#!/bin/bash
if ls /app/notes | cmp -s - /tests/expected.txt && [ "$(cat /app/notes/one.md /app/notes/two.md /app/notes/three.md)" = "$(printf 'first\nsecond\nthird')" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi

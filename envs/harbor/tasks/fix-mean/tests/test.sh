#!/bin/bash
if cmp -s /app/mean.txt /tests/expected.txt && ! grep -q -- '- 1' /app/mean.awk; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi

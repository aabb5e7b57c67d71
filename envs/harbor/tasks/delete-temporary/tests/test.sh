#!/bin/bash
if (cd /app && find project -type f | sort) | cmp -s - /tests/expected.txt; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi

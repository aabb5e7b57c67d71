#!/bin/bash
if [ -L /app/current ] && [ "$(readlink -f /app/current)" = /app/releases/v3 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi

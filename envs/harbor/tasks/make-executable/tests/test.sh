#!/bin/bash
if [ "$(stat -c %a /app/run.sh)" = 755 ] && cmp -s /app/run.sh /tests/expected.txt; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi

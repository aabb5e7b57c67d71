#!/bin/bash
if gzip -t /app/logs.tar.gz && (tar -xzOf /app/logs.tar.gz logs/one.log && tar -xzOf /app/logs.tar.gz logs/two.log) | cmp -s - /tests/expected.txt && [ -f /app/logs/one.log ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi

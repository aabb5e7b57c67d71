#!/bin/bash
set -e
awk '{ s += $2 } END { print s }' alice.txt > total.txt

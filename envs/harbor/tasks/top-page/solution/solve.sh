#!/bin/bash
set -e
sort visits.log | uniq -c | sort -rn | head -n 1 | awk '{ print $2 }' > top.txt

#!/bin/bash
set -e
sed -i 's/ - 1//' mean.awk
awk -f mean.awk numbers.txt > mean.txt

#!/bin/bash
set -e
grep -c '^[0-9-]* ERROR' app.log > count.txt

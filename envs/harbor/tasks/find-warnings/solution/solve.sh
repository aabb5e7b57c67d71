#!/bin/bash
set -e
grep WARN app.log > warnings.txt

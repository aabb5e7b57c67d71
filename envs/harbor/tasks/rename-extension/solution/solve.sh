#!/bin/bash
set -e
for f in notes/*.txt ; do mv $f ${f%.txt}.md ; done

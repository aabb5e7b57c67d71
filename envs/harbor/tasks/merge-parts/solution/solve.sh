#!/bin/bash
set -e
cat parts/*.txt > whole.txt

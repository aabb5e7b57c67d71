#!/bin/bash
set -e
sort -u words.txt > unique.txt

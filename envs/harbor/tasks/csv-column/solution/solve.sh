#!/bin/bash
set -e
cut -d, -f2 people.csv > cities.txt

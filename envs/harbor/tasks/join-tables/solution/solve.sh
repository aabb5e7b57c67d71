#!/bin/bash
set -e
join -t, prices.csv stock.csv > joined.csv

#!/bin/bash
set -e
grep alice sales.txt > alice.txt

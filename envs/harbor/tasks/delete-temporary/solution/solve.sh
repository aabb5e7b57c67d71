#!/bin/bash
set -e
find project -name '*.tmp' -delete

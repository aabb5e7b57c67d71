#!/bin/bash
set -e
chmod 755 run.sh

#!/bin/bash
set -e
ln -s releases/v3 current

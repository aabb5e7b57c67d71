#!/bin/bash
set -e
tar -czf logs.tar.gz logs

#!/bin/bash
set -e
sed -i /^$/d poem.txt

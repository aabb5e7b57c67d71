#!/bin/bash
set -e
sed -i s/localhost/db.internal/g config.ini

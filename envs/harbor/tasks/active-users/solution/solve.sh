#!/bin/bash
set -e
python3 -c "import json; print( *[ u['name'] for u in json.load(open('users.json'))['users'] if u['active'] ], sep='\n' )" > active.txt

#!/bin/sh
# Generate the secrets of deploy/compose.yaml and of Kubernetes, once, in deploy/docker/secrets/, for their owner alone:
# the URL of Redis with its password, the token of the API, and Ray's.
set -eu
folder=$(dirname "$0")/secrets
host=${1:-redis}

random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
create() { [ -e "$folder/$1" ] || printf '%s' "$2" > "$folder/$1"; }

mkdir -p "$folder"
chmod 700 "$folder"
create redis-url "redis://:$(random)@$host:6379/0"
url=$(cat "$folder/redis-url")
if [ "${url##*@}" != "$host:6379/0" ]; then # of another host: the password stays
    printf '%s' "${url%@*}@$host:6379/0" > "$folder/redis-url.new"
    mv -f "$folder/redis-url.new" "$folder/redis-url"
fi
create token "$(random)"
create ray-token "$(random)"
# Containers read them as another user; the folder is closed to others
chmod 444 "$folder/redis-url" "$folder/token" "$folder/ray-token"

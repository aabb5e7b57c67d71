#!/bin/sh
# Run a command beside a redis-server for several nodes, with the password and port of runs/redis/url and its append-only
# file in runs/redis, which one server at a time uses; the exit code is the command's.
#
#   with_redis.sh COMMAND [ARGUMENT]...
set -eu
umask 077
url=$(cat runs/redis/url)
password=${url#redis://:}
password=${password%%@*}
port=${url##*:}
port=${port%%/*}
exec 8<>runs/redis/redis.lock # as EmbeddedRedis does
code=0
flock -w 5 8 2>/dev/null || code=$?
if [ "$code" -eq 1 ]; then
    echo "with_redis.sh: another Redis uses $PWD/runs/redis: wait for its end, or use another folder" >&2
    exit 1
fi
server=$(python3 -c 'from offbeat.services.redis.server import server_binary; print(server_binary(None))')

# The configuration comes through stdin: arguments are for everyone to read
printf '%s\n' "port $port" "requirepass $password" 'bind * -::*' "dir $PWD/runs/redis" 'appendonly yes' 'appendfsync everysec' \
    'save ""' 'maxmemory-policy noeviction' 'logfile redis.log' | "$server" - >/dev/null &
redis=$!
trap 'kill "$redis" 2>/dev/null; wait "$redis" || true' EXIT
trap 'exit 143' TERM

code=0
"$@" 8>&- || code=$?
exit "$code"

# Install a part of what pack.py packed, and set the variables with which tests run: `. tests/gpu/unpack.sh PARTS/1`.
site=/tmp/offbeat-site
mkdir -p $site
for archive in "$1"/*.tar.xz; do tar -C $site -xJf "$archive" & done
wait
unset PYTHONDONTWRITEBYTECODE # set there: each process would compile all it imports, for a minute
python3 -m compileall -q -j 0 $site
# what tests call as a user does
mkdir -p .venv/bin
printf '#!/bin/sh\nexec python3 -m offbeat.deploy.cli.app "$@"\n' > .venv/bin/offbeat
chmod +x .venv/bin/offbeat
export PYTHONPATH=$site:$PWD/deploy/package:$PWD PYTHONUNBUFFERED=1 NO_COLOR=1 COLUMNS=150
# FlashInfer is not packed
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 TOKENIZERS_PARALLELISM=false
# varlen_attn of PyTorch 2.11 has no `enable_gqa`, which Offbeat's 2.13 has
varlen=$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')/nn/attention/varlen.py
grep -q enable_gqa "$varlen" || cat >> "$varlen" <<'PYTHON'

_without_groups = varlen_attn


def varlen_attn(query, key, value, *args, enable_gqa=False, **kwargs):
    if enable_gqa:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return _without_groups(query, key, value, *args, **kwargs)
PYTHON

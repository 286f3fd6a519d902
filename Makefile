# Two commands matter: `make demo` and `make test`. Both make .venv and install what they need.
.PHONY: demo test test-long check clean

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

demo: $(STAMP)-demo
	@$(VENV)/bin/pico-vllm generate --model smollm2-135m "Explain in three sentences how a rainbow forms."

test: $(STAMP)-test
	@$(PY) -m pytest -m "not slow and not gpu and not multigpu"

test-long: $(STAMP)-test
	@$(PY) -m pytest -m "not gpu and not multigpu"

check: $(STAMP)-test
	@scripts/check

clean:
	rm -rf $(VENV)

# Where python3 already brings torch (a GPU machine's CUDA build) the venv keeps it; elsewhere pip takes the CPU build.
$(STAMP)-demo: pyproject.toml scripts/install
	@scripts/install $(VENV)
	@touch $@

$(STAMP)-test: pyproject.toml scripts/install
	@scripts/install $(VENV) test
	@touch $(STAMP)-demo $@

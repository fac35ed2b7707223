# A thin front for CMake and scripts/. Options of a command go into ARGS: make run ARGS="--port 8001".
BUILD := build/release
ARGS  ?=

.PHONY: all build run check test bench figures eval lint format fuzz soak gpu-test install clean help

all: build

build:                  ## build the program in build/release
	@scripts/setup run
	@scripts/build release

run: build              ## build, then serve the embedded model on 127.0.0.1:8000
	@$(BUILD)/nibble serve $(ARGS)

check:                  ## release build and its tests (minutes)
	@scripts/test release $(ARGS)

test:                   ## everything that CI runs
	@scripts/test $(ARGS)

bench: build            ## decode and prefill speed against the floor of this machine
	@scripts/bench $(ARGS)

figures:                ## docs/figures-h200.svg from docs/figures-h200.json
	@python3 tools/bench/figures.py

eval: build             ## what the embedded model can do, on held-out items
	@scripts/eval $(ARGS)

lint:                   ## static checks
	@scripts/setup test
	@scripts/lint $(ARGS)

format:                 ## rewrite sources by .clang-format
	@scripts/setup test
	@scripts/format

fuzz:                   ## each fuzz target for a minute (ARGS=SECONDS for another time)
	@scripts/setup test
	@scripts/fuzz $(ARGS)

gpu-test:               ## the CUDA backend on this machine's GPU
	@scripts/gpu-test $(ARGS)

soak: build             ## hours of load in short: 10,000 requests, 500 streams at once, starts that fail
	@scripts/setup test
	@scripts/soak $(ARGS)

install: build          ## install below /usr/local; DESTDIR is honoured
	@cmake --install $(BUILD) $(if $(PREFIX),--prefix $(PREFIX))

clean:                  ## remove build/
	rm -rf build

help:                   ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile

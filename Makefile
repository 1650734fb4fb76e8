# csi-prepare: `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

DRIVER   ?= hostpath
ENDPOINT ?=
ARGS     ?=

GOLANGCI_LINT := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOFUMPT       := mvdan.cc/gofumpt@v0.12.0
# What the tests start besides Go: one word a Debian package.
PACKAGES := util-linux fdisk e2fsprogs xfsprogs btrfs-progs iproute2 user-mode-linux busybox-static runc crun containerd sshfs bindfs openssh-server

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## install the Debian packages the tests need (as root; else list them)
	@missing=; for p in $(PACKAGES); do \
	  dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "setup: please install:$$missing"; exit 1; fi; \
	echo "setup: installing$$missing"; \
	apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null

.PHONY: generate
generate: ## write what follows from SPEC.md: proto, generated Go, requirement ids
	go run ./spec/cmd/speccheck generate

.PHONY: check
check: ## fail on drift from SPEC.md, faulty ids, breaking changes of the wire
	go run ./spec/cmd/speccheck check

.PHONY: lint
lint: ## golangci-lint, gofumpt, go vet
	go vet ./...
	@echo 'lint: gofumpt'; bad=$$(go run $(GOFUMPT) -l $$(git ls-files '*.go' | grep -v '\.pb\.go$$')); \
	  if [ -n "$$bad" ]; then echo "not gofumpt-ed:"; echo "$$bad"; exit 1; fi
	@echo 'lint: golangci-lint (its first build takes minutes)'
	go run $(GOLANGCI_LINT) run ./...

.PHONY: sanity
sanity: setup ## the suite against a reference driver, or ENDPOINT=unix://… (DRIVER=, ARGS=)
	@mkdir -p out bin; go build -o bin/ ./sanity/cmd/prepare-sanity
ifeq ($(ENDPOINT),)
	.ci/nothing-left bin/prepare-sanity run --driver $(DRIVER) --report out $(ARGS)
ifeq ($(DRIVER),block)
	.ci/nothing-left bin/prepare-sanity run --driver block --csi.testvolumeaccesstype block --report out $(ARGS)
endif
else
	.ci/nothing-left bin/prepare-sanity run --csi.endpoint $(ENDPOINT) --report out $(ARGS)
endif

.PHONY: test
test: setup check ## all that this machine can test
	.ci/nothing-left go test -count=1 -short -timeout 12m ./...

.PHONY: mutants
mutants: setup ## kill matrix: each mutant against the suite (FULL=1: against all of it)
	@mkdir -p out bin; go build -o bin/ ./fakes/cmd/prepare-fake
	.ci/nothing-left bin/prepare-fake kill $(if $(FULL),--full,--matrix docs/kill-matrix.md) --out out/mutants.json

RUNS ?= 50
.PHONY: controls
controls: setup ## the suite passes what conforms: fakes and reference drivers, RUNS=50 random orders
	@mkdir -p out bin; go build -o bin/ ./fakes/cmd/prepare-fake ./sanity/cmd/prepare-sanity
	.ci/nothing-left bin/prepare-fake control --sanity bin/prepare-sanity --runs $(RUNS)

.PHONY: bench
bench: setup ## paired benchmarks against the peers (FOCUS=regexp)
	@mkdir -p bin; cd reference/bench && go build -o ../../bin/bench .
	.ci/nothing-left bin/bench -json out/bench.json -chart out/bench.svg $(if $(FOCUS),-focus '$(FOCUS)')

ACTIVATE := reference/mountspec/containerd/activate

.PHONY: e2e
e2e: setup ## mount specs and real runtimes: runc, crun, containerd and its mount manager
	@mkdir -p out bin; go test -c -o bin/e2e.test ./reference/e2e; cd $(ACTIVATE) && go test -c -o $(CURDIR)/bin/activate.test .
	cd reference/e2e && E2E_REPORT=$(CURDIR)/out/e2e.json $(CURDIR)/.ci/nothing-left $(CURDIR)/bin/e2e.test -test.timeout 10m
	cd $(ACTIVATE) && $(CURDIR)/.ci/nothing-left $(CURDIR)/bin/activate.test -test.timeout 5m

.PHONY: crash
crash: setup ## SIGKILL the CO and the drivers at every step and at random moments (ARGS=-random=N)
	@mkdir -p out bin; go build -o bin/ ./drivers/cmd/prepare-driver ./reference/cmd/prepare-crash
	.ci/nothing-left bin/prepare-crash -driver bin/prepare-driver -out out/crash.json $(ARGS)

.PHONY: crash-block
crash-block: setup ## 200 random SIGKILLs of the block driver at work, content checked (KILLS=)
	@mkdir -p out
	.ci/nothing-left go test -count=1 -timeout 60m -v -run TestKilledAtRandom ./drivers/block \
	  -args -kills $$(( ($(or $(KILLS),200) + 1) / 2 )) -report $(CURDIR)/out/crash-block.json
	@cat out/crash-block.json

.PHONY: vm
vm: setup ## NFS and an older kernel, in guests that need neither root nor KVM (ARGS=)
	@mkdir -p out bin; go build -o bin/ ./vm/cmd/prepare-vm
	.ci/nothing-left bin/prepare-vm --out out $(ARGS)

.PHONY: compat
compat: setup ## csi-sanity and Docker Swarm's CSI code over prepare-shim, and our suite over both shims
	@mkdir -p out bin; go build -o bin/ ./drivers/cmd/prepare-driver ./reference/cmd/prepare-shim ./sanity/cmd/prepare-sanity
	cd compat && go build -o $(CURDIR)/bin/csi-sanity github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity && go build -o $(CURDIR)/bin/compat .
	.ci/nothing-left bin/compat -bin bin -json out/compat.json $(if $(FOCUS),-focus '$(FOCUS)') $(ARGS)

.PHONY: demo-fuse
demo-fuse: setup ## the workflow with FUSE, no propagation and no privilege, told step by step
	@mkdir -p bin; go build -o bin/ ./drivers/cmd/prepare-driver ./reference/cmd/demo-fuse
	.ci/nothing-left bin/demo-fuse -driver bin/prepare-driver

.PHONY: clean
clean: ## remove out/ and bin/
	rm -rf --one-file-system out bin

# What CI does after and around the tests. The Makefile includes it, and every step of a workflow is a target here or
# there, so a laptop and CI do the same.
#
#   make pipeline    smoke, reproduce, quality, build, tests: in the order of CI, up to the first failure
#   make image       TARGET=train|serve, TORCH_BUILD=cpu|cu126|cu130, PLATFORM=linux/arm64
#   make pin         digests of images and commits of actions, resolved anew; make pins checks that none is missing
HEADWAY ?= $(BIN)/headway
SMOKE ?= configs/smoke.yaml
TARGET ?= train
TORCH_BUILD ?= cpu
PLATFORM ?=
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
REVISION ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
# ghcr.io/owner; empty for an image that stays here.
REGISTRY ?=
# Registries take lower case only, and an owner on GitHub may have capitals.
NAME ?= $(shell echo '$(if $(REGISTRY),$(REGISTRY)/)headway-$(TARGET)' | tr A-Z a-z)
# One architecture's image has a suffix, `-amd64`; the name without one stands for all of them.
SUFFIX ?=
IMAGE ?= $(NAME):$(VERSION)$(SUFFIX)
# More words for `headway image build`: IMAGE_ARGS="--arg BASE=localhost/debian --arg TORCH_INDEX="
IMAGE_ARGS ?=
LAYOUT := build/images/$(TARGET)
DIGESTS := build/digests
# A finding of this severity for which there is a correction fails the scan.
SEVERITY ?= critical
KILLS ?= 20
BASE_REF ?= origin/main
PINNED = $(wildcard Dockerfile .github/workflows/*.yml .github/actions/*/action.yml)
# Equal commits give equal wheels.
EPOCH := $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null),315532800)
# By uv where it is there, else by pip.
WHEEL = $(if $(UV),$(UV) build --quiet --wheel --out-dir,$(abspath $(BIN))/python -m pip wheel --quiet --no-deps -w)

ifdef GITHUB_ACTIONS
# A folder that the workflows' cache keeps.
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/build/kernels/inductor
export TRITON_CACHE_DIR := $(CURDIR)/build/kernels/triton
endif

.PHONY: pipeline quality build wheel-twice pin pins image image-layers scan image-sbom push sign attest chaos base-run comparison

pipeline:
	$(MAKE) --no-print-directory smoke
	$(MAKE) --no-print-directory reproduce
	$(MAKE) --no-print-directory quality
	$(MAKE) --no-print-directory build
	$(MAKE) --no-print-directory test

quality: lint

build: setup
	rm -rf dist
	SOURCE_DATE_EPOCH=$(EPOCH) $(WHEEL) dist .
	SOURCE_DATE_EPOCH=$(EPOCH) $(HEADWAY) sbom dist/*.whl --output dist/sbom.cdx.json

# The wheel of a commit, built again from an archive of it in another folder, has the same bytes.
wheel-twice: build
	rm -rf build/again
	mkdir -p build/again
	git archive HEAD | tar -x -C build/again
	cd build/again && SOURCE_DATE_EPOCH=$(EPOCH) $(WHEEL) dist .
	cmp dist/*.whl build/again/dist/*.whl
	sha256sum dist/*.whl

# Kills in every phase of a step and of a save; the result must be as if nothing had happened.
chaos: setup
	$(HEADWAY) chaos $(SMOKE) --kills $(KILLS)

base-run: setup
	rm -rf build/base runs/smoke
	git worktree prune
	git worktree add --detach build/base $(BASE_REF)
	cd build/base && PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(abspath $(HEADWAY)) train $(SMOKE)
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(HEADWAY) train $(SMOKE)

# Curves and ratios of this branch next to those of BASE_REF, both trained here, one after the other.
comparison: base-run
	$(HEADWAY) compare build/base/runs/smoke runs/smoke --markdown > build/comparison.md

pin: setup
	$(HEADWAY) image pin $(PINNED)

pins: setup
	$(HEADWAY) image pin --check $(PINNED)

image: setup
	$(HEADWAY) image build --target $(TARGET) --tag $(IMAGE) --output $(LAYOUT) \
		--arg TORCH_BUILD=$(TORCH_BUILD) --arg VERSION=$(VERSION) --arg REVISION=$(REVISION) \
		$(if $(PLATFORM),--platform $(PLATFORM)) $(IMAGE_ARGS)

image-layers: setup
	$(HEADWAY) image layers $(LAYOUT)

# grype compares with a database of known weaknesses. Without one it would find nothing, so that is a failure.
scan:
	@command -v grype >/dev/null || { echo "error: there is no grype, so nothing was scanned"; exit 1; }
	grype db status || grype db update
	grype db status
	GRYPE_DB_VALIDATE_AGE=true grype oci-dir:$(LAYOUT) --only-fixed --fail-on $(SEVERITY)

image-sbom:
	@command -v syft >/dev/null || { echo "error: there is no syft: https://github.com/anchore/syft"; exit 1; }
	SYFT_CHECK_FOR_APP_UPDATE=false syft scan oci-dir:$(LAYOUT) --output cyclonedx-json=build/images/$(TARGET)$(SUFFIX).cdx.json

push:
	docker push $(IMAGE)
	mkdir -p $(DIGESTS)
	docker inspect --format '{{index .RepoDigests 0}}' $(IMAGE) > $(DIGESTS)/$(TARGET)$(SUFFIX)

# Every architecture's image is signed by its digest, and only then do they get their common name, which is signed too.
sign:
	for image in $$(cat $(DIGESTS)/$(TARGET)-*); do cosign sign --yes "$$image" || exit 1; done
	docker buildx imagetools create --tag $(NAME):$(VERSION) $$(cat $(DIGESTS)/$(TARGET)-*)
	cosign sign --yes "$(NAME)@$$(docker buildx imagetools inspect $(NAME):$(VERSION) \
		--format '{{.Manifest.Digest}}')"

# Whoever pulls an image can ask what is in it: cosign verify-attestation --type cyclonedx.
attest:
	for file in $(DIGESTS)/$(TARGET)-*; do \
		cosign attest --yes --type cyclonedx --predicate "build/images/$$(basename "$$file").cdx.json" \
			"$$(cat "$$file")" || exit 1; done

#!/usr/bin/env bash
# Regions: the steps of pictures with and without a step cache that skips every second one, eager, as one
# recording, as recorded blocks, and as recorded blocks under the cache, in turns in a process a
# model. With COMPILED=1 over compiled blocks too.
#
#     [NAME=regions] [COMPILED=1] [IMAGES=N] [PATIENCE=300] benchmarks/regions.sh FOLDER [MODEL...]
#
# writes what benchmarks/pictures.sh writes, which it calls.
set -u
compare=eager,eager+cache,breakable,blocks,breakable+cache
if [ -n "${COMPILED:-}" ]; then
  compare+=,regional,regional+breakable,regional+blocks,regional+cache,regional+breakable+cache
fi
COMPARE=${COMPARE:-$compare} NAME=${NAME:-regions} IMAGES=${IMAGES:-3} LATENT=1 \
  exec "$(dirname "$0")/pictures.sh" "$@"

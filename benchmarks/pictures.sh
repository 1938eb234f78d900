#!/usr/bin/env bash
# Whole pictures of the named real-size shapes, two sizes each: eager against breakable graphs. A
# record a model goes to FOLDER.
#
#     benchmarks/pictures.sh FOLDER [MODEL...]
#
# Needs a CUDA device with about 90 GB of free memory (qwen-image); one process a model.
set -uo pipefail
out=${1:?give a folder for the records}
shift
mkdir -p "$out"
for model in ${@:-dit-xl-2 pixart-sigma sana-1.6b sd3.5-medium wan-1.3b z-image flux-dev qwen-image}; do
  python3 -m dit_graph.bench --model "$model" --compare eager,breakable --remove-syncs --set-up here \
    --images 4 --output "$out/pictures-$model" | tail -n 1 > /dev/null || echo "$model failed" >&2
done

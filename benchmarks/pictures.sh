#!/usr/bin/env bash
# Whole pictures of the named real-size shapes, two sizes each: eager against breakable graphs, and
# three of them against torch.compile(mode="reduce-overhead") at 512 px too. Records go to FOLDER;
# benchmarks/pictures.py puts them together.
#
#     [IMAGES=4] [COMPARE=eager,breakable] benchmarks/pictures.sh FOLDER [MODEL...]
#
# COMPARE=eager,breakable,regional+breakable adds graphs over compiled blocks.
# Needs a CUDA device with about 90 GB of free memory (qwen-image); one process a record.
set -u
out=${1:?give a folder for the records}
shift
mkdir -p "$out"
compare=${COMPARE:-eager,breakable}

record() { # NAME MODEL OPTION...
  local name=$1 model=$2
  shift 2
  python3 -m dit_graph.bench --model "$model" --remove-syncs --set-up here --images "${IMAGES:-4}" "$@" \
    --output "$out/pictures-$name" > /dev/null || echo "$name failed" >&2
}

for model in ${@:-dit-xl-2 pixart-sigma sana-1.6b sd3.5-medium wan-1.3b z-image flux-dev qwen-image}; do
  case $model in
    dit-xl-2) other=256 ;;
    sd3.5-medium | flux-dev) other=1024 ;;
    *) other= ;;
  esac
  if [ -z "$other" ]; then
    record "$model" "$model" --compare "$compare"
  else
    record "$model-$other" "$model" --compare "$compare" --sizes "$other"
    record "$model-512" "$model" --compare "$compare,reduce-overhead" --sizes 512
  fi
done

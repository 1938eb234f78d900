#!/usr/bin/env bash
# README's table: whole pictures of eight named real-size shapes, two sizes each. Eager and
# breakable graphs, without and with `remove_syncs`, take turns in a process a model.
#
#     [NAME=pictures] [COMPARE=...] [IMAGES=N] [PATIENCE=300] [LATENT=1] \
#       benchmarks/pictures.sh FOLDER [MODEL...]
#
# writes FOLDER/NAME.json, NAME.md and, with matplotlib, NAME.png at the end. Until then each
# model's own record lies in FOLDER/records, for benchmarks/pictures.py should the script be killed.
# COMPARE has the variants, as `--compare` takes them; after PATIENCE seconds a model ends with the
# rows that it has. Needs a CUDA device with about 90 GB of free memory (qwen-image).
set -u
out=${1:?give a folder for the records}
shift
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
records=$out/records
mkdir -p "$records"

measure() { # MODEL IMAGES SIZES
  echo "$1 $3 ..." >&2
  rm -f "$records/$1.json"
  timeout --signal=INT --kill-after=30 "${PATIENCE:-300}" "$python" -m dit_graph.bench \
    --model "$1" --sizes "$3" --images "${IMAGES:-$2}" --set-up here --output "$records/$1" \
    ${LATENT:+--latent} \
    --compare "${COMPARE:-eager,breakable,breakable+remove-syncs}" < /dev/null > /dev/null
  local code=$?
  rm -f "$records/$1".{md,png}
  return $code
}

found=()
while read -r model images small large; do
  [[ $# == 0 || " $* " == *" $model "* ]] || continue
  record=$records/$model.json
  measure "$model" "$images" "$small,$large"
  code=$?
  ((code == 0)) || echo "$model failed ($code)" >&2
  # one row must not take the other along; 124: it was out of time
  ((code == 0 || code == 124)) || [ -s "$record" ] || measure "$model" "$images" "$large"
  [ -s "$record" ] && found+=("$record")
done <<MODELS
dit-xl-2 4 256 512
pixart-sigma 4 512 1024
sana-1.6b 4 512 1024
sd3.5-medium 4 512 1024
wan-1.3b 4 256 480
z-image 2 512 1024
flux-dev 2 512 1024
qwen-image 2 512 1024
MODELS

"$python" "$root/benchmarks/pictures.py" "${found[@]}" --output "$out/${NAME:-pictures}" &&
  rm -r "$records"

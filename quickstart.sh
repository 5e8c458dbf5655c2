#!/usr/bin/env bash
# From nothing to a language model that writes: builds Optimus, turns the King James Bible into tokens, trains the small
# Mixture-of-Experts model of configs/quickstart.toml on the CPU, and shows its validation loss and a sample.
# Start it again at any time: what is done is kept, and an interrupted training goes on from its last checkpoint.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"

say() { printf '\n== %s\n' "$*"; }

# The whole Bible, one verse a line, an empty line between chapters; the last tenth, by whole chapters, is for validation.
make_text() {
  local folder=$1
  # `bible -f` prints "Ge1:1 In the beginning ...": the reference goes, a change of chapter becomes an empty line.
  bible -f Gen1:1-Rev22:21 | LC_ALL=C awk '{
    chapter = $1; sub(/:.*/, "", chapter)
    if (NR > 1 && chapter != last) print ""
    last = chapter
    print substr($0, length($1) + 2)
  }' > "$folder/kjv.txt.partial"
  LC_ALL=C awk -v RS= -v limit=$(($(wc -c < "$folder/kjv.txt.partial") * 9 / 10)) \
    -v train="$folder/kjv-train.txt.partial" -v valid="$folder/kjv-valid.txt.partial" '{
    bytes += length($0) + 2
    print $0 "\n" > (bytes <= limit ? train : valid)
  }' "$folder/kjv.txt.partial"
  rm "$folder/kjv.txt.partial"
  mv "$folder/kjv-train.txt.partial" "$folder/kjv-train.txt"
  mv "$folder/kjv-valid.txt.partial" "$folder/kjv-valid.txt"
}

say "Packages"
tools/install_packages.sh
echo "complete"

say "Building (build/release/optimus)"
cmake --preset release > /dev/null
cmake --build --preset release --target optimus
optimus=build/release/optimus

say "Data: the King James Bible (data/)"
mkdir -p data
if [[ -f data/kjv-train.txt && -f data/kjv-valid.txt ]]; then
  echo "data/kjv-train.txt and data/kjv-valid.txt are there already"
else
  make_text data
  wc -c data/kjv-train.txt data/kjv-valid.txt
fi
for part in train valid; do
  if [[ -f data/kjv-$part.bin && data/kjv-$part.idx -nt data/kjv-$part.txt ]]; then
    echo "data/kjv-$part.bin and .idx are there already"
  else
    "$optimus" tokenize --out "data/kjv-$part" "data/kjv-$part.txt"
  fi
done

say "Training configs/quickstart.toml (runs/quickstart; a finished run is left as it is)"
"$optimus" train configs/quickstart.toml

say "Validation loss, on text the model has not seen (nats a token; a token is a byte)"
"$optimus" eval runs/quickstart --data data/kjv-valid

say "A sample"
"$optimus" generate runs/quickstart --prompt "In the beginning" --tokens 300 --temperature 0.8
echo

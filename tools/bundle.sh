#!/usr/bin/env bash
# Packs a built CUDA preset into a relocatable folder, so that a program built on one distribution (Debian 12, say) runs on
# a GPU host with another (Ubuntu 24.04): the program, its tests, and the small libraries that the host may lack. The
# host's own MPI, CUDA, cuDNN and NCCL are used; of several cuDNN the launcher prefers the newest.
#
# Usage: tools/bundle.sh [build folder] [output.tar.gz]     default: build/cuda, build/optimus-bundle.tar.gz
#
# On the host: tar -xf optimus-bundle.tar.gz, then bundle/optimus ..., or bundle/run tests/ops_tests ...
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."

build=${1:-build/cuda}
output=${2:-build/optimus-bundle.tar.gz}
staging=$(mktemp -d)
trap 'rm -rf "$staging"' EXIT
bundle=$staging/bundle
mkdir -p "$bundle"/{bin,tests,lib,hardware}

strip -o "$bundle/bin/optimus" "$build/optimus"
for program in "$build"/*_tests; do
  strip -o "$bundle/tests/$(basename "$program")" "$program"
done
cp hardware/*.toml "$bundle/hardware"
cp -r configs "$bundle"

# What the programs link to, less what belongs to the system's C library, to CUDA's libraries or to MPI.
host='^(linux-vdso|ld-linux|libc\.|libm\.|libpthread|libdl|librt|libstdc\+\+|libgcc_s|libmpi|libopen-|libhwloc|libevent|libz\.|libcu|libnccl|libnv|libudev)'
ldd "$build/optimus" "$build"/*_tests | awk '$2 == "=>" && $3 ~ "^/" { print $1, $3 }' | sort -u |
  while read -r name path; do
    [[ $name =~ $host ]] || cp -L "$path" "$bundle/lib/$name"
  done

cat > "$bundle/run" <<'RUN'
#!/usr/bin/env bash
# Runs a program of the bundle with its own libraries and the newest cuDNN that this host has.
here=$(dirname "$(readlink -f "$0")")
program=$1
shift
[[ -x $program ]] || program=$here/$program
# The version is in the file's name, or in that of the Python package that holds it.
version_of() {
  local real package
  real=$(readlink -f "$1")
  if [[ $real =~ libcudnn\.so\.([0-9]+\.[0-9]+\.[0-9]+) ]]; then
    echo "${BASH_REMATCH[1]}"
    return
  fi
  for package in "$(dirname "$real")"/../../../nvidia_cudnn_cu13-*.dist-info; do
    [[ $package =~ -([0-9.]+)\.dist-info ]] && echo "${BASH_REMATCH[1]}"
  done
}
packages=$(python3 -c 'import nvidia.cudnn; print(list(nvidia.cudnn.__path__)[0])' 2>/dev/null || true)
newest=$(for library in /usr/lib/*-linux-gnu/libcudnn.so.9 /usr/local/cuda/lib64/libcudnn.so.9 \
  "${CUDNN_PATH:-/nowhere}/lib/libcudnn.so.9" "${packages:-/nowhere}/lib/libcudnn.so.9"; do
  [[ -e $library ]] && echo "$(version_of "$library") $library"
done | sort -V | tail -n 1 | cut -d' ' -f2)
export LD_LIBRARY_PATH="${newest:+$(dirname "$newest"):}$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export OPTIMUS_HARDWARE="${OPTIMUS_HARDWARE:-$here/hardware}"
exec "$program" "$@"
RUN
cat > "$bundle/optimus" <<'RUN'
#!/usr/bin/env bash
exec "$(dirname "$(readlink -f "$0")")/run" bin/optimus "$@"
RUN
chmod +x "$bundle/run" "$bundle/optimus"
tar -C "$staging" -czf "$output" bundle
echo "$output: $(du -h "$output" | cut -f1)"

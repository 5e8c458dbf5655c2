#!/usr/bin/env bash
# Installs what Optimus needs to build, test and run its quickstart, on Debian 12 and Ubuntu 24.04, and the packages
# named as arguments. Does nothing, and needs neither root nor a network, when everything is there.
set -euo pipefail

packages=(
  build-essential g++ cmake ninja-build ccache
  libopenmpi-dev openmpi-bin
  libdnnl-dev ocl-icd-libopencl1 libfmt-dev libspdlog-dev libxxhash-dev
  libtomlplusplus-dev libcli11-dev nlohmann-json3-dev
  libgtest-dev libgmock-dev libbenchmark-dev
  bible-kjv  # the quickstart's text
  "$@"
)

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg -s "$package" 2>/dev/null || true)
  [[ $status == *"Status: install ok installed"* ]] || missing+=("$package")
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

as_root=()
if [[ $(id -u) -ne 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "These packages are missing, and installing them needs root or sudo: ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi

echo "Installing ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"

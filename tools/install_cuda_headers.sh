#!/usr/bin/env bash
# Fetches the header-only libraries of the CUDA backend, CUTLASS and cuDNN's frontend, as PyPI wheels into
# build/python, where CMake looks for them. Does nothing when they are there.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."

packages=(nvidia-cutlass==4.2.0.0 nvidia-cudnn-frontend==1.32.0)
folder=build/python

if [[ ! -f $folder/complete ]]; then
  python3 -m pip --version >/dev/null 2>&1 || tools/install_packages.sh python3-pip
  python3 -m pip install --quiet --root-user-action=ignore --no-deps --no-compile --upgrade --target "$folder" "${packages[@]}"
  touch "$folder/complete"
fi

#!/usr/bin/env bash
# Run a Python script as on a 64-bit ARM processor, by emulation:
#
#   tools/as_arm64.sh SITE SCRIPT [ARG ...]      (or -m MODULE in place of SCRIPT)
#
# SITE is a folder outside the repository that keeps an ARM64 Python and the runtime's wheels; the first run fills it (150 MB,
# on Debian and its kin), and nothing is installed anywhere else. Needs qemu-user. PYTHONPATH may hold the project's folders.
set -euo pipefail
command -v qemu-aarch64 >/dev/null || { echo "as_arm64: qemu-aarch64 is missing; install qemu-user" >&2; exit 2; }
mkdir -p "$1"
site=$(realpath "$1"); shift

if [[ ! -e $site/ready ]]; then
  # Lists and packages of the other architecture in a state of their own, so that the system's stays as it is.
  mkdir -p "$site"/{lists/partial,cache/archives/partial,debs,root,packages,wheels}
  state=(-o APT::Architecture=arm64 -o "Dir::State::lists=$site/lists" -o "Dir::Cache=$site/cache" -o Dir::State::status=/dev/null)
  apt=(apt-get -qq "${state[@]}" -o APT::Architectures=arm64 -o APT::Sandbox::User=root)
  "${apt[@]}" update
  python=$(apt-cache "${state[@]}" depends python3-minimal | sed -n 's/.*Depends: \(python3\.[0-9]*\)-minimal.*/\1/p' | head -1)
  (cd "$site/debs" && "${apt[@]}" download "$python-minimal" "lib$python-minimal" "lib$python-stdlib" \
     libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libcrypt1)
  for deb in "$site"/debs/*.deb; do dpkg -x "$deb" "$site/root"; done
  tags=(); for version in 28 27 17; do tags+=(--platform "manylinux_2_${version}_aarch64"); done
  # onnxruntime 1.32's library for ARM64 stops at its import under qemu 7.2; 1.26's runs.
  python3 -m pip download --quiet "${tags[@]}" --platform manylinux2014_aarch64 --python-version "${python#python}" \
    --only-binary=:all: -d "$site/wheels" numpy tokenizers jinja2 "onnxruntime==${ONNXRUNTIME:-1.26.0}"
  for wheel in "$site"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$site/packages"; done
  echo "$python" > "$site/ready"
fi
PYTHONPATH="$site/packages${PYTHONPATH:+:$PYTHONPATH}" \
  exec qemu-aarch64 -L "$site/root" "$(find "$site/root" -path "*/bin/$(cat "$site/ready")")" "$@"

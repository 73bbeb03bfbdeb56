#!/bin/sh
# What the native kernels need from the system: a C++ compiler. Without one (and without the right to install it) quire
# still works, on the slower reference ops.
set -eu
if command -v c++ >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get update -q && apt-get install -qy --no-install-recommends g++
else
    echo "quire: no C++ compiler found; install g++ (11 or newer) for the native kernels" >&2
fi

#!/bin/sh
# system_packages.sh COMMAND PACKAGE PURPOSE: install the package unless the command is there. Without the right to, or
# where it cannot be had, say what is missing and go on: everything that wants one of them does without.
set -eu
if command -v "$1" >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 &&
    apt-get update -q && apt-get install -qy --no-install-recommends "$2"; then
    exit 0
fi
echo "quire: no $1 found and $2 not installed; it is for $3" >&2

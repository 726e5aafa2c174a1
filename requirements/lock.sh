#!/usr/bin/env bash
# Make the hash-pinned locks anew from pyproject.toml (needs uv). One resolution for all: dev is solved first and the
# smaller ones are cut from it. Package index addresses are left out, so that any index can serve them.
set -euo pipefail
cd "$(dirname "$0")/.."
lock() {
    local name=$1
    shift
    uv pip compile pyproject.toml --quiet --universal --python-version 3.12 --generate-hashes --no-header \
        --no-emit-index-url --no-annotate "$@" -o "requirements/$name.txt"
}
lock dev --extra local --extra data --extra track --extra dev
lock quickstart --extra local --extra data --extra track --extra build -c requirements/dev.txt
lock core --extra build -c requirements/dev.txt

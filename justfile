# The commands that everybody needs. `just` lists them (pip install rust-just); every line also runs without it.

@_list:
    just --list

# the everyday tests, as in the README
test *ARGS:
    pytest -n 2 {{ARGS}}

# every combination, mutation tests, fuzzing and wheels
full *ARGS:
    pytest --full -n 2 {{ARGS}}

# what the pinned triton and nvcc make of the kernels: spilled registers, tensor cores
gates *ARGS:
    pytest -m gates -n 2 {{ARGS}}

# the tests of what differs from the branch main
changed BASE="main":
    git diff --name-only {{BASE}} | sed -nE -e 's#^(fastattn|tests)/([a-z]+)/.*#tests/\2#p' \
      -e 's#^(examples|benchmarks|tools)/.*#tests/\1#p' -e 's#^(kernels|csrc)/.*#tests/ops\ntests/cuda#p' \
      -e '/^tests\/test_.*py$/p' | sort -u | xargs -r ls -d | xargs -r pytest -n 2

# style and annotations
lint:
    .ci/lint

# the site, at http://127.0.0.1:8000
docs:
    mkdocs serve

# fastattn against its alternatives on this machine
report OUT="report":
    python benchmarks/report.py --out {{OUT}}

# The commands that everybody needs. `just` lists them (pip install rust-just); every line also runs without it.

@_list:
    just --list

# the everyday tests, as in the README
test *ARGS:
    pytest -n 2 {{ARGS}}

# every combination, mutation tests, fuzzing and wheels
full *ARGS:
    pytest --full -n 2 {{ARGS}}

# style
lint:
    ruff check .
    ruff format --check .

# the annotations of the package
types:
    mypy

# the site, at http://127.0.0.1:8000
docs:
    mkdocs serve

# fastattn against its alternatives on this machine
report OUT="report":
    python benchmarks/report.py --out {{OUT}}

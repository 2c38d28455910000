"""The Triton backend: `fastattn.kernels.<op>` is `kernels/<op>/` of the repository.

In an installed fastattn the ops' packages are in this folder (setup.py puts them there). In a checkout they are in the
top-level folder, which is added to the search path here. A folder `kernels` next to an installed fastattn belongs to
another project, so the path is added only next to csrc/.
"""

from pathlib import Path

_root = Path(__file__).resolve().parents[2]
if (_root / "csrc").is_dir():
    __path__.append(str(_root / "kernels"))

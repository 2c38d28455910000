"""The Triton backend: `fastattn.kernels.<op>` is `kernels/<op>/` of the repository.

An installed fastattn holds the ops' packages right here. In a checkout they lie in the top-level folder, which is added
to the search path below; both neighbours are asked for first, because beside an installed fastattn a folder `kernels`
is somebody else's package.
"""

from pathlib import Path

_root = Path(__file__).resolve().parents[2]
if (_root / "csrc").is_dir() and (_root / "setup.py").is_file():
    __path__.append(str(_root / "kernels"))

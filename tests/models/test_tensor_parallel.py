"""torch.distributed.tensor.parallel divides a model's heads and hidden units: losses and gradients stay the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_heads_and_hidden_units_in_two_processes():
    script = Path(__file__).with_name("tensor_parallel.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]

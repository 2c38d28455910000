"""The annotations of the public functions in a user's calls. Those of the package itself: .ci/lint."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastattn
from fastattn.generate.loop import Decodable

ROOT = Path(__file__).resolve().parents[1]

USE = """
from torch import Tensor
from typing_extensions import assert_type
import fastattn
from fastattn.nn import DecoderLayer, EncoderLayer, PendingResidual, PositionwiseFeedForward
from fastattn import AttentionMask, dropout_add_layer_norm, dropout_add_rms_norm, scaled_dot_product_attention

def use(q: Tensor, mask: AttentionMask, wanted: bool) -> None:
    out: Tensor = scaled_dot_product_attention(q, q, q, mask, 0.1, True, enable_gqa=True, backend="aten")
    both: tuple[Tensor, Tensor] = scaled_dot_product_attention(q, q, q, return_lse=True)
    scaled_dot_product_attention(q, q, q, backend="flash")  # type: ignore[arg-type]
    out = dropout_add_layer_norm(q, None, q, q).transpose(0, 1)
    both = dropout_add_rms_norm(q, q, q, return_sum=wanted)
    assert_type(fastattn.feed_forward(q, q, q, q, q, "swiglu"), Tensor)
    fastattn.feed_forward(q, q, q, q, q, "swish")  # type: ignore[arg-type]
    fastattn.linear_cross_entropy(q, q, q, reduction="avg")  # type: ignore[arg-type]
    fastattn.linear_cross_entropy(q, q, q, smooth_over="none")  # type: ignore[arg-type]
    assert_type(fastattn.explain("attention", q, q, q), fastattn.Explanation)
    assert_type(fastattn.explain(fastattn.FusedTransformer(9, 9, 0, 0)), fastattn.ModelExplanation)
    layer, summands = EncoderLayer(8, 8, 2, 4, 4), PendingResidual(q, None)
    assert_type(layer.forward(q), tuple[Tensor, Tensor | None])
    assert_type(layer.forward(summands), tuple[PendingResidual, Tensor | None])
    assert_type(DecoderLayer(8, 8, 2, 4, 4).forward(q, q)[0], Tensor)
    assert_type(layer.slf_attn.forward(summands, q, q)[0], PendingResidual)
    assert_type(layer.pos_ffn.forward(q), Tensor)

def typos() -> None:
    fastattn.use_backend("flash")  # type: ignore[arg-type]
    EncoderLayer(8, 8, 2, 4, 4, backend="flash")  # type: ignore[arg-type]
    PositionwiseFeedForward(8, 8, activation="swish")  # type: ignore[arg-type]
    fastattn.FusedTransformer(9, 9, 0, 0, scale_emb_or_prj="both")  # type: ignore[arg-type]
"""


def test_a_models_own_parameter_names_fit_the_protocol() -> None:
    """pyright compares names where they may be used; mypy does not."""
    for method in (Decodable.start_decoding, Decodable.next_logits):
        assert {p.kind for p in inspect.signature(method).parameters.values()} == {inspect.Parameter.POSITIONAL_ONLY}


@pytest.mark.full
def test_a_users_calls(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(USE)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--strict", "use.py"]
    # mypy does not see an editable install.
    environment = os.environ | {"PYTHONPATH": str(Path(fastattn.__file__).parents[1])}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout

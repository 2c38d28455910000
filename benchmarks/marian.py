"""Hugging Face's Marian models with random weights, in the shape of a case."""

from __future__ import annotations

from typing import Any

EOS, BOS = 1, 2


def build(case: Any) -> Any:
    """A MarianMTModel in eval mode. case: a cases.DecodingCase."""
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = {
        f"{stack}_{name}": size
        for stack in ("encoder", "decoder")
        for name, size in (("layers", case.n_layers), ("attention_heads", case.n_head), ("ffn_dim", case.d_inner))
    }
    pad = case.n_vocab - 1
    tokens = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": EOS, "bos_token_id": BOS}
    config = transformers.MarianConfig(
        vocab_size=case.n_vocab,
        d_model=case.d_model,
        scale_embedding=True,
        activation_function="relu",
        max_position_embeddings=max(case.length, case.new_tokens + 1) + 1,
        forced_eos_token_id=None,
        share_encoder_decoder_embeddings=True,
        **sizes,
        **tokens,
    )
    return transformers.MarianMTModel(config).eval()

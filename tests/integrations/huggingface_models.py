"""Tiny models of transformers with random weights, and batches for them."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECIAL = dict(vocab_size=99, pad_token_id=1, bos_token_id=0, eos_token_id=2)
SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
PAIR = SPECIAL | {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()}
PAIR |= dict(d_model=32, decoder_start_token_id=2, forced_eos_token_id=None)
STACK = SPECIAL | dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=64
)
WHISPER = dict(num_mel_bins=8, max_source_positions=12, max_target_positions=40)
T5 = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=8)
VIT = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# name -> the model's class, the config's class, and the config's arguments
MODELS = {
    "bart": ("BartForConditionalGeneration", "BartConfig", PAIR | dict(max_position_embeddings=64)),
    "marian": ("MarianMTModel", "MarianConfig", PAIR | dict(max_position_embeddings=64)),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", PAIR | dict(max_position_embeddings=64)),
    "m2m100": ("M2M100ForConditionalGeneration", "M2M100Config", PAIR | dict(max_position_embeddings=64)),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", PAIR | dict(max_position_embeddings=64)),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        PAIR | WHISPER | dict(suppress_tokens=None, begin_suppress_tokens=None),
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", SPECIAL | T5 | dict(decoder_start_token_id=1)),
    "bert": ("BertForMaskedLM", "BertConfig", STACK),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", STACK | dict(type_vocab_size=1)),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {n: size for n, size in STACK.items() if n in VIT} | dict(image_size=16, patch_size=8, num_labels=99),
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", SPECIAL | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "llama": ("LlamaForCausalLM", "LlamaConfig", STACK | dict(num_key_value_heads=2)),
}
# name -> the model's class, the reason why its attention is left, and the config's arguments
REFUSED = {
    "LED": (
        "LEDForConditionalGeneration",
        "by itself, without transformers' AttentionInterface",
        PAIR | dict(max_encoder_position_embeddings=16, attention_window=4, max_decoder_position_embeddings=16),
    ),
    "Gemma2": ("Gemma2ForCausalLM", "scores are capped by tanh", STACK | dict(num_key_value_heads=2, head_dim=8)),
    "GptOss": (
        "GptOssForCausalLM",
        "this model has attention sinks",
        STACK | dict(num_key_value_heads=2, head_dim=8, num_local_experts=4),
    ),
}
NOT_GENERATING = ("bert", "roberta", "vit")
LENGTHS = (9, 5, 7)


def build(name, **changes):
    model_class, config_class, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options | changes))
    for module in model.modules():  # dropout off, and weights large enough that a wrong mask shows
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for n, p in model.named_parameters():
            if p.dim() > 1 and "position" not in n and "norm" not in n:
                p.mul_(3.0)
    return eager(model)


def build_refused(name):
    model_class, _, options = REFUSED[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, f"{name}Config")(**options))
    return model.to(DEVICE).eval()


def eager(model):
    """The model in eval mode, its attention transformers' eager one."""
    model.set_attn_implementation("eager")
    for module in model.modules():  # in transformers 5.15 T5's stacks have configs of their own
        if isinstance(getattr(module, "config", None), transformers.PreTrainedConfig):
            module.config._attn_implementation = "eager"
    return model.to(DEVICE).eval()


def inputs_for(model, rows=slice(None), left=False):
    """A padded batch of LENGTHS, and where its logits count."""
    generator = torch.Generator().manual_seed(3)
    longest = max(LENGTHS[n] for n in range(3)[rows])
    ids = torch.randint(3, 99, (3, max(LENGTHS)), generator=generator)
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = ids.masked_fill(~real, 1)[rows, :longest].to(DEVICE)
    real = real[rows, :longest].to(DEVICE)
    if left:
        ids, real = ids.flip(1), real.flip(1)
    if model.config.model_type == "vit":
        images = torch.randn(3, 3, 16, 16, generator=generator)[rows].to(DEVICE, model.dtype)
        return {"pixel_values": images}, real.any(1)
    if model.config.model_type == "whisper":
        features = torch.randn(3, 8, 24, generator=generator)[rows].to(DEVICE, model.dtype)
        return {"input_features": features, "decoder_input_ids": ids}, real  # padding follows the targets
    inputs = {"input_ids": ids, "attention_mask": real.long()}
    if model.config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": ids.flip(1).clamp(min=2), "decoder_attention_mask": real.flip(1).long()}
        if not left:  # targets are padded at their end
            inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": real.long()}
    return inputs, real


def check_padded_batch(model):
    """The logits of a padded batch are those of its sentences alone."""
    with torch.no_grad():
        inputs, real = inputs_for(model)
        logits = model(**inputs).logits
        for n in range(3):
            alone, there = inputs_for(model, slice(n, n + 1))
            torch.testing.assert_close(logits[n][real[n]], model(**alone).logits[there], rtol=0, atol=1e-4)


def skip_unless_traced(model, inputs):
    """Skips where PyTorch cannot trace the untouched model in one graph: 2.11 has no copy.deepcopy, which
    encoder-decoders call."""
    torch._dynamo.reset()
    try:
        torch.compile(model, fullgraph=True, backend="eager")(**inputs)
    except torch._dynamo.exc.Unsupported as error:
        pytest.skip(f"the untouched model is not traced: {str(error).splitlines()[0]}")
    torch._dynamo.reset()
